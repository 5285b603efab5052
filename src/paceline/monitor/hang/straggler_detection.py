"""Finds the straggler, the worker that the others wait for step after step, and what it spends its time on.

Workers in lockstep all take as long as the slowest one. Their work without waiting distinguishes them: the slow worker
waits least. Work is compared by micro-batch, because shares may be uneven. A worker is named when it was slower in both
halves of a window, so a single hiccup names no worker. The window is the last WINDOW steps, or WINDOW_S seconds where
steps are faster. It begins and ends at looks, and each half contains at least one look.

Each episode has one sentence when it begins and one when it ends. None is named where the workers wait for cores: there
the machine, and no worker, is slow.

Communicating and waiting for others are one number, since no worker knows when the others arrived. The last worker to
arrive has not waited: what it spends there is communication, and all workers spend as much. Where that is most of a
step for LONG_S, it is reported for all of them. Sums cannot show whose link is slow, because a sum over workers ends
for all when it has passed the slowest link.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence

from paceline.comm.flight_recorder import WorkTotals
from paceline.monitor.console.progress import shares_text
from paceline.monitor.hang.worker_activity import WorkerActivity
from paceline.units import duration_text

__all__ = ["StragglerDetector", "look_interval_s"]

WINDOW, WINDOW_S = 14, 1.0  # steps, seconds: both. A straggler is named within 20 steps, or 2 s
LOOK_S, LOOK_STEPS = 0.15, 1.5  # between two looks, whichever is longer; supervisors come by every 0.2 s
SLOW, FINE = 1.3, 1.15  # times the others' median: named, and no longer
LONG, LONG_S = 0.5, 10.0  # of a step, the communication of all; reported once, after so long
CALM_S = 3.0  # so long it has to be fine before it counts as fast again
HOLD_S = 30.0  # after that it is not named again for so long, and each time for twice as long
SHARED_OUT = 0.2  # of the time in which the typical worker waits for a core: then the machine decides who is slow
SHARE = 0.1  # of a step, at least, that it costs the others
PAUSED = 0.05  # of the time: reported from here on
KEPT = 64  # looks that saw a new step


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerSample:
    """One worker at one look; all of it only grows."""

    time: float
    work: WorkTotals
    run_delay_s: float
    looks: int
    looks_stopped: int  # at so many of them it was stopped


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPace:
    """What a worker did in some steps; seconds are of one micro-batch."""

    data_s: float
    compute_s: float
    optimizer_s: float
    communication_s: float  # and its waiting for others
    micros: float  # a step
    paused: float  # share of the time

    @property
    def own_s(self) -> float:
        return self.data_s + self.compute_s + self.optimizer_s


class StragglerDetector:
    """Looks at all workers. `remedy` ends the sentence that names one."""

    def __init__(self, *, remedy: str = "") -> None:
        self._remedy = remedy
        self._samples: dict[int, deque[WorkerSample]] = {}
        self._looks: dict[int, tuple[int, int]] = {}
        self._named: set[int] = set()
        self._fine_since: dict[int, float] = {}  # of those that are named: when they were slow last
        self._hold: dict[int, tuple[float, float]] = {}  # not named again before a time; and how long that took
        self._long_since = math.inf  # the communication of all takes most of a step
        self._has_told = False

    def look(self, activities: Mapping[int, WorkerActivity], now: float) -> list[str]:
        """Return what is new, as sentences; `now` is monotonic, in seconds."""
        activities = {worker: doing for worker, doing in activities.items() if doing.state != "gone"}
        for worker in self._samples.keys() - activities.keys():
            del self._samples[worker]
        for worker, doing in activities.items():
            self._note(worker, doing, now)
        whole, first, second = dict[int, WorkerPace](), dict[int, WorkerPace](), dict[int, WorkerPace]()
        for worker in activities:
            if (window := _window(self._samples[worker])) is not None:
                start, middle, end = window
                for paces, a, b in ((whole, start, end), (first, start, middle), (second, middle, end)):
                    if (pace := _pace_between(a, b)) is not None:
                        paces[worker] = pace
        said: list[str] = []
        for worker in sorted(whole.keys() & first.keys() & second.keys()) if len(second) > 1 else ():
            ratios = [_ratio(worker, paces) for paces in (first, second)]
            if worker in self._named:
                said += self._ended(worker, max(ratios), now)
            elif (
                min(ratios) > SLOW
                and now >= self._hold.get(worker, (0.0, 0.0))[0]
                and not _is_shared_out(whole)
                and self._is_costly(activities[worker], worker, whole)
            ):
                self._named.add(worker)
                said.append(_sentence(activities[worker], whole) + self._remedy)
        if whole.keys() == activities.keys():
            said += self._communication(whole, _step_s(activities), now)
        return said

    def _ended(self, worker: int, ratio: float, now: float) -> list[str]:
        """Say that a named worker is as fast as the others, once it has been so for a while."""
        if ratio >= FINE:
            self._fine_since.pop(worker, None)
            return []
        if now - self._fine_since.setdefault(worker, now) < CALM_S:
            return []
        self._named.discard(worker)
        del self._fine_since[worker]
        held_s = 2 * self._hold.get(worker, (0.0, HOLD_S / 2))[1]
        self._hold[worker] = now + held_s, held_s
        return [f"worker {worker} is as fast as the others again"]

    def _communication(self, paces: Mapping[int, WorkerPace], step_s: float, now: float) -> list[str]:
        """What is to be said of what all spend on communication."""
        least_s, worker = min(((_away_s(pace), worker) for worker, pace in paces.items()), default=(0.0, 0))
        if self._has_told or not step_s or least_s < LONG * step_s:
            self._long_since = math.inf
            return []
        self._long_since = min(self._long_since, now)
        if now - self._long_since < LONG_S:
            return []
        self._has_told = True
        return [
            f"communication takes {min(1.0, least_s / step_s):.0%} of a step, or more, on every worker: "
            f"{duration_text(least_s)} of {duration_text(step_s)} on worker {worker}, which waits least for the others"
        ]

    def _note(self, worker: int, doing: WorkerActivity, now: float) -> None:
        samples = self._samples.setdefault(worker, deque(maxlen=KEPT))
        looks, stopped = self._looks.get(worker, (0, 0))
        self._looks[worker] = looks, stopped = looks + 1, stopped + (doing.state == "stopped")
        if samples and doing.work.steps < samples[-1].work.steps:
            samples.clear()  # another process has its place
        if not samples or doing.work.steps > samples[-1].work.steps:
            samples.append(WorkerSample(now, doing.work, doing.run_delay_s or 0.0, looks, stopped))

    def _is_costly(self, doing: WorkerActivity, worker: int, paces: Mapping[int, WorkerPace]) -> bool:
        others_s = _median_of_others(worker, paces)
        return (paces[worker].own_s - others_s) * paces[worker].micros >= SHARE * _step_s({worker: doing})


def look_interval_s(activities: Mapping[int, WorkerActivity], most_s: float) -> float:
    """How long the next look may wait, at most `most_s`, for stragglers to be named in time."""
    return min(most_s, max(LOOK_S, LOOK_STEPS * _step_s(activities)))


def _step_s(activities: Mapping[int, WorkerActivity]) -> float:
    """Return how long a step takes; 0 if unknown yet."""
    return statistics.median([seconds for doing in activities.values() for seconds in doing.steps_s] or [0.0])


def _window(samples: Sequence[WorkerSample]) -> tuple[WorkerSample, WorkerSample, WorkerSample] | None:
    """The window's begin, middle and end; None where there has not been so much yet.

    The first step is left out: the program's own preparations come with it.
    """
    counted = [sample for sample in samples if sample.work.steps > 0]
    middle, start = _back(counted, 0.5), _back(counted, 1.0)
    if start is None or middle is None:
        return None
    if start == middle:  # so many steps lie between two looks
        start -= 1
    return (counted[start], counted[middle], counted[-1]) if start >= 0 else None


def _back(samples: Sequence[WorkerSample], share: float) -> int | None:
    """The last sample that is at least this share of a window before the newest one."""
    for number in reversed(range(len(samples))):
        sample, newest = samples[number], samples[-1]
        steps, seconds = newest.work.steps - sample.work.steps, newest.time - sample.time
        if steps >= share * WINDOW and seconds >= share * WINDOW_S:
            return number
    return None


def _pace_between(a: WorkerSample, b: WorkerSample) -> WorkerPace | None:
    steps, micros = b.work.steps - a.work.steps, b.work.micros - a.work.micros
    if micros <= 0:
        return None  # it had nothing to do
    passed_s = b.time - a.time
    delayed = (b.run_delay_s - a.run_delay_s) / passed_s if passed_s > 0 else 0.0
    stopped = (b.looks_stopped - a.looks_stopped) / (b.looks - a.looks)
    return WorkerPace(
        data_s=(b.work.data_s - a.work.data_s) / micros,
        compute_s=(b.work.compute_s - a.work.compute_s) / micros,
        optimizer_s=(b.work.optimizer_s - a.work.optimizer_s) / micros,
        communication_s=(b.work.communication_s - a.work.communication_s) / micros,
        micros=micros / steps,
        paused=min(1.0, delayed + stopped),
    )


def _away_s(pace: WorkerPace) -> float:
    """Seconds of a step that it communicates, or waits for others."""
    return pace.communication_s * pace.micros


def _median_of_others(worker: int, paces: Mapping[int, WorkerPace]) -> float:
    others = [pace.own_s for other, pace in paces.items() if other != worker]
    return statistics.median(others) if others else 0.0  # all of them have just come


def _is_shared_out(paces: Mapping[int, WorkerPace]) -> bool:
    """Whether workers have fewer cores than they would use, or the machine's host takes them away."""
    return statistics.median(pace.paused for pace in paces.values()) >= SHARED_OUT


