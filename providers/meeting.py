"""One meeting of all ranks on a store, told apart from every other on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime_di.errors import Problem, ServiceError
from runtime_di.launch import LaunchSettings

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


@dataclass(frozen=True, slots=True)
class Meeting:
    """One opening, told apart from every other on the same store.

    Every rank of the opening has the same number, and no earlier or later opening has it, whoever made it: ranks of
    these processes, of an attempt that failed half-way, or of a job that was started again on a store that lives on.
    Rank 0 takes the number, the others join it, and rank 0 lets all of them go. No rank's work grows with the world.
    """

    store: Store
    launch: LaunchSettings
    timeout_s: float

    def hold(self) -> int:
        """Wait until every rank is here; return the number of this opening.

        Raises:
            ServiceError: some ranks did not come in time.
        """
        return self._lead() if self.launch.rank == 0 else self._follow()

    def _lead(self) -> int:
        number = self.store.add("opening", 1)
        others = self.launch.world_size - 1
        if not self._wait(lambda: self.store.add(f"{number}/arrivals", 0) >= others):
            missing = [rank for rank in range(1, others + 1) if not self.store.check([f"{number}/arrived/{rank}"])]
            raise absent(f"ranks {missing} of {others + 1} did not arrive", self.timeout_s)
        self.store.set(f"{number}/open", "1")
        return number

    def _follow(self) -> int:
        joined = seen = 0

        def let_go() -> bool:
            nonlocal joined, seen
            if not self.store.check(["opening"]):
                return False
            if (number := int(self.store.get("opening"))) != seen:
                seen = number
                if not self.store.check([f"{number}/open"]):
                    joined = number
                    self._arrive(number)
            return joined == seen and self.store.check([f"{joined}/open"])

        if not self._wait(let_go):
            raise absent("rank 0 did not arrive, or another rank did not and rank 0 tells which", self.timeout_s)
        return joined

    def _arrive(self, number: int) -> None:
        if self.store.add(f"{number}/arrived/{self.launch.rank}", 1) == 1:
            self.store.add(f"{number}/arrivals", 1)

    def _wait(self, done: Callable[[], bool]) -> bool:
        return poll(done, self.timeout_s, self.launch.world_size)


def poll(done: Callable[[], bool], timeout_s: float, world_size: int) -> bool:
    """Ask until it is so, ever less often and so that a store can answer every rank; tell whether it came to be.

    A wait inside torch's stores would hold back signals, and write to standard error each time it ends.
    """
    deadline, pause_s = time.monotonic() + timeout_s, 0.001
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.05 + world_size / 20_000)
    return True


def absent(what: str, timeout_s: float) -> ServiceError:
    """Make the error of ranks that did not come in time."""
    fix = "see why those ranks are late or gone, or raise distributed.timeout_s"
    return ServiceError("Ranks did not meet:", [Problem("process_groups", f"{what} within {timeout_s:g} s", fix=fix)])
