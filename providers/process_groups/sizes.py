"""Checks that parallel sizes fit a world."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt, prod
from typing import Literal, TypeAlias, get_args

from runtime_di.errors import Problem

Order: TypeAlias = Literal["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"]

_DENSE = ("tp", "cp")
_EXPERT = ("etp", "ep")
_PRODUCTS: tuple[tuple[str, ...], ...] = (("tp", "pp", "cp"), ("etp", "ep", "pp"))
_UNEVEN = ("order",)
_MOST_CHOICES = 6


def size_problems(
    world_size: int,
    sizes: Mapping[str, int | None],
    order: str,
    names: Mapping[str, str] | None = None,
    prefix: str = "",
) -> Iterator[Problem]:
    """Report sizes that do not fit a world, and the nearest that do.

    Args:
        world_size: ranks of the world.
        sizes: of tp, pp, cp, ep and etp; an etp of ``None`` is equal to tp.
        order: of the axes.
        names: of each axis, ``order`` and ``world_size`` in the reports; an axis without a name keeps its own.
        prefix: of each name, such as the path of a section.
    """
    explicit = {"world_size": world_size, **{axis: size for axis, size in sizes.items() if size is not None}}
    named = _NamedSizes(explicit | _with_etp(sizes), names or {}, prefix)
    if order not in get_args(Order):
        fix = f"choose from {', '.join(get_args(Order))}"
        yield named.problem("order", "is not an order of axes", fix, repr(order))
    if below := [axis for axis, size in explicit.items() if size < 1]:
        yield from (named.problem(axis, "must be at least 1", None) for axis in below)
        return
    unfit = _unfit_axes(world_size, sizes, order)
    wrong = [axes for axes in unfit if axes != _UNEVEN]
    for axes in wrong:
        others = {*wrong} - {axes}
        choices = {
            axis: [
                size
                for size in _divisors(world_size)
                if {*_unfit_axes(world_size, {**sizes, axis: size}, order)} <= others
            ]
            for axis in axes
            if explicit.get(axis, 1) > 1
        }
        yield named.indivisible(axes, choices)
    if unfit == [_UNEVEN]:
        dense, expert = named.factors(_DENSE), named.factors(_EXPERT)
        what = f"with pipeline stages and the order {order}, {expert} must equal {dense}"
        yield named.problem("order", what, "choose the order tp-cp-ep-dp-pp, or sizes with equal products", order)


def _with_etp(sizes: Mapping[str, int | None]) -> dict[str, int]:
    """Return the sizes; an etp that is not set is equal to tp."""
    etp = sizes["tp"] if sizes["etp"] is None else sizes["etp"]
    return {axis: size for axis, size in {**sizes, "etp": etp}.items() if size is not None}


def _unfit_axes(world_size: int, sizes: Mapping[str, int | None], order: str) -> list[tuple[str, ...]]:
    """List the axes whose product does not divide the world size, and ``_UNEVEN`` where the order forbids the sizes."""
    full = _with_etp(sizes)
    is_dense = sizes["etp"] is None and sizes["ep"] == 1
    wrong = [axes for axes in _PRODUCTS[: 1 if is_dense else None] if world_size % prod(full[axis] for axis in axes)]
    dense, expert = (prod(full[axis] for axis in axes) for axes in (_DENSE, _EXPERT))
    uneven = order == "tp-cp-ep-pp-dp" and full["pp"] > 1 and expert != dense
    return [*wrong, _UNEVEN] if uneven else wrong


@dataclass(frozen=True, slots=True)
class _NamedSizes:
    """Sizes, and their names in the reports."""

    sizes: Mapping[str, int]
    names: Mapping[str, str]
    prefix: str

    def name(self, axis: str) -> str:
        return self.names.get(axis, axis)

    def problem(self, axis: str, what: str, fix: str | None, value: str | None = None) -> Problem:
        return Problem(self.prefix + self.name(axis), what, value or str(self.sizes[axis]), fix=fix)

    def product(self, axes: Iterable[str]) -> int:
        return prod(self.sizes[axis] for axis in axes)

    def factors(self, axes: Sequence[str]) -> str:
        factors = " x ".join(str(self.sizes[axis]) for axis in axes)
        return f"{' x '.join(map(self.name, axes))} = {factors} = {self.product(axes)}"

    def indivisible(self, axes: Sequence[str], choices: Mapping[str, Sequence[int]]) -> Problem:
        """Report the first size that a change of itself alone fixes, with the nearest that fit; otherwise the first."""
        world_size, total = self.sizes["world_size"], self.product(axes)
        what = f"{self.factors(axes)} does not divide the world size {world_size}"
        for axis, fitting in choices.items():
            if fitting:
                nearest = sorted(fitting, key=lambda size: abs(size - self.sizes[axis]))[:_MOST_CHOICES]
                return self.problem(axis, what, f"choose {self.name(axis)} from {', '.join(map(str, sorted(nearest)))}")
        fix = f"choose sizes whose product divides {world_size}, or a world size that is a multiple of {total}"
        return self.problem(next(iter(choices)), what, fix)


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})
