"""The entrypoints that runtime-di ships; each file has an entrypoint's settings, container and runtime."""

from runtime_di.containers.converter import ConverterContainer, ConverterRuntime, ConverterSettings
from runtime_di.containers.inference import InferenceContainer, InferenceRuntime, InferenceSettings
from runtime_di.containers.mimo import MimoContainer, MimoGridsSettings, MimoRuntime, MimoSettings
from runtime_di.containers.rl import RLContainer, RLGridsSettings, RLRuntime, RLSettings
from runtime_di.containers.training import TrainingContainer, TrainingRuntime, TrainingSettings

__all__ = [
    "ConverterContainer",
    "ConverterRuntime",
    "ConverterSettings",
    "InferenceContainer",
    "InferenceRuntime",
    "InferenceSettings",
    "MimoContainer",
    "MimoGridsSettings",
    "MimoRuntime",
    "MimoSettings",
    "RLContainer",
    "RLGridsSettings",
    "RLRuntime",
    "RLSettings",
    "TrainingContainer",
    "TrainingRuntime",
    "TrainingSettings",
]
