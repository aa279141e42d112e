"""How a world is divided into grids: which ranks each one has, and how these are divided in turn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar, TypeAlias

from pydantic import PositiveInt

from runtime_di.errors import Problem, SettingsError
from runtime_di.providers.parallel import ParallelSettings
from runtime_di.providers.rank_grid import EmbeddingRule, RankGrid
from runtime_di.section import Section

Ends: TypeAlias = tuple[str, str]
"""The grid that sends and the grid that receives."""


class GridSettings(Section):
    """The ranks of one grid."""

    size: PositiveInt | None = None
    """Ranks of the grid, which follow those of the grid before it. If no grid has a size, all share the whole world;
    if all but one have, that one takes the rest."""
    parallel: ParallelSettings = ParallelSettings()
    """How the grid's ranks are divided."""


class GridsSettings(Section):
    """Base of a section whose fields are the grids of a world, in the order of their ranks."""

    links: ClassVar[Mapping[str, Ends]] = {}
    """Name of each group that connects two grids, with the grid that sends and the grid that receives."""

    @property
    def named(self) -> dict[str, GridSettings]:
        """Name to settings of every grid."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in values.items() if isinstance(value, GridSettings)}

    def layout(self, world_size: int, embedding: EmbeddingRule | None = None) -> dict[str, RankGrid]:
        """Lay the grids out on a world, with a caller's rule for embeddings, if there is one, on each.

        Raises:
            SettingsError: they do not fit it.
        """
        if problems := list(self.problems(world_size)):
            raise SettingsError("The grids do not fit the world:", problems)
        sizes, grids, offset = self._sizes(world_size), {}, 0
        for name, grid in self.named.items():
            grids[name] = replace(grid.parallel.grid(sizes[name], embedding), offset=offset)
            offset += 0 if self._shared else sizes[name]
        return grids

    def problems(self, world_size: int) -> Iterable[Problem]:
        """Tell what does not fit a world: the sizes of the grids, those within a grid, and those that a link joins."""
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
        given = {name: size for name, size in sizes.items() if size is not None}
        if not given:
            return
        total = sum(given.values())
        factors = " = ".join(dict.fromkeys([" + ".join(given), " + ".join(map(str, given.values())), str(total)]))
        where, involved = f"grids.{[*given][-1]}.size", tuple(f"grids.{name}.size" for name in given)
        if (left := len(sizes) - len(given)) > 1:
            what = f"grids {', '.join(name for name in sizes if name not in given)} have no size"
            yield Problem(where, what, fix="give a size to all grids, to all but one, or to none")
        elif left and total >= world_size:
            what = f"{factors} leaves no rank of {world_size} to {next(name for name in sizes if name not in given)}"
            yield Problem(where, what, fix=f"give {world_size - 1} or fewer in all", involves=involved)
        elif not left and total != world_size:
            what = f"{factors} is not the world size {world_size}"
            yield Problem(where, what, fix=f"start {total} ranks, or leave this size out", involves=involved)

    def _link_problems(self, sizes: Mapping[str, int]) -> Iterator[Problem]:
        data = {name: grid.parallel.data(sizes[name]) for name, grid in self.named.items()}
        for one, other in sorted({(min(ends), max(ends)) for ends in self.links.values()}):
            if data[one] % data[other] and data[other] % data[one]:
                what = f"{one} has {data[one]} data-parallel ranks and {other} {data[other]}: neither divides the other"
                yield Problem(f"grids.{one}.size", what, fix="change a size", involves=("grids",))
