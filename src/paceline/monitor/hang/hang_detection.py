"""Finds the worker that the others wait for: pure functions of what all workers do, and of how long things took before.

In each group the members count the collectives that they enter. A worker that has entered fewer collectives than the
others, while these wait, is *absent*. Different calls under one number are a *mismatch*. Two sets of workers that wait
for each other in two groups are a *circle*. Mismatches and circles never recover, so they are reported at once.

A wait is overdue when it has lasted MARGIN_S longer than expected. Expected are three steps of this run, or one and a
half times the longest wait of its kind that ended well.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from paceline.comm.flight_recorder import HELD, RecordedCollective
from paceline.monitor.hang.worker_activity import WorkerActivity
from paceline.units import duration_text, workers_text

__all__ = ["HangDetector", "HangFinding", "cause_text", "finding_text", "mismatches", "outlook_text"]

MARGIN_S = 5.0
FIRST_S = 20.0  # expected at most before there is a step to measure by: compilers and caches are warmed up
STEPS, PATIENCE = 3.0, 1.5  # times a step; times the longest wait
CIRCLE_S = 2.0  # both sets have waited so long
SAME_CALLS = "All workers must make the same calls in the same order: look for a branch that only some take"

Signature = tuple[str, str, str, int]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HangFinding:
    """Workers that wait for others in vain."""

    kind: Literal["absent", "mismatch", "circle"]
    named: tuple[int, ...]  # the workers that seem to cause the wait
    waiting: tuple[int, ...]  # the workers that wait for them
    waited_s: float  # the longest
    call: RecordedCollective  # of the workers that wait
    others_call: RecordedCollective | None = None  # of the named workers, in a mismatch or a circle

    @property
    def is_certain(self) -> bool:
        """Whether waiting longer cannot resolve it."""
        return self.kind != "absent"

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for the same finding at another moment."""
        return self.kind, self.named, self.call.group, self.call.sequence


class HangDetector:
    """Looks at all workers, about once a second; remembers only how long things take."""

    def __init__(self) -> None:
        self.limit_s = math.inf  # how long workers wait at most
        self._step_s: float | None = None
        self._open: dict[int, tuple[int, str, float]] = {}  # worker -> serial, name, how long it has waited
        self._longest_s: dict[str, float] = {}  # by name, of waits that ended well
        self._suspected: set[tuple[object, ...]] = set()

    def look(self, activities: Mapping[int, WorkerActivity]) -> list[HangFinding]:
        """Return overdue waits, and mismatches and circles that were also there at the last look.

        `activities` contain the calls if any worker has waited for some time.
        """
        self.limit_s = min((doing.limit_s for doing in activities.values()), default=math.inf)
        self._learn(activities)
        certain = [*mismatches(activities), *circles(activities)]
        before, self._suspected = self._suspected, {finding.key for finding in certain}
        found = [finding for finding in certain if finding.key in before]
        if certain:
            return found
        return [one for one in absences(activities) if one.waited_s >= min(self.limit_s, self.due_s(one.call))]

    def due_s(self, call: RecordedCollective) -> float:
        """Return how long a wait for this call may take before it is reported."""
        steps_s = FIRST_S if self._step_s is None else STEPS * self._step_s
        return min(self.limit_s / 2, max(steps_s, PATIENCE * self._longest_s.get(_name(call), 0.0))) + MARGIN_S

    def _learn(self, activities: Mapping[int, WorkerActivity]) -> None:
        steps_s = [seconds for doing in activities.values() for seconds in doing.steps_s]
        self._step_s = statistics.median(steps_s) if steps_s else None
        for worker, doing in activities.items():
            before = self._open.pop(worker, None)
            if before is not None and before[0] != doing.waits_for:
                self._longest_s[before[1]] = max(before[2], self._longest_s.get(before[1], 0.0))
            if (call := doing.waiting) is not None:
                self._open[worker] = (call.serial, _name(call), doing.waited_s)


def absences(activities: Mapping[int, WorkerActivity]) -> list[HangFinding]:
    """Return which workers keep which waiting at this moment, however short; the longest wait first."""
    found: list[HangFinding] = []
    for group, members in _groups(activities).items():
        entered = {worker: activities[worker].entered(group) if worker in activities else 0 for worker in members}
        least = min(entered.values())
        named = tuple(worker for worker, count in entered.items() if count == least)
        ahead = [worker for worker in members if worker not in named and activities[worker].state != "gone"]
        if not ahead or any(worker in activities and activities[worker].state == "gone" for worker in named):
            continue  # no worker waits; or the awaited one has ended, which is reported elsewhere
        longest = max(ahead, key=lambda worker: _idle_s(activities[worker]))
        call, waiting = (
            activities[longest].call(group, least + 1) or activities[longest].waiting,
            activities[longest].waiting,
        )
        if call is not None and call.kind == "transfer" and (waiting is None or waiting.group != group):
            continue  # a sender need not wait until its message is taken
        if call is not None:
            waited_s = _idle_s(activities[longest])
            found.append(HangFinding(kind="absent", named=named, waiting=tuple(ahead), waited_s=waited_s, call=call))
    return sorted(found, key=lambda finding: -finding.waited_s)


