"""Settings of the grids that divide a world: their ranks, and the parallel sizes of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar, TypeAlias

from pydantic import PositiveInt

from runtime_di.errors import Problem, SettingsError
from runtime_di.providers.process_groups.parallel import ParallelSettings
from runtime_di.providers.process_groups.rank_grid import EmbeddingRule, RankGrid
from runtime_di.settings.section import Section

Ends: TypeAlias = tuple[str, str]
"""The grid that sends and the grid that receives."""


class GridSettings(Section):
    """The ranks of one grid."""

    size: PositiveInt | None = None
    """Number of ranks of the grid, which follow those of the grid before it. If no grid has a size, all share the whole
    world; if all but one have a size, that one takes the remaining ranks."""
    parallel: ParallelSettings = ParallelSettings()
    """Parallel sizes of the grid."""


class GridsSettings(Section):
    """Base of a section whose fields are the grids of a world, in the order of their ranks."""

    links: ClassVar[Mapping[str, Ends]] = {}
    """Links by name, each with the grid that sends and the grid that receives."""

    @property
    def named(self) -> dict[str, GridSettings]:
        """Settings of every grid by name."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in values.items() if isinstance(value, GridSettings)}

    def layout(self, world_size: int, embedding: EmbeddingRule | None = None) -> dict[str, RankGrid]:
        """Lay out the grids on a world, each with the caller's embedding rule, if there is one.

        Raises:
            SettingsError: the grids do not fit the world.
        """
        if problems := list(self.problems(world_size)):
            raise SettingsError("The grids do not fit the world:", problems)
        sizes, grids, offset = self._sizes(world_size), {}, 0
        for name, grid in self.named.items():
            grids[name] = replace(grid.parallel.grid(sizes[name], embedding), offset=offset)
            offset += 0 if self._shared else sizes[name]
        return grids

    def problems(self, world_size: int) -> Iterable[Problem]:
        """Report what does not fit a world: grid sizes, parallel sizes, and data-parallel sizes of linked grids."""
        if wrong := [*self._size_problems(world_size)]:
            return wrong
        sizes = self._sizes(world_size)
        wrong = [
            replace(
                problem,
                where=f"grids.{name}.{problem.where}",
                what=problem.what.replace("the world size", "the grid's size"),
            )
            for name, grid in self.named.items()
            for problem in grid.parallel.problems(sizes[name])
        ]
        return wrong or [*self._link_problems(sizes)]

    @property
    def _shared(self) -> bool:
        return all(grid.size is None for grid in self.named.values())

    def _sizes(self, world_size: int) -> dict[str, int]:
        rest = world_size if self._shared else world_size - sum(grid.size or 0 for grid in self.named.values())
        return {name: grid.size or rest for name, grid in self.named.items()}

    def _size_problems(self, world_size: int) -> Iterator[Problem]:
        sizes = {name: grid.size for name, grid in self.named.items()}
        explicit = {name: size for name, size in sizes.items() if size is not None}
        if not explicit:
            return
        total = sum(explicit.values())
        factors = " = ".join(dict.fromkeys([" + ".join(explicit), " + ".join(map(str, explicit.values())), str(total)]))
        where, involved = f"grids.{[*explicit][-1]}.size", tuple(f"grids.{name}.size" for name in explicit)
        if (left := len(sizes) - len(explicit)) > 1:
            what = f"grids {', '.join(name for name in sizes if name not in explicit)} have no size"
            yield Problem(where, what, fix="set a size on all grids, on all but one, or on none")
        elif left and total >= world_size:
            rest = next(name for name in sizes if name not in explicit)
            what = f"{factors} leaves no rank of {world_size} for {rest}"
            yield Problem(where, what, fix=f"use {world_size - 1} or fewer in total", involves=involved)
        elif not left and total != world_size:
            what = f"{factors} is not the world size {world_size}"
            yield Problem(where, what, fix=f"start {total} ranks, or leave this size out", involves=involved)

    def _link_problems(self, sizes: Mapping[str, int]) -> Iterator[Problem]:
        data = {name: grid.parallel.data(sizes[name]) for name, grid in self.named.items()}
        for one, other in sorted({(min(ends), max(ends)) for ends in self.links.values()}):
            if data[one] % data[other] and data[other] % data[one]:
                what = f"{one} has {data[one]} data-parallel ranks and {other} {data[other]}: neither divides the other"
                yield Problem(f"grids.{one}.size", what, fix="change a size", involves=("grids",))
