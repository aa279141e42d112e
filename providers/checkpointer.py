"""Checkpoints of a run: saved by all ranks together, complete or not there at all, loaded at any parallel size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, Self

from pydantic import PositiveInt, model_validator
from pydantic_core import to_jsonable_python

from runtime_di.capabilities import WritableFolder
from runtime_di.providers.snapshot import ReadableCheckpoint, Snapshot, find_checkpoint, latest_complete
from runtime_di.section import Mark, Section

if TYPE_CHECKING:
    from runtime_di.capabilities import Requirement
    from runtime_di.launch import LaunchSettings
    from runtime_di.providers.process_groups import ProcessGroups
    from runtime_di.providers.vocabulary import Vocabulary

_AXES = ("tp", "pp", "cp", "ep", "etp", "order")


class CheckpointSettings(Section):
    """Where checkpoints are written and read."""

    folder: Annotated[Path | None, Mark.NOT_PORTABLE] = None
    """Where this run saves, and resumes from when it is started again; nothing is saved without one."""
    load: Annotated[Path | None, Mark.NOT_PORTABLE] = None
    """A checkpoint, or a folder of checkpoints, to start from while ``folder`` holds none."""
    load_settings: Annotated[bool, Mark.NOT_PORTABLE] = False
    """Whether the portable settings in the checkpoint named by ``load`` are taken where no other source sets them."""
    every: Annotated[PositiveInt, Mark.NOT_PORTABLE] = 1000
    """Steps from one save to the next."""
    keep: Annotated[PositiveInt | None, Mark.NOT_PORTABLE] = None
    """How many of the latest checkpoints stay in ``folder``; all of them if unset."""

    @property
    def start(self) -> Path | None:
        """The checkpoint that the run starts from, as this machine sees the disk now."""
        resumed = self.folder and latest_complete(self.folder)
        return resumed or (self.load and find_checkpoint(self.load))

    def requires(self, launch: LaunchSettings) -> Iterable[Requirement]:  # noqa: ARG002 - ranks alike
        if self.folder is not None:
            yield WritableFolder("folder", self.folder)
        if self.load is not None:
            yield ReadableCheckpoint("load", self.load, unless=self.folder)

    @model_validator(mode="after")
    def _settings_come_from_a_checkpoint(self) -> Self:
        if self.load_settings and self.load is None:
            raise ValueError(
                "load_settings reads the checkpoint named by load: set load as well, or unset load_settings"
            )
        return self


class Checkpointer(Protocol):
    """Saves and loads a state: a dict of stateful objects, tensors, and plain values nested in any way.

    DTensors are saved by shard and loaded at any other sharding. Other tensors are taken to be equal on all ranks,
    and one copy is kept. Plain values, and byte tensors such as ``torch.get_rng_state()``, may differ between ranks:
    each rank gets its own back in the same parallel layout; in another, those that differed stay as they are, which
    the log tells. Plain are ``None``, booleans, numbers, strings, bytes, lists, tuples and dicts.
    """

    @property
    def latest(self) -> Path | None:
        """The checkpoint that `load` would take, as this rank sees the disk."""
        ...

    def due(self, step: int, last: int | None = None) -> bool:
        """Whether a checkpoint is to be saved at the end of ``step``, the ``last`` one included.

        Never without a folder to save in.
        """
        ...

    def save(self, state: Mapping[str, Any], step: int) -> Path:
        """Save ``state``; collective. The step last saved or resumed from is not saved again.

        Raises:
            CheckpointError: on every rank, if one of them could not save its part; earlier checkpoints stay.
        """
        ...

    def load(self, state: dict[str, Any]) -> int | None:
        """Load what ``state`` names from the latest checkpoint of the folder, or else from ``load``; collective.

        Tensors are filled in place, stateful objects given their state, plain values replaced in the dict.

        Returns:
            The step of the checkpoint, or ``None`` if there is none to resume from.

        Raises:
            CheckpointError: on every rank, if one of them could not load its part; ``state`` may be half loaded.
        """
        ...


def open_checkpointer(
    settings: CheckpointSettings,
    process_groups: ProcessGroups,
    vocabulary: Vocabulary | None,
    snapshot: Mapping[str, Any],
) -> Checkpointer:
    """Make the checkpointer of this run; nothing is read or written yet.

    Args:
        settings: where, and how often.
        process_groups: the ranks that save and load together.
        vocabulary: told in every checkpoint, so that a later run can size its embedding without a tokenizer.
        snapshot: this run's portable settings, told in every checkpoint as they are now.
    """
    from runtime_di.providers.checkpoint_ranks import Ranks
    from runtime_di.providers.folder_checkpointer import FolderCheckpointer

    origin = Snapshot(
        step=0,
        settings=to_jsonable_python(snapshot),
        vocabulary=to_jsonable_python(vocabulary),
        world_size=process_groups.world_size,
        parallel={axis: getattr(process_groups.grid, axis) for axis in _AXES},
    )
    return FolderCheckpointer(settings, Ranks(process_groups.rank, process_groups.world_size), origin)