def mismatches(activities: Mapping[int, WorkerActivity]) -> list[HangFinding]:
    """For each group the first number under which members have entered different calls."""
    found: list[HangFinding] = []
    for group, members in _groups(activities).items():
        calls: dict[int, dict[int, RecordedCollective]] = {}
        for worker in members:
            for call in activities[worker].calls if worker in activities else ():
                if call.group == group:
                    calls.setdefault(call.sequence, {})[worker] = call
        for _, said in sorted(calls.items()):
            kinds: dict[Signature, list[int]] = {}
            for worker, call in said.items():
                kinds.setdefault(_signature(call), []).append(worker)
            if len(kinds) > 1:
                found.append(_mismatch(sorted(kinds.values(), key=lambda workers: (-len(workers), workers)), said))
                break
    return found


def circles(activities: Mapping[int, WorkerActivity]) -> list[HangFinding]:
    """Two sets of workers that wait for each other, in two groups."""
    waits = [finding for finding in absences(activities) if finding.waited_s >= CIRCLE_S]
    for one, other in itertools.permutations(waits, 2):
        blocked = [worker for worker in one.named if worker in other.waiting and activities[worker].waits_for]
        back = [worker for worker in other.named if worker in one.waiting and activities[worker].waits_for]
        if len(blocked) == len(one.named) and back and len(blocked) <= len(back):
            named = tuple(blocked)
            return [dataclasses.replace(one, kind="circle", named=named, others_call=other.call)]
    return []


def finding_text(finding: HangFinding, activities: Mapping[int, WorkerActivity], places: Mapping[int, str]) -> str:
    """Say it; `places`: where workers are in the user's code, as far as they have answered."""
    waiting = workers_text(finding.waiting)
    if finding.kind == "mismatch" and finding.others_call is not None:
        return (
            f"workers are in different collectives: number {finding.call.sequence} is "
            f"{_sized(finding.others_call)} for {workers_text(finding.named)}, and {_sized(finding.call)} for "
            f"{waiting}. {SAME_CALLS}"
        )
    if finding.kind == "circle" and finding.others_call is not None:
        named, theirs, ours = workers_text(finding.named), _call_text(finding.others_call), _call_text(finding.call)
        return (
            f"{_workers_named(finding.named, activities)} {_wait(finding.named)} in {theirs}, which {waiting} "
            f"{_have(finding.waiting)} not entered; {waiting} {_wait(finding.waiting)} in {ours}, which {named} "
            f"{_have(finding.named)} not entered. {SAME_CALLS}"
        )
    stopped = [worker for worker in finding.named if worker in activities and activities[worker].state == "stopped"]
    said = f"{_workers_named(finding.named, activities)} "
    if stopped:
        is_all = len(stopped) == len(finding.named)
        subset = "" if is_all else f"({workers_text(stopped)}) "
        said += f"{subset}{'is' if len(stopped) == 1 else 'are'} stopped (SIGSTOP, or a debugger) and "
    if finding.call.kind == HELD:
        said += f"{_keep(finding.named)} the parameter servers from answering"
    else:
        said += f"{_have(finding.named)} not entered {_call_text(finding.call)}"
    for worker in finding.named[:3]:
        said += f"; {_where(worker, activities, places, alone=len(finding.named) == 1)}"
    return f"{said}; {waiting} {_have(finding.waiting)} waited {duration_text(finding.waited_s)}"


def cause_text(
    finding: HangFinding, activities: Mapping[int, WorkerActivity], places: Mapping[int, str], limit_s: float
) -> str:
    """Say why a run goes on without the named workers; the finding itself has been reported."""
    named, is_one = _workers_named(finding.named, activities), len(finding.named) == 1
    at = "".join(
        f" at {places[worker]}" if is_one else f", worker {worker} at {places[worker]}"
        for worker in finding.named[:3]
        if places.get(worker)
    )
    are_stopped = all(worker in activities and activities[worker].state == "stopped" for worker in finding.named)
    silent = f"silent, as {'it was' if is_one else 'they were'} stopped (SIGSTOP, or a debugger),"
    how = silent if are_stopped else f"hanging{at}"
    return (
        f"{named} {'was' if is_one else 'were'} {how} and {'was' if is_one else 'were'} ended: the others had "
        f"stood still for {duration_text(finding.waited_s)} (timeout_s is {limit_s:g})"
    )


