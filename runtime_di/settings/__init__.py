"""Settings: the values from every source, merged into one validated object."""

from runtime_di.settings.capabilities import CudaDevice, Module, ReadableFile, Requirement, WritableFolder
from runtime_di.settings.explanation import Explanation
from runtime_di.settings.launch import LaunchSettings
from runtime_di.settings.layers import Layer
from runtime_di.settings.marks import Mark
from runtime_di.settings.model import RuntimeSettings
from runtime_di.settings.section import Section

__all__ = [
    "CudaDevice",
    "Explanation",
    "LaunchSettings",
    "Layer",
    "Mark",
    "Module",
    "ReadableFile",
    "Requirement",
    "RuntimeSettings",
    "Section",
    "WritableFolder",
]
