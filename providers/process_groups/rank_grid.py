"""The ranks of every group, by arithmetic alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal, TypeAlias, get_args

from runtime_di.errors import Problem, ServiceError, SettingsError
from runtime_di.providers.process_groups.sizes import Order, size_problems

Kind: TypeAlias = Literal[
    "tp", "cp", "dp", "pp", "tp_cp", "dp_cp", "tp_dp", "tp_dp_cp", "tp_pp",
    "etp", "ep", "edp", "etp_ep", "etp_ep_pp", "embedding", "position_embedding",
]  # fmt: skip
EmbeddingRule: TypeAlias = Callable[[tuple[int, ...]], Iterable[int]]

KINDS: tuple[Kind, ...] = get_args(Kind)
"""Every kind of group, in the order in which groups are created."""

_AXES: Mapping[str, tuple[str, ...]] = {kind: tuple(kind.split("_")) for kind in KINDS if "embedding" not in kind}
_LAYOUTS: Mapping[Order, tuple[tuple[Kind, ...], tuple[Kind, ...]]] = {
    "tp-cp-ep-dp-pp": (("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")),
    "tp-cp-ep-pp-dp": (("tp", "cp", "pp", "dp"), ("etp", "ep", "pp", "edp")),
}
"""Axes of the dense and of the expert grid of each order, fastest first."""

_Digits: TypeAlias = tuple[tuple[int, int], ...]
"""``(stride, size)`` of each axis, fastest first: the digits of a rank in mixed radix."""


@dataclass(frozen=True, kw_only=True)
class RankGrid:
    """A world laid out on a dense grid, ``tp*cp*dp*pp``, and on an expert grid, ``etp*ep*edp*pp``.

    Attributes:
        world_size: ranks on the grid.
        etp: expert-tensor size; ``tp`` for ``None``.
        order: axes, fastest first.
        offset: first rank of the grid, for a grid on a part of a world.
        embedding: returns the ranks of a pipeline group that have embeddings, the same stages in each group; the first
            and the last for ``None``. It is not called where there is one stage, whose rank has them all.

    Raises:
        SettingsError: sizes do not fit the world; it reports all of them.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    order: Order = "tp-cp-ep-dp-pp"
    offset: int = 0
    embedding: EmbeddingRule | None = None

    def __post_init__(self) -> None:
        sizes = {"tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep, "etp": self.etp}
        if problems := [*size_problems(self.world_size, sizes, self.order)]:
            raise SettingsError("The parallel sizes do not fit the world:", problems)
        if self.offset < 0:
            what = "a grid cannot start before rank 0"
            raise SettingsError("The grid does not fit the world:", [Problem("offset", what, str(self.offset))])
        object.__setattr__(self, "etp", self.etp or self.tp)

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Size of each axis of both grids."""
        tp, cp, pp, ep, etp = self.tp, self.cp, self.pp, self.ep, self.etp or self.tp
        dp, edp = self.world_size // (tp * cp * pp), self.world_size // (etp * ep * pp)
        return {"tp": tp, "cp": cp, "dp": dp, "pp": pp, "etp": etp, "ep": ep, "edp": edp}

    @cached_property
    def _strides(self) -> Mapping[str, int]:
        strides: dict[str, int] = {}
        for layout in _LAYOUTS[self.order]:
            stride = 1
            for axis in layout:
                strides[axis] = stride
                stride *= self.sizes[axis]
        return strides

    def __contains__(self, rank: int) -> bool:
        return self.offset <= rank < self.offset + self.world_size

    @property
    def axes(self) -> tuple[Kind, ...]:
        """Axes of the dense grid, slowest first, as a mesh names them."""
        return _LAYOUTS[self.order][0][::-1]

    @property
    def expert_axes(self) -> tuple[Kind, ...]:
        """Axes of the expert grid, slowest first."""
        return _LAYOUTS[self.order][1][::-1]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Index of a rank on every axis of both grids; ``{}`` for a rank that is not on the grid."""
        if rank not in self:
            return {}
        return {axis: (rank - self.offset) // self._strides[axis] % size for axis, size in self.sizes.items()}

    def rank_at(self, **coordinates: int) -> int:
        """Rank at these coordinates of the dense grid, such as ``dp=1, pp=0``; an axis that is not named is at 0.

        Raises:
            SettingsError: a coordinate is outside the grid.
        """
        sizes: dict[str, int] = {axis: self.sizes[axis] for axis in self.axes}
        if outside := [axis for axis, index in coordinates.items() if not 0 <= index < sizes.get(axis, 0)]:
            what = f"is not a coordinate of the dense grid, {sizes}"
            problems = [Problem(axis, what, str(coordinates[axis])) for axis in outside]
            raise SettingsError("There is no such rank:", problems)
        return self.offset + sum(self._strides[axis] * index for axis, index in coordinates.items())

    def group_of(self, rank: int, kind: Kind) -> tuple[int, ...]:
        """Ranks that form a group with ``rank``, ascending; ``()`` if it is in no group of this kind."""
        _check(kind)
        if rank not in self:
            return ()
        if kind not in _AXES:
            return tuple(ranks) if rank in (ranks := self._embedding(self.group_of(rank, "pp"), kind)) else ()
        digits = self._digits(_AXES[kind])
        first = rank - sum((rank - self.offset) // stride % size * stride for stride, size in digits)
        return tuple(first + step for step in _steps(digits))

    def groups(self, kind: Kind) -> list[tuple[int, ...]]:
        """List every group of a kind, in the order of their first ranks."""
        _check(kind)
        if kind not in _AXES:
            return [tuple(self._embedding(stages, kind)) for stages in self.groups("pp")]
        steps = _steps(self._digits(_AXES[kind]))
        layout = next(layout for layout in _LAYOUTS[self.order] if {*_AXES[kind]} <= {*layout})
        firsts = _steps(self._digits(axis for axis in layout if axis not in _AXES[kind]))
        return [tuple(self.offset + first + step for step in steps) for first in firsts]

    def embedding_ranks(self, stages: tuple[int, ...]) -> list[int]:
        """Ranks of a pipeline group that have embeddings, ascending.

        Raises:
            SettingsError: the caller's rule returns no rank, or one of another group.
        """
        if self.pp == 1 or self.embedding is None:
            return sorted({stages[0], stages[-1]})
        try:
            ranks = sorted({*self.embedding(stages)})
        except Exception as error:
            raise _embedding_rule_error(f"failed for the pipeline group {[*stages]}: {error!r}") from error
        if not ranks or not {*ranks} <= {*stages}:
            raise _embedding_rule_error(f"returned {ranks}, which is not part of the pipeline group {[*stages]}")
        return ranks

    def embedding_stages(self, rank: int) -> list[int]:
        """Stages with embeddings in the pipeline of ``rank``; in the first pipeline for a rank that is not on the grid.

        Raises:
            SettingsError: see `embedding_ranks`.
        """
        stages = self.group_of(rank, "pp") or self.group_of(self.offset, "pp")
        return [stages.index(member) for member in self.embedding_ranks(stages)]

    def partition(self, kind: Kind) -> Hashable:
        """Identify the division of the grid into groups: kinds with equal partitions have equal groups on every rank.

        A rank in no embedding group counts as a group of one. The result depends on sizes and on whether there is an
        embedding rule, which are equal on all ranks.
        """
        if kind == "position_embedding" or (kind == "embedding" and self.pp == 1):
            return ()
        if kind == "embedding":
            return self.partition("pp") if not self.embedding and self.pp == 2 else kind  # noqa: PLR2004
        merged: list[tuple[int, int]] = []
        for stride, size in self._digits(_AXES[kind]):
            if merged and prod(merged[-1]) == stride:
                merged[-1] = (merged[-1][0], merged[-1][1] * size)
            elif size > 1:
                merged.append((stride, size))
        return tuple(merged)

    def _digits(self, axes: Iterable[str]) -> _Digits:
        return tuple(sorted((self._strides[axis], self.sizes[axis]) for axis in axes))

    def _embedding(self, stages: tuple[int, ...], kind: Kind) -> list[int]:
        return [stages[0]] if kind == "position_embedding" else self.embedding_ranks(stages)


def _check(kind: str) -> None:
    if kind not in KINDS:
        fix = f"choose from {', '.join(KINDS)}"
        raise ServiceError(
            "There is no such group:", [Problem("process_groups", f"there is no kind of group named {kind!r}", fix=fix)]
        )


def _embedding_rule_error(what: str) -> SettingsError:
    fix = "provide a callable that takes the ranks of a pipeline group and returns those that have embeddings"
    return SettingsError("Embedding groups cannot be formed:", [Problem("embedding", f"the rule {what}", fix=fix)])


def _steps(digits: _Digits) -> list[int]:
    """List the distances, ascending, from the first rank of a group to each of its ranks."""
    steps = [0]
    for stride, size in digits:
        steps = [index * stride + step for index in range(size) for step in steps]
    return steps
