"""One meeting of all ranks on a store, told apart from every other on it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from runtime_di.errors import AgreementError, Problem, ProblemsError, ServiceError
from runtime_di.launch import LaunchSettings
from runtime_di.providers.agreement import Agreement, told
from runtime_di.providers.minutes import Minutes, process
from runtime_di.providers.waiting import absent, poll

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_SETTLE_S = 2.0
_GRACE_S = 5.0
_DIFFERENT = "Ranks of one job must be started alike, and these differ:"
_SIZE = "launch.world_size"


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """One opening, told apart from every other on the same store.

    Every rank of the opening has the same number, and no earlier or later opening has it, whoever made it: ranks of
    these processes, of an attempt that failed half-way, or of a job that was started again on a store that lives on.
    Rank 0 takes the number and says what it has; the others compare, and object where they differ; rank 0 lets all of
    them go, or tells all of them why not. No rank's work grows with the world while ranks agree.
    """

    store: Store
    launch: LaunchSettings
    timeout_s: float
    agreement: Agreement = field(default_factory=Agreement)

    def hold(self) -> int:
        """Wait until every rank is here; return the number of this opening.

        Raises:
            AgreementError: ranks have something different, or a rank came twice; every rank that came raises it.
            ServiceError: some ranks did not come in time.
        """
        own = self.agreement.having({_SIZE: self.launch.world_size})
        return self._lead(own) if self.launch.rank == 0 else self._follow(own)

    def _lead(self, own: Agreement) -> int:
        number = self.store.add("taken", 1)
        minutes = Minutes(self.store, number)
        for key, text in {"fields": own.rendered, "digest": own.digest, "arrived/0": process()}.items():
            minutes.set(key, text)
        self.store.set("opening", str(number))
        in_time = self._all_came(minutes)
        if (latest := self._opening()) != number:
            second = Minutes(self.store, latest)
            for each in (minutes, second):
                each.object(0, {}, f"{process()} and {second.get('arrived/0')}")
            for counter in ("misfits", "heard"):
                second.count(counter, 1)
        error = self._judge(minutes, own, in_time)
        minutes.set("verdict", _dumped(error))
        if error:
            self._wait(lambda: minutes.count("heard") >= _num_heard_of(minutes), self._grace_s)
            raise error
        return number

    def _all_came(self, minutes: Minutes) -> bool:
        """Wait for the other ranks, or for what makes the meeting fail whoever comes; whether that was in time."""
        others, settled_at = self.launch.world_size - 1, float("inf")

        def done() -> bool:
            nonlocal settled_at
            if minutes.count("misfits"):
                settled_at = min(settled_at, time.monotonic() + self._settle_s)
            superseded = self._opening() != minutes.number
            return superseded or time.monotonic() > settled_at or minutes.count("arrivals") >= others

        return self._wait(done, self.timeout_s)

    def _judge(self, minutes: Minutes, own: Agreement, in_time: bool) -> ProblemsError | None:
        if in_time and not minutes.count("objections"):
            return None
        num_ranks = self.launch.world_size
        absent_ranks = [*minutes.absent(num_ranks)]
        if not in_time and not absent_ranks:  # the last of them came at the last moment
            in_time = self._wait(lambda: _num_heard_of(minutes) >= num_ranks - 1, self._settle_s)
        objections = [*minutes.objections()]
        if in_time and not objections:
            return None
        who = told(absent_ranks) if absent_ranks else f"{num_ranks - 1 - _num_heard_of(minutes)}"
        missing = f"{who} of {num_ranks} did not arrive"
        if not objections:
            return absent(missing, self.timeout_s)
        problems = [_twice(rank, twice) for rank, _, twice in objections if twice]
        deviations = {rank: deviation for rank, deviation, _ in objections if deviation}
        problems += own.problems(deviations, {*range(num_ranks)} - {*absent_ranks})
        problems += [] if in_time or not absent_ranks else absent(missing, self.timeout_s).problems
        return AgreementError(_DIFFERENT, problems)

    def _follow(self, own: Agreement) -> int:
        deadline, number = time.monotonic() + self.timeout_s, 0
        while True:
            if not self._wait(lambda: self._opening() not in (0, number), deadline - time.monotonic()):  # noqa: B023
                raise self._not_led(number, own)
            number = self._opening()
            minutes = Minutes(self.store, number)
            if minutes.has("verdict"):
                continue  # it was, before this process came
            misfit = self._arrive(minutes, own)
            patience_s = self.timeout_s + min(self.timeout_s, self._grace_s)
            if not self._wait(lambda: minutes.has("verdict") or self._opening() != number, patience_s):  # noqa: B023
                raise absent("rank 0 did not arrive, or left before it told who else did", patience_s)
            if minutes.has("verdict"):
                error = _loaded(minutes.get("verdict")) or misfit
                if error:
                    minutes.count("heard", 1)
                    raise error
                return number

    def _not_led(self, last: int, own: Agreement) -> ServiceError:
        """Tell that rank 0 did not come, and of its last meeting, over before this process came, what may show why."""
        if not last:
            return absent("rank 0 did not arrive", self.timeout_s)
        minutes, rank = Minutes(self.store, last), self.launch.rank
        had, arrived = "", f"arrived/{rank}"
        if minutes.has(arrived) and (there := minutes.get(arrived)) != process():
            had += f", with {there} as rank {rank},"
        if (size := json.loads(minutes.get("fields"))[_SIZE]) != own.said(_SIZE)[0]:
            had += f" of {size} ranks instead of {self.launch.world_size}"
        return absent(
            f"rank 0 did not arrive (its last meeting{had} was over before this process came)", self.timeout_s
        )

    def _opening(self) -> int:
        return int(self.store.get("opening")) if self.store.check(["opening"]) else 0

    def _arrive(self, minutes: Minutes, own: Agreement) -> AgreementError | None:
        """Take part, once though this process tries again; tell why rank 0 cannot count it, or ``None``."""
        rank, there = self.launch.rank, minutes.arrive(self.launch.rank)
        twice = "" if there == process() else f"{there} and {process()}"
        fields = own.rendered if minutes.get("digest") == own.digest else minutes.get("fields")
        misfits = [*self._misfits(own, twice, fields)]
        if twice or minutes.count(f"counted/{rank}", 1) == 1:
            deviation = own.deviation(fields)
            if deviation or twice:
                minutes.object(rank, deviation, twice)
            minutes.count("misfits" if misfits else "arrivals", 1)
        return AgreementError(_DIFFERENT, misfits) if misfits else None

    def _misfits(self, own: Agreement, twice: str, fields: str) -> Iterator[Problem]:
        """Tell why rank 0, which has ``fields``, cannot count this process."""
        if twice:
            yield _twice(self.launch.rank, twice)
        if _SIZE in own.deviation(fields):
            yield from own.problems({0: {_SIZE: (json.loads(fields)[_SIZE], None)}}, [self.launch.rank])

    @property
    def _settle_s(self) -> float:
        """For others to come, once a rank has come that makes the meeting fail whoever comes."""
        return min(_SETTLE_S, self.timeout_s / 2)

    @property
    def _grace_s(self) -> float:
        """For rank 0 to tell why the meeting failed, and for the others, who ask ever less often, to read it."""
        return _GRACE_S + self.launch.world_size / 10_000

    def _wait(self, done: Callable[[], bool], timeout_s: float) -> bool:
        return poll(done, timeout_s, self.launch.world_size)


def _num_heard_of(minutes: Minutes) -> int:
    return minutes.count("arrivals") + minutes.count("misfits")


def _twice(rank: int, who: str) -> Problem:
    return Problem("launch.rank", f"rank {rank} arrived twice: {who}", fix="give each process a rank of its own")


def _dumped(error: ProblemsError | None) -> str:
    if error is None:
        return ""
    problems = [asdict(problem) for problem in error.problems]
    return json.dumps([isinstance(error, AgreementError), error.heading, problems])


def _loaded(verdict: str) -> ProblemsError | None:
    if not verdict:
        return None
    differing, heading, problems = json.loads(verdict)
    kind = AgreementError if differing else ServiceError
    return kind(heading, [Problem(**problem) for problem in problems])
