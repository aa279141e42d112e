"""The entrypoints that runtime-di ships, one a file: its settings, its container and its runtime."""

from runtime_di.containers.training import TrainingContainer, TrainingRuntime, TrainingSettings

__all__ = ["TrainingContainer", "TrainingRuntime", "TrainingSettings"]
