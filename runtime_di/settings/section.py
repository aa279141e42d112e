"""A section of the settings: frozen values that one service reads."""

from __future__ import annotations

from collections.abc import Iterable

from runtime_di.settings.capabilities import Requirement
from runtime_di.settings.frozen import FrozenModel
from runtime_di.settings.launch import LaunchSettings


class Section(FrozenModel):
    """Base of a service's settings. `requires`, not validation, lists what the service needs of the machine."""

    def requires(self, launch: LaunchSettings) -> Iterable[Requirement]:
        """List what these values need of the machine of rank ``launch.rank``, without importing or opening anything."""
        return ()
