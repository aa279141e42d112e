"""The plan: the services that a container declares, in the order in which every rank builds them."""

from runtime_di.plan.declarations import RuntimeContainer, service
from runtime_di.plan.model import Plan

__all__ = ["Plan", "RuntimeContainer", "service"]
