"""Finds the worker that the others wait for, step after step, and what it spends its time on.

Workers in lock-step all take as long as the slowest; what tells them apart is the work of each, without its waiting:
the slow one waits least. Work is compared by micro-batch, because shares may be uneven. Somebody is named when it was
slower in both halves of the last WINDOW steps: one hiccup is no straggler.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import deque
from collections.abc import Mapping

from paceline.monitor.doing import Doing, Work
from paceline.units import duration_text

__all__ = ["StragglerDetector"]

WINDOW = 14  # steps: named within 20, whenever looks come
SLOW, FINE = 1.3, 1.15  # times the others' median: named, and no longer
SHARE = 0.1  # of a step, at least, that it costs the others
PAUSED = 0.05  # of the time: worth to be told
KEPT = 64  # looks that saw a new step


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One worker at one look; all of it only grows."""

    time: float
    work: Work
    run_delay_s: float
    looks: int
    looks_stopped: int  # at so many of them it was stopped


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """What a worker did in some steps; seconds are of one micro-batch."""

    data_s: float
    compute_s: float
    optimizer_s: float
    micros: float  # a step
    paused: float  # share of the time

    @property
    def own_s(self) -> float:
        return self.data_s + self.compute_s + self.optimizer_s


class StragglerDetector:
    """Looks at all workers, about once a second. `remedy` ends the sentence that names one."""

    def __init__(self, *, remedy: str = "") -> None:
        self._remedy = remedy
        self._samples: dict[int, deque[Sample]] = {}
        self._looks: dict[int, tuple[int, int]] = {}
        self._named: set[int] = set()

    def look(self, doings: Mapping[int, Doing], now: float) -> list[str]:
        """Return what is new, as sentences."""
        doings = {worker: doing for worker, doing in doings.items() if doing.state != "gone"}
        for worker in self._samples.keys() - doings.keys():
            del self._samples[worker]
        for worker, doing in doings.items():
            self._note(worker, doing, now)
        whole, first, second = ({w: pace for w in doings if (pace := self._pace(w, half))} for half in (None, 0, 1))
        said: list[str] = []
        for worker in sorted(whole.keys() & first.keys() & second.keys()) if len(second) > 1 else ():
            ratios = [_ratio(worker, paces) for paces in (first, second)]
            if worker in self._named and max(ratios) < FINE:
                self._named.discard(worker)
                said.append(f"worker {worker} is as fast as the others again")
            elif worker not in self._named and min(ratios) > SLOW and self._is_costly(doings[worker], worker, whole):
                self._named.add(worker)
                said.append(_sentence(doings[worker], whole) + self._remedy)
        return said

    def _note(self, worker: int, doing: Doing, now: float) -> None:
        samples = self._samples.setdefault(worker, deque(maxlen=KEPT))
        looks, stopped = self._looks.get(worker, (0, 0))
        self._looks[worker] = looks, stopped = looks + 1, stopped + (doing.state == "stopped")
        if samples and doing.work.steps < samples[-1].work.steps:
            samples.clear()  # another process has its place
        if not samples or doing.work.steps > samples[-1].work.steps:
            samples.append(Sample(now, doing.work, doing.run_delay_s or 0.0, looks, stopped))

    def _pace(self, worker: int, half: int | None) -> Pace | None:
        """The pace in the last WINDOW steps, or in one half of them; None where there are not so many yet.

        The first step is left out: the program's own preparations come with it.
        """
        samples = [sample for sample in self._samples[worker] if sample.work.steps > 0]
        end = _back(samples, WINDOW // 2) if half == 0 else len(samples) - 1
        start = _back(samples, WINDOW // 2 if half == 1 else WINDOW)
        if start is None or end is None or samples[end].work.steps == samples[start].work.steps:
            return None
        return _pace_between(samples[start], samples[end])

    def _is_costly(self, doing: Doing, worker: int, paces: Mapping[int, Pace]) -> bool:
        others_s = _median_of_others(worker, paces)
        step_s = statistics.median(doing.steps_s) if doing.steps_s else 0.0
        return (paces[worker].own_s - others_s) * paces[worker].micros >= SHARE * step_s


def _back(samples: list[Sample], steps: int) -> int | None:
    """The last sample from at least so many steps before the newest one."""
    newest = samples[-1].work.steps if samples else 0
    found = [number for number, sample in enumerate(samples) if sample.work.steps <= newest - steps]
    return found[-1] if found else None


def _pace_between(a: Sample, b: Sample) -> Pace | None:
    steps, micros = b.work.steps - a.work.steps, b.work.micros - a.work.micros
    if micros <= 0:
        return None  # it had nothing to do
    passed_s = b.time - a.time
    delayed = (b.run_delay_s - a.run_delay_s) / passed_s if passed_s > 0 else 0.0
    stopped = (b.looks_stopped - a.looks_stopped) / (b.looks - a.looks)
    return Pace(
        data_s=(b.work.data_s - a.work.data_s) / micros,
        compute_s=(b.work.compute_s - a.work.compute_s) / micros,
        optimizer_s=(b.work.optimizer_s - a.work.optimizer_s) / micros,
        micros=micros / steps,
        paused=min(1.0, delayed + stopped),
    )


def _median_of_others(worker: int, paces: Mapping[int, Pace]) -> float:
    others = [pace.own_s for other, pace in paces.items() if other != worker]
    return statistics.median(others) if others else 0.0  # all of them have just come


def _ratio(worker: int, paces: Mapping[int, Pace]) -> float:
    others_s = _median_of_others(worker, paces)
    return paces[worker].own_s / others_s if others_s > 0 else 1.0


def _sentence(doing: Doing, paces: Mapping[int, Pace]) -> str:
    """Name what takes so much longer than with the others."""
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
    if own.paused - statistics.median(pace.paused for pace in others) >= PAUSED:
        text += f" (paused by the system {own.paused:.0%} of the time)"
    return text