def outlook_text(
    finding: HangFinding, activities: Mapping[int, WorkerActivity], *, limit_s: float, goes_on: bool, host: str
) -> str:
    """Say what will happen if the wait goes on; where the run `goes_on` without the named workers, what happens now.

    `host`: where this is read.
    """
    left_s = limit_s - finding.waited_s
    if not math.isfinite(left_s) or left_s < 1.0:
        return ""
    if finding.kind == "circle":
        return f". They wait for each other, so the job ends in {left_s:.0f} s"
    when = f"in {left_s:.0f} s (timeout_s)"
    if not goes_on or finding.is_certain:
        return f". The job ends {when} if that does not change"
    named = [activities[worker] for worker in finding.named if worker in activities]
    if any(doing.state == "stopped" for doing in named):
        return ""  # nothing is heard of it, and that ends it sooner
    them = "it" if len(finding.named) == 1 else "them"
    at_hosts = sorted({doing.host for doing in named})
    where = "" if at_hosts in ([], [host]) else f" on {at_hosts[0]}" if len(at_hosts) == 1 else ", each on its host,"
    pids = " ".join(str(doing.pid) for doing in named)
    now = f"; `kill -9 {pids}`{where} does it now" if named else ""
    return f". The run gives {them} up {when} and goes on{now}"


def _groups(activities: Mapping[int, WorkerActivity]) -> dict[int, tuple[int, ...]]:
    """Return the members of each group in use; of the run's own groups only the newest generation counts."""
    newest = max((_generation(doing) for doing in activities.values()), default=-1)
    found: dict[int, tuple[int, ...]] = {}
    for doing in activities.values():
        for place, entry in enumerate(doing.groups):
            if place > 0 or _generation(doing) in (-1, newest):
                found.setdefault(entry.id, entry.members)
    return found


def _generation(doing: WorkerActivity) -> int:
    word, _, number = doing.groups[0].name.partition(" ") if doing.groups else ("", "", "")
    return int(number) if word == "generation" and number.isdecimal() else -1


def _idle_s(doing: WorkerActivity) -> float:
    """How long it has waited. An accelerator's collectives do not block: a worker that has launched one does nothing
    more.
    """
    return doing.waited_s if doing.waits_for else doing.idle_s


def _mismatch(sides: Sequence[Sequence[int]], said: Mapping[int, RecordedCollective]) -> HangFinding:
    most, *rest = sides
    named = tuple(sorted(itertools.chain.from_iterable(rest)))
    return HangFinding(
        kind="mismatch",
        named=named,
        waiting=tuple(most),
        waited_s=max(said[worker].age_s for worker in most),
        call=said[most[0]],
        others_call=said[named[0]],
    )


def _signature(call: RecordedCollective) -> Signature:
    return call.kind, call.what, call.dtype, call.numel


def _name(call: RecordedCollective) -> str:
    return f"{call.kind} {call.what or call.line}"


def _workers_named(workers: Sequence[int], activities: Mapping[int, WorkerActivity]) -> str:
    def one(worker: int) -> str:
        doing = activities.get(worker)
        return f"worker {worker}" + ("" if doing is None else f" ({doing.host}, pid {doing.pid})")

    return " and ".join(map(one, workers)) if len(workers) <= 2 else workers_text(workers)


def _where(worker: int, activities: Mapping[int, WorkerActivity], places: Mapping[int, str], *, alone: bool) -> str:
    subject, doing = "it" if alone else f"worker {worker}", activities.get(worker)
    if places.get(worker):
        return f"{subject} is at {places[worker]}"
    if doing is None:
        return f"{subject} has not come to paceline.run() yet"
    since = f", last seen at {doing.line}" if doing.line else ""
    return f"{subject} has been in phase {doing.phase!r} for {duration_text(doing.phase_s)}{since}"


def _call_text(call: RecordedCollective) -> str:
    details = ", ".join(_details(call))
    return f"{call.kind} {call.sequence}" + (f" ({details})" if details else "")


def _sized(call: RecordedCollective) -> str:
    size = f" of {call.numel:,} {call.dtype}" if call.dtype else ""
    details = ", ".join(_details(call))
    return f"{call.kind}{size}" + (f" ({details})" if details else "")


def _details(call: RecordedCollective) -> Iterator[str]:
    if what := call.what.removeprefix(f"{call.kind} of "):
        yield what
    if call.line:
        yield f"called at {call.line}"
    if call.step:
        yield f"step {call.step}"


def _wait(workers: Sequence[int]) -> str:
    return "waits" if len(workers) == 1 else "wait"


def _keep(workers: Sequence[int]) -> str:
    return "keeps" if len(workers) == 1 else "keep"


def _have(workers: Sequence[int]) -> str:
    return "has" if len(workers) == 1 else "have"
