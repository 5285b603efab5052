"""The goodput report: attributes every second of every worker of a run to exactly one account.

A run is a rectangle: its workers' places by the time that it took. A place counts from the user's command to the end
of the attempt, also while it is empty. Between two attempts all places are down. A step is the time from one commit to
the next: the times that the worker measured go to their accounts, and the rest is the script's own code. An incident
costs:

 - the step that the lost worker had in hand is wasted; its place is empty until a successor is forked, and the
   successor recovers until it takes part in a step;
 - the survivors' disturbed step counts like the undisturbed one before it, and the excess is recovery; so is the excess
   of the step at which a successor was taken in;
 - where all workers restarted at once after a loss (`Restarted`), the time until their first step is recovery;
 - steps that were taken again from an older state are repeated; steps that a rollback undid, steps that were left
   out because of a loss spike or of gradients that are not finite, and steps after the newest checkpoint of a run that
   ended early and has not gone on, are undone.

Workers of other hosts whose files are not here are not in the ledger.

These are pure functions: `attempt_log` reads the files, and `incidents` finds the incidents.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
import operator
from collections.abc import Mapping, Sequence

from paceline.events import (
    CheckpointSaved,
    Evaluated,
    EventsMerged,
    Record,
    TaskLost,
    TaskReady,
    TaskStarted,
    WorkerFailed,
    WorkerFinished,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerStarted,
)
from paceline.monitor.report.attempt_log import AttemptLog
from paceline.monitor.report.incidents import Incident, Rewinds, incidents_of, restart_of, resumed_from_step
from paceline.monitor.report.worker_time import ACCOUNTS, USEFUL, WorkerTime

__all__ = ["ACCOUNTS", "NUM_STRETCHES", "USEFUL", "AttemptTime", "GoodputLedger", "TimeShares", "goodput_ledger"]

NUM_STRETCHES = 120  # of the timeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttemptTime:
    """The worker-seconds of one attempt, by worker and account; none of them is down."""

    attempt: int
    state: str
    began: float
    ended: float
    first_step: int | None
    last_step: int | None
    workers: Mapping[int, Mapping[str, float]]

    @property
    def wall_s(self) -> float:
        return self.ended - self.began

    @property
    def worker_s(self) -> float:
        return sum(sum(accounts.values()) for accounts in self.workers.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeShares:
    """Where the time went as the run went on: worker-seconds by account, in equal stretches of
    `GoodputLedger.elapsed`.
    """

    stretch_s: float
    accounts: Mapping[str, Sequence[float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoodputLedger:
    """A run's time by account. `worker_s` and `wall_s` have the accounts of ACCOUNTS, and each adds up to the whole."""

    began: float
    ended: float
    attempts: tuple[AttemptTime, ...]
    workers: Mapping[int, Mapping[str, float]]  # worker-seconds by worker and account, over all attempts
    worker_s: Mapping[str, float]
    wall_s: Mapping[str, float]  # at each moment divided as the time of its workers, and what lies between attempts
    incidents: tuple[Incident, ...]
    members: tuple[tuple[float, int], ...]  # from this time on so many workers took part
    timeline: TimeShares
    elsewhere: tuple[int, ...]  # workers of other hosts, whose time is not counted

    @property
    def duration_s(self) -> float:
        return self.ended - self.began

    @property
    def num_lost(self) -> int:
        """Workers whose loss the run survived: others went on, or all began again at once."""
        survived = (one for one in self.incidents if one.kind == "loss" or one.source is not None)
        return sum(len(one.workers) for one in survived)

    @property
    def goodput(self) -> float:
        """The share of the wall time in useful work: the accounts of USEFUL, in steps that counted."""
        return sum(self.wall_s[account] for account in USEFUL) / self.duration_s if self.duration_s > 0 else 0.0

    def elapsed(self, when: float) -> float:
        """How long the run had been going at a moment, without the time between attempts."""
        return sum(min(max(when - book.began, 0.0), book.wall_s) for book in self.attempts)