def _ratio(worker: int, paces: Mapping[int, WorkerPace]) -> float:
    others_s = _median_of_others(worker, paces)
    return paces[worker].own_s / others_s if others_s > 0 else 1.0


def _sentence(doing: WorkerActivity, paces: Mapping[int, WorkerPace]) -> str:
    """Name what takes so much longer than with the others, and where all of its time goes."""
    own, others = paces[doing.worker], [pace for worker, pace in paces.items() if worker != doing.worker]
    theirs = {
        name: statistics.median(getattr(pace, f"{name}_s") for pace in others) * own.micros
        for name in ("data", "compute", "optimizer")
    }
    mine = {name: getattr(own, f"{name}_s") * own.micros for name in theirs}
    worst = max(theirs, key=lambda name: mine[name] - theirs[name])
    they = "that of the other" if len(others) == 1 else "theirs"
    text = (
        f"worker {doing.worker} ({doing.host}, pid {doing.pid}) is {_ratio(doing.worker, paces):.1f}x slower than the "
        f"other{'s' if len(others) > 1 else ''}: its {worst} takes {duration_text(mine[worst])} a step, "
        f"{they} {duration_text(theirs[worst])}"
    )
    spent = {"data": own.data_s, "compute": own.compute_s, "communication": own.communication_s}
    spent["optimizer"] = own.optimizer_s
    total_s = sum(spent.values())
    goes = shares_text({phase: seconds / total_s for phase, seconds in spent.items()})
    if own.paused - statistics.median(pace.paused for pace in others) >= PAUSED:
        goes += f"; paused by the system {own.paused:.0%} of the time"
    return f"{text} ({goes})"
