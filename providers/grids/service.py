"""Several grids in one world, each with its own groups and mesh, and the links between them."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from runtime_di.errors import Problem, ServiceError
from runtime_di.lifecycle.teardown import as_generator
from runtime_di.providers.distributed import c10d
from runtime_di.providers.distributed.barriers import announce_failure, barriers
from runtime_di.providers.distributed.world import World, join_generation
from runtime_di.providers.grids.links import Link
from runtime_di.providers.grids.settings import GridsSettings
from runtime_di.providers.process_groups.creation import create_group, create_groups
from runtime_di.providers.process_groups.mesh import open_expert_mesh, open_mesh, open_shard_mesh
from runtime_di.providers.process_groups.rank_grid import EmbeddingRule, RankGrid
from runtime_di.providers.process_groups.service import ProcessGroups
from runtime_di.providers.process_groups.settings import DistributedSettings
from runtime_di.settings.launch import LaunchSettings

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True)
class ModuleGrid(ProcessGroups):
    """The groups of one rank on one grid; a rank that is not on the grid is in none of its groups."""

    @property
    def is_here(self) -> bool:
        """Whether this rank is on the grid."""
        return self.rank in self.grid

    @cached_property
    def mesh(self) -> DeviceMesh:
        """Mesh of the dense axes, see `open_mesh`.

        Raises:
            ServiceError: this rank is not on the grid.
        """
        return open_mesh(self)

    @cached_property
    def shard_mesh(self) -> DeviceMesh:
        """Mesh of ``pp, dp_cp, tp``, see `open_shard_mesh`; raises as `mesh` does."""
        return open_shard_mesh(self)

    @cached_property
    def expert_mesh(self) -> DeviceMesh:
        """Mesh of the expert axes, see `open_expert_mesh`; raises as `mesh` does."""
        return open_expert_mesh(self)


class Grids(Mapping[str, ModuleGrid]):
    """All grids of the world by name, in the order of their ranks; every rank has all of them.

    Attributes:
        links: the groups that connect grids, by name.
    """

    def __init__(self, grids: Mapping[str, ModuleGrid], links: Mapping[str, Link]) -> None:
        self._grids, self.links = dict(grids), dict(links)

    @classmethod
    def pretend(
        cls, settings: GridsSettings, world_size: int = 1, rank: int = 0, embedding: EmbeddingRule | None = None
    ) -> Grids:
        """Pretend to be one rank of these grids, without torch.distributed; everything but groups and meshes works."""
        layout = settings.layout(world_size, embedding)
        grids = {name: ModuleGrid.pretend(grid, rank) for name, grid in layout.items()}
        return cls(grids, {name: Link(name, layout[a], layout[b], rank) for name, (a, b) in settings.links.items()})

    @property
    def here(self) -> dict[str, ModuleGrid]:
        """The grids that this rank is on."""
        return {name: grid for name, grid in self.items() if grid.is_here}

    def __getitem__(self, name: str) -> ModuleGrid:
        if name not in self._grids:
            raise NoSuchGridError(
                "There is no such grid:", [Problem(name, "unknown", fix=f"choose from {', '.join(self)}")]
            )
        return self._grids[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._grids)

    def __len__(self) -> int:
        return len(self._grids)


class NoSuchGridError(ServiceError, KeyError):
    """The requested grid does not exist."""


def open_grids(
    settings: GridsSettings,
    distributed: DistributedSettings,
    launch: LaunchSettings,
    process_groups: ProcessGroups,
    embedding: EmbeddingRule | None = None,
) -> Generator[Grids, BaseException | None, None]:
    """Create this rank's groups on every grid, and the groups that link grids.

    Every rank creates the same number of groups in a world that is not adopted.

    Args:
        settings: the grids and their links.
        distributed: how ranks communicate.
        launch: rank and world size of this process.
        process_groups: of the world that the grids divide.
        embedding: returns the ranks of a pipeline group that have embeddings, instead of its first and last; it is not
            called where there is one stage.

    Raises:
        SettingsError: the grids do not fit the world.
    """
    if process_groups.world is None:
        yield Grids.pretend(settings, launch.world_size, launch.rank, embedding)
        return
    layout = settings.layout(launch.world_size, embedding)
    world = join_generation(process_groups.world, launch, distributed.startup_timeout_s)
    opened = _opened(layout, settings, distributed, launch, world, device_type=process_groups.device_type)
    yield from as_generator(opened)


@contextmanager
def _opened(
    layout: Mapping[str, RankGrid],
    settings: GridsSettings,
    distributed: DistributedSettings,
    launch: LaunchSettings,
    world: World,
    *,
    device_type: str,
) -> Iterator[Grids]:
    from torch.distributed.distributed_c10d import PrefixStore

    rank, timeout = launch.rank, distributed.startup_timeout
    store = world.store and PrefixStore(f"grids {next(world.grids_numbers)}", world.store)
    with ExitStack() as stack:
        stack.enter_context(announce_failure(store, rank))
        grids, links = {}, {}
        for name, grid in layout.items():
            own = stack.enter_context(create_groups(grid, rank, world, timeout, distributed.groups))
            grids[name] = ModuleGrid(grid=grid, rank=rank, device_type=device_type, world=world, _groups=own)
            grids[name].set_timeout(distributed.timeout_s)
        for name, (source, target) in settings.links.items():
            ends = layout[source], layout[target]
            ranks = sorted({member for end in ends for member in range(end.offset, end.offset + end.world_size)})
            group = stack.enter_context(create_group(ranks, rank, world, timeout, name))
            if group:
                c10d.set_timeout(group, distributed.timeout)
            links[name] = Link(name, *ends, rank, group)
        timeouts_s = distributed.startup_timeout_s, distributed.timeout_s
        stack.enter_context(barriers(store, launch, *timeouts_s, parent=world.store))
        yield Grids(grids, links)