def goodput_ledger(attempts: Sequence[AttemptLog]) -> GoodputLedger:
    """Book a run's attempts, given by their times; ValueError where there is none."""
    if not attempts:
        raise ValueError("there is nothing to book: no attempt of the run has left any file")
    attempts = _in_turn(attempts)
    began, ended = attempts[0].began, attempts[-1].ended
    found = [incidents_of(log, _gone_on_with(attempts[place + 1 :])) for place, log in enumerate(attempts)]
    incidents = list(itertools.chain.from_iterable(found))
    rewinds, stretches = Rewinds(incidents), _TimeStretches(sum(log.ended - log.began for log in attempts))
    workers: dict[int, dict[str, float]] = {}
    wall_s = dict.fromkeys(ACCOUNTS, 0.0)
    times: list[AttemptTime] = []
    before: Incident | None = None  # that ended the attempt before
    for log, own, later in itertools.zip_longest(attempts, found, attempts[1:]):
        stretches.begin(log.began)
        walls = _WallTime(log)
        begun_by = before if restart_of(log) is not None else None
        book = _attempt_time(log, own, rewinds, (stretches, walls), begun_by=begun_by)
        before = own[-1] if own else None
        stretches.end(log.ended)
        times.append(book)
        for account, seconds in walls.taken().items():
            wall_s[account] += seconds
        for worker, accounts in book.workers.items():
            total = workers.setdefault(worker, dict.fromkeys(ACCOUNTS, 0.0))
            for account, seconds in accounts.items():
                total[account] += seconds
        down_s = max(0.0, later.began - log.ended) if later is not None else 0.0
        wall_s["down"] += down_s
        for worker in book.workers:
            workers[worker]["down"] += down_s
        if own and own[-1].kind == "end" and down_s:
            own[-1].book("down", down_s * len(book.workers))
    return GoodputLedger(
        began=began,
        ended=ended,
        attempts=tuple(times),
        workers=dict(sorted(workers.items())),
        worker_s={account: sum(accounts[account] for accounts in workers.values()) for account in ACCOUNTS},
        wall_s=wall_s,
        incidents=tuple(incidents),
        members=tuple(itertools.chain.from_iterable(map(_members, attempts))),
        timeline=stretches.taken(),
        elsewhere=tuple(sorted(frozenset().union(*(log.elsewhere for log in attempts)) - workers.keys())),
    )


def _gone_on_with(later: Sequence[AttemptLog]) -> AttemptLog | None:
    """The first attempt whose workers started: others, which an accident ended before, went on from no step."""
    return next((log for log in later if resumed_from_step(log) is not None), None)


def _in_turn(attempts: Sequence[AttemptLog]) -> list[AttemptLog]:
    """One attempt after the other, also where clocks were set in between."""
    in_turn: list[AttemptLog] = []
    for log in attempts:
        began = max(log.began, in_turn[-1].ended) if in_turn else log.began
        in_turn.append(dataclasses.replace(log, began=began, ended=max(began, log.ended)))
    return in_turn


def _attempt_time(
    log: AttemptLog,
    incidents: Sequence[Incident],
    rewinds: Rewinds,
    takers: tuple[_TimeStretches, _WallTime],
    *,
    begun_by: Incident | None = None,
) -> AttemptTime:
    def note(began: float, ended: float, parts: Mapping[str, float]) -> None:
        for taker in takers:
            taker.add(began, ended, parts)

    own: dict[int, list[Record]] = {worker: [] for worker in range(log.workers) if worker not in log.elsewhere}
    for record in log.records:
        match record.event:
            case WorkerLost(rank=worker) | WorkerLeft(rank=worker) if worker in log.elsewhere:
                continue
            case (
                WorkerStarted()
                | TaskStarted()
                | TaskReady()
                | TaskLost()
                | Evaluated()
                | EventsMerged()
                | CheckpointSaved()
                | WorkerFinished()
            ) if record.worker is not None:
                own.setdefault(record.worker, []).append(record)
            case WorkerLost(rank=worker) | WorkerLeft(rank=worker):
                own.setdefault(worker, []).append(record)
            case _:
                pass
    places = {worker: WorkerTime(worker, log, incidents, rewinds, note, begun_by=begun_by) for worker in sorted(own)}
    for worker, place in places.items():
        for item in heapq.merge(log.steps(worker), own[worker], key=operator.attrgetter("time")):
            place.take(item)
    return AttemptTime(
        attempt=log.attempt,
        state=log.state,
        began=log.began,
        ended=log.ended,
        first_step=min((place.first_step for place in places.values() if place.first_step is not None), default=None),
        last_step=max((place.last_step for place in places.values() if place.last_step is not None), default=None),
        workers={worker: place.close() for worker, place in places.items()},
    )


