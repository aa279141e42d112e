"""The rendezvous protocol: all ranks of a job join one generation on a store, or all raise the same error.

A generation G is one attempt of all ranks to start. Every rank returns the same G. Every other attempt on that store
has another G: a retry in these processes, an attempt that failed half-way, and a restart of the job. ``[...]`` is how
long a rank polls; ``timeout_s`` is the startup timeout::

    rank 0                                             every other rank R
    add 1 to num_generations: the new value is G
    set G/fields, G/digest, G/arrived/0
    set newest_generation = G                     -->  poll newest_generation [timeout_s]
                                                       set G/arrived/R unless it is set
                                                       compare its digest with G/digest
                                                       on a mismatch: set G/mismatch/N, N = next mismatch_count
    poll G/arrivals = world size - 1 [timeout_s]  <--  add 1 to G/arrivals, or to G/rejections
    set G/decision = "" or the error              -->  poll G/decision [timeout_s + grace, twice timeout_s at most]
    on "": return G                                    on "": return G
    on an error:                                       on an error:
      poll G/acknowledgements [grace], raise      <--    add 1 to G/acknowledgements, raise

    key                    value                                            written by     read by
    num_generations        counter of the generations begun                 rank 0         rank 0
    newest_generation      the newest generation                            rank 0         all, polled
    G/fields, G/digest     the values of rank 0 and their hash              rank 0         others
    G/arrived/R            host and process id of the first process R       rank R         all, to name ranks
    G/counted/R            counter of the attempts of R: the first counts   rank R         rank R
    G/arrivals             counter of arrived ranks                         others         rank 0, polled
    G/rejections           counter of processes that are not an arrival     any rank       rank 0, polled
    G/mismatch_count       counter of mismatch reports                      any rank       rank 0
    G/mismatch/N           rank, its differing values, duplicate processes  any rank       rank 0
    G/decision             "" or the error as JSON                          rank 0         others, polled
    G/acknowledgements     counter of processes that have read the error    any rank       rank 0, polled

What else can happen:

- A rank differs in some value: it arrives and reports its mismatch. Rank 0 decides once all ranks have arrived.
- A process has another world size, or a rank that has arrived already: it reports its mismatch and is rejected, since
  it must not count towards the world size. Rank 0 decides 2 s after the first rejection, or half of ``timeout_s`` if
  that is less, so that other ranks can report too.
- Ranks are missing after ``timeout_s``: the decision names them, beside any mismatches.
- A rank finds G/decision written when it arrives: it polls for a newer generation until ``timeout_s`` has passed.
- One process arrives in G again after its own timeout: it is counted once.
- A second rank 0 begins a newer generation: the first sees ``newest_generation`` change and reports the duplicate in
  both generations, so both fail. A rank that has no decision of the older generation joins the newer one.
- Rank 0 is gone: the others end with a missing-ranks error once their time for G/decision has passed.
- The grace period, 5 s and 0.1 ms a rank, keeps rank 0, which may host the store, until the others have read an error.

No rank's work grows with the world size as long as all ranks agree. `barriers` lists the keys that are
written below ``G/`` once the generation is joined.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime_di.errors import AgreementError, Problem, ProblemsError, ServiceError
from runtime_di.providers.distributed.agreement import Agreement, agreement_error
from runtime_di.providers.distributed.errors import format_ranks, missing_ranks_error
from runtime_di.providers.distributed.rendezvous.keys import RendezvousKeys, process_name
from runtime_di.providers.distributed.rendezvous.polling import poll
from runtime_di.settings.launch import LaunchSettings

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_REPORT_S = 2.0
_GRACE_S = 5.0
_WORLD_SIZE = "launch.world_size"
_NEWEST = "newest_generation"


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """One rank's part in the protocol.

    Attributes:
        store: shared by all ranks of the job.
        launch: rank and world size of this process.
        timeout_s: for the other ranks to arrive.
        agreement: values of this rank, compared with those of rank 0.
    """

    store: Store
    launch: LaunchSettings
    timeout_s: float
    agreement: Agreement = field(default_factory=Agreement)

    def join(self) -> int:
        """Wait until every rank has arrived; return the generation, which is equal on all ranks.

        Raises:
            AgreementError: ranks differ, or two processes have one rank; every rank that arrived raises it.
            ServiceError: some ranks did not arrive in time.
        """
        own = self.agreement.extended_with({_WORLD_SIZE: self.launch.world_size})
        return self._lead(own) if self.launch.rank == 0 else self._follow(own)

    def _lead(self, own: Agreement) -> int:
        generation = self.store.add("num_generations", 1)
        keys = RendezvousKeys(self.store, generation)
        for key, text in {"fields": own.rendered, "digest": own.digest, "arrived/0": process_name()}.items():
            keys.set(key, text)
        self.store.set(_NEWEST, str(generation))
        in_time = self._poll_arrivals(keys)
        if (newest := self._generation()) != generation:
            _report_duplicate_rank_0(keys, RendezvousKeys(self.store, newest))
        error = self._decide(keys, own, in_time)
        keys.decide(error)
        if error:
            self._poll(lambda: keys.count("acknowledgements") >= _num_compared(keys), self._grace_s)
            raise error
        return generation

    def _poll_arrivals(self, keys: RendezvousKeys) -> bool:
        """Poll until rank 0 can decide; return ``False`` if ranks are missing when the timeout ends."""
        num_others, decide_at = self.launch.world_size - 1, float("inf")

        def can_decide() -> bool:
            nonlocal decide_at
            if keys.count("rejections"):
                decide_at = min(decide_at, time.monotonic() + self._report_s)
            superseded = self._generation() != keys.generation
            return superseded or time.monotonic() > decide_at or keys.count("arrivals") >= num_others

        return self._poll(can_decide, self.timeout_s)

    def _decide(self, keys: RendezvousKeys, own: Agreement, in_time: bool) -> ProblemsError | None:
        """Return the error that every rank raises, or ``None`` where all may start."""
        if in_time and not keys.count("mismatch_count"):
            return None
        num_ranks = self.launch.world_size
        missing = [*keys.missing(num_ranks)]
        if not in_time and not missing:  # the last rank has arrived at the deadline, and is not counted yet
            in_time = self._poll(lambda: _num_compared(keys) >= num_ranks - 1, self._report_s)
        mismatches = [*keys.mismatches()]
        if in_time and not mismatches:
            return None
        who = format_ranks(missing) if missing else f"{num_ranks - 1 - _num_compared(keys)}"
        late = missing_ranks_error(f"{who} of {num_ranks} did not arrive", self.timeout_s)
        if not mismatches:
            return late
        problems = [_duplicate_rank(rank, duplicates) for rank, _, duplicates in mismatches if duplicates]
        by_rank = {rank: differences for rank, differences, _ in mismatches if differences}
        problems += own.problems(by_rank, {*range(num_ranks)} - {*missing})
        problems += [] if in_time or not missing else late.problems
        return agreement_error(problems)

    def _follow(self, own: Agreement) -> int:
        deadline, generation = time.monotonic() + self.timeout_s, 0
        while True:
            if not self._poll(lambda: self._generation() not in (0, generation), deadline - time.monotonic()):  # noqa: B023
                raise self._rank_0_missing(generation, own)
            generation = self._generation()
            keys = RendezvousKeys(self.store, generation)
            if keys.has("decision"):
                continue  # rank 0 decided before this process arrived
            rejection = self._arrive(keys, own)
            decision_s = self.timeout_s + min(self.timeout_s, self._grace_s)
            if not self._poll(lambda: keys.has("decision") or self._generation() != generation, decision_s):  # noqa: B023
                raise missing_ranks_error("rank 0 did not arrive, or left before it published a decision", decision_s)
            if keys.has("decision"):
                if error := keys.decision() or rejection:
                    keys.count("acknowledgements", 1)
                    raise error
                return generation

    def _arrive(self, keys: RendezvousKeys, own: Agreement) -> AgreementError | None:
        """Arrive and report mismatches, counted once a process; return why this process is rejected, if it is."""
        rank, registered = self.launch.rank, keys.arrive(self.launch.rank)
        duplicates = "" if registered == process_name() else f"{registered} and {process_name()}"
        fields = own.rendered if keys.get("digest") == own.digest else keys.get("fields")
        differences = own.differences(fields)
        reasons = [*self._rejection_reasons(own, duplicates, fields)]
        if duplicates or keys.count(f"counted/{rank}", 1) == 1:
            if differences or duplicates:
                keys.report_mismatch(rank, differences, duplicates)
            keys.count("rejections" if reasons else "arrivals", 1)
        return agreement_error(reasons) if reasons else None

    def _rejection_reasons(self, own: Agreement, duplicates: str, fields: str) -> Iterator[Problem]:
        """Say why this process does not count towards the world size of rank 0, whose values are ``fields``."""
        if duplicates:
            yield _duplicate_rank(self.launch.rank, duplicates)
        if _WORLD_SIZE in own.differences(fields):
            yield from own.problems({0: {_WORLD_SIZE: (json.loads(fields)[_WORLD_SIZE], None)}}, [self.launch.rank])

    def _rank_0_missing(self, last: int, own: Agreement) -> ServiceError:
        """Create the error of a missing rank 0; ``last`` is the generation that was decided before, 0 if none was."""
        if not last:
            return missing_ranks_error("rank 0 did not arrive", self.timeout_s)
        keys, rank = RendezvousKeys(self.store, last), self.launch.rank
        had, arrived = [], f"arrived/{rank}"
        if keys.has(arrived) and (registered := keys.get(arrived)) != process_name():
            had.append(f"{registered} as rank {rank}")
        if (size := json.loads(keys.get("fields"))[_WORLD_SIZE]) != own.value_and_source(_WORLD_SIZE)[0]:
            had.append(f"{size} ranks instead of {self.launch.world_size}")
        details = f", with {' and '.join(had)}," if had else ""
        return missing_ranks_error(
            f"rank 0 did not arrive (its last generation{details} was decided before this process arrived)",
            self.timeout_s,
        )

    def _generation(self) -> int:
        """Read the newest generation; 0 before the first."""
        return int(self.store.get(_NEWEST)) if self.store.check([_NEWEST]) else 0

    @property
    def _report_s(self) -> float:
        """How long other ranks can report mismatches after the first rejection."""
        return min(_REPORT_S, self.timeout_s / 2)

    @property
    def _grace_s(self) -> float:
        """How long an error stays on the store for the others, who poll at growing intervals, to read."""
        return _GRACE_S + self.launch.world_size / 10_000

    def _poll(self, done: Callable[[], bool], timeout_s: float) -> bool:
        return poll(done, timeout_s, self.launch.world_size)


def _report_duplicate_rank_0(own: RendezvousKeys, newer: RendezvousKeys) -> None:
    """Make both generations fail; in the newer one this process counts as rejected, and as having read the error."""
    for keys in (own, newer):
        keys.report_mismatch(0, {}, f"{process_name()} and {newer.get('arrived/0')}")
    for counter in ("rejections", "acknowledgements"):
        newer.count(counter, 1)


def _num_compared(keys: RendezvousKeys) -> int:
    return keys.count("arrivals") + keys.count("rejections")


def _duplicate_rank(rank: int, processes: str) -> Problem:
    return Problem("launch.rank", f"rank {rank} arrived twice: {processes}", fix="give each process its own rank")
