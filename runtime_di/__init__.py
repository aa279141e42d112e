"""The dependency-injection service container for distributed ML runtimes."""

from runtime_di.errors import (
    AgreementError,
    CapabilityError,
    ClosedError,
    CloseError,
    OverrideError,
    PlanError,
    Problem,
    RuntimeDIError,
    ServiceDisabledError,
    ServiceError,
    SettingsError,
    VocabularyError,
)
from runtime_di.phases import Phase
from runtime_di.plan.declarations import RuntimeContainer, service
from runtime_di.plan.model import Plan
from runtime_di.runtime import Runtime
from runtime_di.settings.capabilities import CudaDevice, Module, ReadableFile, Requirement, WritableFolder
from runtime_di.settings.launch import LaunchSettings
from runtime_di.settings.marks import Mark
from runtime_di.settings.model import RuntimeSettings
from runtime_di.settings.section import Section

__all__ = [
    "AgreementError",
    "CapabilityError",
    "CloseError",
    "ClosedError",
    "CudaDevice",
    "LaunchSettings",
    "Mark",
    "Module",
    "OverrideError",
    "Phase",
    "Plan",
    "PlanError",
    "Problem",
    "ReadableFile",
    "Requirement",
    "Runtime",
    "RuntimeContainer",
    "RuntimeDIError",
    "RuntimeSettings",
    "Section",
    "ServiceDisabledError",
    "ServiceError",
    "SettingsError",
    "VocabularyError",
    "WritableFolder",
    "service",
]
