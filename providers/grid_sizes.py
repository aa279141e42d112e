"""Which parallel sizes fit a world."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt, prod
from typing import Literal, TypeAlias, get_args

from runtime_di.errors import Problem

Order: TypeAlias = Literal["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"]

_DENSE = ("tp", "cp")
_EXPERT = ("etp", "ep")


def size_problems(
    world_size: int,
    sizes: Mapping[str, int | None],
    order: str,
    names: Mapping[str, str] | None = None,
    prefix: str = "",
) -> Iterator[Problem]:
    """Tell which sizes do not fit a world, and the nearest that do.

    Args:
        world_size: ranks of the world.
        sizes: of tp, pp, cp, ep and etp; etp is as large as tp if it is ``None``.
        order: of the axes.
        names: what the reader calls each axis, ``order`` and ``world_size``; as here unless given.
        prefix: put before a name to say where the value stands.
    """
    etp = sizes["etp"]
    given = {"world_size": world_size, **{axis: size for axis, size in sizes.items() if size is not None}}
    told = _Telling(given | {"etp": given["tp"] if etp is None else etp}, names or {}, prefix)
    if order not in get_args(Order):
        yield told.problem("order", "is no order of axes", f"choose from {', '.join(get_args(Order))}", repr(order))
    if below := [axis for axis, size in given.items() if size < 1]:
        yield from (told.problem(axis, "must be at least 1", None) for axis in below)
        return
    products = [("tp", "pp", "cp")] if etp is None and given["ep"] == 1 else [("tp", "pp", "cp"), ("etp", "ep", "pp")]
    wrong = [axes for axes in products if world_size % told.product(axes)]
    for axes in wrong:
        yield told.indivisible(axes, [axis for axis in axes if given.get(axis, 1) > 1])
    if not wrong and order == "tp-cp-ep-pp-dp" and given["pp"] > 1 and told.product(_EXPERT) != told.product(_DENSE):
        what = f"with pipeline stages and the order {order}, {told.factors(_EXPERT)} must equal {told.factors(_DENSE)}"
        yield told.problem("order", what, "choose the order tp-cp-ep-dp-pp, or sizes with equal products", order)


@dataclass(frozen=True, slots=True)
class _Telling:
    """Sizes, and what their reader calls them."""

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

    def indivisible(self, axes: Sequence[str], adjustable: Sequence[str]) -> Problem:
        """Blame the first size that could be mended alone, else the first."""
        world_size, total = self.sizes["world_size"], self.product(axes)
        what = f"{self.factors(axes)} does not divide the world size {world_size}"
        for axis in adjustable:
            rest = total // self.sizes[axis]
            if world_size % rest == 0:
                choices = ", ".join(map(str, _nearest_divisors(world_size // rest, self.sizes[axis])))
                return self.problem(axis, what, f"choose {self.name(axis)} from {choices}")
        fix = f"choose sizes whose product divides {world_size}, or a world size that is a multiple of {total}"
        return self.problem(adjustable[0], what, fix)


def _nearest_divisors(number: int, wanted: int, count: int = 6) -> list[int]:
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    divisors = {*small, *(number // divisor for divisor in small)}
    return sorted(sorted(divisors, key=lambda divisor: abs(divisor - wanted))[:count])