def _members(log: AttemptLog) -> list[tuple[float, int]]:
    """How many workers took part, from each moment on at which that changed."""
    present: set[int] = set()
    lost: set[int] = set()  # whose successors take part when they have committed a step
    counts = [(log.began, 0)]
    for record in sorted(log.records, key=_effective):
        match record.event:
            case WorkerStarted(rank=worker) if worker not in lost:
                present.add(worker)
            case WorkerJoined(rank=worker):
                present.add(worker)
            case WorkerLost(rank=worker):
                lost.add(worker)
                present.discard(worker)
            case WorkerFinished(rank=worker) | WorkerFailed(rank=worker) | WorkerLeft(rank=worker):
                present.discard(worker)
            case _:
                pass
        if len(present) != counts[-1][1]:
            counts.append((max(_effective(record), log.began), len(present)))
    return [*counts, (log.ended, 0)]


def _effective(record: Record) -> float:
    """When it happened: a worker that hung, or was silent, had stopped taking part long before that was reported."""
    return record.time - (record.event.silent_s if isinstance(record.event, WorkerLost) else 0.0)


class _WallTime:
    """Divides an attempt's wall time as its workers' time, moment by moment: there may be more places at one moment
    than at another, and each counts the less then."""

    def __init__(self, log: AttemptLog) -> None:
        edges = {log.began, log.ended}
        for record in log.records:
            match record.event:
                case WorkerStarted(startup_s=startup_s):
                    edges.add(record.time - startup_s)
                case WorkerLeft() | WorkerFinished():
                    edges.add(record.time)
                case _:
                    pass
        self._edges = sorted(min(max(edge, log.began), log.ended) for edge in edges)
        self._sums = [dict[str, float]() for _ in self._edges]  # from each edge to the next

    def add(self, began: float, ended: float, parts: Mapping[str, float]) -> None:
        """Add the seconds of each account, spread evenly between two moments."""
        place = max(0, bisect.bisect_right(self._edges, began) - 1)
        while began < ended:
            stop = min(self._edges[place + 1], ended) if place + 1 < len(self._edges) else ended
            share = (stop - began) / (ended - began)
            for account, seconds in parts.items():
                self._sums[place][account] = self._sums[place].get(account, 0.0) + seconds * share
            parts = {account: seconds * (1 - share) for account, seconds in parts.items()}
            began, place = stop, place + 1

    def taken(self) -> dict[str, float]:
        """The seconds of the attempt, by account; time before the first worker has started counts as starting."""
        wall_s = dict.fromkeys(ACCOUNTS, 0.0)
        for began, ended, sums in zip(self._edges, self._edges[1:], self._sums, strict=False):
            whole = sum(sums.values())
            wall_s["start_up"] += 0.0 if whole else ended - began
            for account, seconds in sums.items():
                wall_s[account] += seconds / whole * (ended - began) if whole else 0.0
        return wall_s


class _TimeStretches:
    """Sums the accounts in equal stretches of the time that the attempts took."""

    def __init__(self, duration_s: float) -> None:
        self._width = max(duration_s, 1e-9) / NUM_STRETCHES
        self._sums = {account: [0.0] * NUM_STRETCHES for account in ACCOUNTS}
        self._began = self._elapsed = 0.0  # of the attempt; and what the earlier ones took

    def begin(self, began: float) -> None:
        self._began = began

    def end(self, ended: float) -> None:
        self._elapsed += ended - self._began

    def add(self, began: float, ended: float, parts: Mapping[str, float]) -> None:
        """Add the seconds of each account, spread evenly between two moments of the attempt."""
        start, stop = began - self._began + self._elapsed, ended - self._began + self._elapsed
        first, last = (min(max(int(edge / self._width), 0), NUM_STRETCHES - 1) for edge in (start, stop))
        for place in range(first, last + 1):
            share = 1.0
            if first != last:
                share = (min(stop, (place + 1) * self._width) - max(start, place * self._width)) / (stop - start)
            for account, seconds in parts.items():
                self._sums[account][place] += seconds * share

    def taken(self) -> TimeShares:
        return TimeShares(stretch_s=self._width, accounts=self._sums)
