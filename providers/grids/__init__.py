"""Several grids in one world, for reinforcement learning and multi-module runs."""

from runtime_di.providers.grids.links import Link
from runtime_di.providers.grids.rngs import open_module_rngs
from runtime_di.providers.grids.rollout import Rollout, RolloutSettings, open_rollout
from runtime_di.providers.grids.service import Grids, ModuleGrid, open_grids
from runtime_di.providers.grids.settings import GridSettings, GridsSettings

__all__ = [
    "GridSettings",
    "Grids",
    "GridsSettings",
    "Link",
    "ModuleGrid",
    "Rollout",
    "RolloutSettings",
    "open_grids",
    "open_module_rngs",
    "open_rollout",
]
