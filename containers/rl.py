"""The RL entrypoint: the services of split.py on a trainer and a rollout grid, and the rollout."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar

from runtime_di.containers.split import SplitContainer, SplitRuntime, SplitSettings
from runtime_di.errors import Problem
from runtime_di.phases import Phase
from runtime_di.plan import service
from runtime_di.providers.grids import GridSettings, GridsSettings, Rollout, RolloutSettings, open_rollout
from runtime_di.settings import Mark


class RLGridsSettings(GridsSettings):
    """The trainer and the rollout grid; without sizes both have all ranks."""

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
    """Sampling by the rollout."""

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
    """Services of a reinforcement-learning run.

    Inherited from split.py, training.py and worker.py: TOKENIZER tokenizer; VOCABULARY vocabulary; RUNTIME log, writer,
    store, embedding, timers, microbatches; DISTRIBUTED device, process_groups, mesh, shard_mesh, expert_mesh,
    checkpointer, grids; RNG rng, rngs. Declared here: WARMUP rollout.
    """

    rollout = service(
        Phase.WARMUP,
        open_rollout,
        SplitContainer.settings.provided.rollout,
        SplitContainer.grids,
        SplitContainer.rngs,
    )


class RLRuntime(SplitRuntime, container=RLContainer):
    """The services of a reinforcement-learning run, as attributes."""

    settings: RLSettings
    rollout: Rollout
