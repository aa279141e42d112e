"""The dependency-injection service container for distributed ML runtimes."""

from runtime_di.capabilities import CudaDevice, Module, ReadableFile, Requirement, WritableFolder
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
from runtime_di.launch import LaunchSettings
from runtime_di.phases import Phase
from runtime_di.plan import Plan
from runtime_di.runtime import Runtime
from runtime_di.section import Mark, Section
from runtime_di.services import RuntimeContainer, service
from runtime_di.settings import RuntimeSettings

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
