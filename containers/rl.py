"""The entrypoint of reinforcement learning: one set of processes that trains and generates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar

from runtime_di.containers.split import SplitContainer, SplitRuntime, SplitSettings
from runtime_di.errors import Problem
from runtime_di.phases import Phase
from runtime_di.providers.grid_settings import GridSettings, GridsSettings
from runtime_di.providers.rollout import Rollout, RolloutSettings, open_rollout
from runtime_di.section import Mark
from runtime_di.services import service


class RLGridsSettings(GridsSettings):
    """Who trains and who generates: all ranks do both, unless the grids have sizes."""

    links: ClassVar = {"weights": ("trainer", "rollout"), "samples": ("rollout", "trainer")}

    trainer: GridSettings = GridSettings()
    """Ranks that train."""
    rollout: GridSettings = GridSettings()
    """Ranks that generate."""


class RLSettings(SplitSettings):
    """Settings of a reinforcement-learning run."""

    leading: ClassVar = "trainer"

    grids: Annotated[RLGridsSettings, Mark.NOT_PORTABLE] = RLGridsSettings()
    """Ranks that train and ranks that generate."""
    rollout: RolloutSettings = RolloutSettings()
    """How samples are drawn."""

    def rules(self) -> Iterable[Problem]:
        yield from super().rules()
        trainer, rollout = (self.grids.named[name].parallel.tensor for name in ("trainer", "rollout"))
        where, unit = "vocabulary.divisible_by", self.vocabulary.divisible_by * trainer
        if self.vocabulary.padded_size is not None:
            where, unit = "vocabulary.padded_size", self.vocabulary.padded_size
        if unit % rollout:
            what = (
                f"the {rollout} tensor-parallel ranks of the rollout cannot share rows padded to a multiple of {unit}"
            )
            yield Problem(where, what, fix=f"make it a multiple of {rollout}", involves=("grids",))


class RLContainer(SplitContainer):
    """Services of a reinforcement-learning run."""

    rollout = service(
        Phase.WARMUP,
        open_rollout,
        SplitContainer.settings.provided.rollout,
        SplitContainer.grids,
        SplitContainer.rngs,
    )


class RLRuntime(SplitRuntime, container=RLContainer):
    """What a reinforcement-learning run holds."""

    settings: RLSettings
    rollout: Rollout
