"""Loads checkpoints and never writes one: for processes that generate or convert."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, Self

from pydantic import model_validator
from pydantic_core import to_jsonable_python

from runtime_di.providers.snapshot import ReadableCheckpoint, Snapshot, find_checkpoint, layout_of
from runtime_di.section import Mark, Section

if TYPE_CHECKING:
    from runtime_di.capabilities import Requirement
    from runtime_di.launch import LaunchSettings
    from runtime_di.providers.process_groups import ProcessGroups
    from runtime_di.providers.vocabulary import Vocabulary


class LoadSettings(Section):
    """Which checkpoint is read."""

    load: Annotated[Path | None, Mark.NOT_PORTABLE] = None
    """A checkpoint, or a folder of checkpoints, to start from."""
    load_settings: Annotated[bool, Mark.NOT_PORTABLE] = False
    """Whether the portable settings in the checkpoint named by ``load`` are taken where no other source sets them."""

    @property
    def start(self) -> Path | None:
        """The checkpoint that the run starts from, as this machine sees the disk now."""
        return self.load and find_checkpoint(self.load)

    def requires(self, launch: LaunchSettings) -> Iterable[Requirement]:
        if self.load is not None:
            yield ReadableCheckpoint("load", self.load)

    @model_validator(mode="after")
    def _settings_come_from_a_checkpoint(self) -> Self:
        if self.load_settings and self.load is None:
            raise ValueError(
                "load_settings reads the checkpoint named by load: set load as well, or unset load_settings"
            )
        return self


class CheckpointLoader(Protocol):
    """Loads a state: a dict of stateful objects, tensors, and plain values nested in any way.

    DTensors are loaded at any sharding, whatever they were saved with. Other tensors are taken to be equal on all
    ranks. Plain values, and byte tensors such as ``torch.get_rng_state()``, may differ between ranks: each rank gets
    its own back in the same parallel layout; in another, it gets what the ranks that had a value had alike, and those
    that differed stay as they are, which the log tells.
    Plain are ``None``, booleans, numbers, strings, bytes, lists, tuples and dicts.
    """

    @property
    def latest(self) -> Path | None:
        """The checkpoint that `load` would take, as this rank sees the disk."""
        ...

    @property
    def weights_only(self) -> bool:
        """Whether `latest`, as the first rank sees it, holds the weights of a model alone and nothing more; collective.

        Raises:
            CheckpointError: its snapshot cannot be read.
        """
        ...

    def load(self, state: dict[str, Any]) -> int | None:
        """Load what ``state`` names, and nothing else that the checkpoint holds; collective.

        Tensors are filled in place, stateful objects given their state, plain values replaced in the dict.

        Returns:
            The step of the checkpoint, or ``None`` if there is none to start from.

        Raises:
            CheckpointError: on every rank, if one of them could not load its part; ``state`` may be half loaded.
        """
        ...


def open_checkpoint_loader(
    settings: LoadSettings, process_groups: ProcessGroups, vocabulary: Vocabulary | None = None
) -> CheckpointLoader:
    """Make the loader of this run; nothing is read yet.

    Args:
        settings: which checkpoint.
        process_groups: the ranks that load together.
        vocabulary: tells how to mend rows that were padded for another tensor-parallel size.
    """
    from runtime_di.providers.checkpoint_ranks import Ranks
    from runtime_di.providers.folder_loader import FolderLoader

    own = Snapshot(step=0, settings={}, vocabulary=to_jsonable_python(vocabulary), **layout_of(process_groups.grid, {}))
    return FolderLoader(settings, Ranks(process_groups.rank, process_groups.world_size), own)
