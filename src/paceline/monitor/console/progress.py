"""How far a run has come, in words: goal and interval, and where the time of the last steps went."""

from __future__ import annotations

import math
from collections.abc import Mapping

from paceline.events import (
    StreamOpened,
)
from paceline.monitor.records.steps import OTHER, PHASES, IdleShares, Step, shares
from paceline.units import printable

__all__ = [
    "MOST_IDLE",
    "SHORT_PHASES",
    "ProgressInterval",
    "RunTarget",
    "idle_texts",
    "number_text",
    "rate_text",
    "shares_text",
]

SHORT_PHASES: dict[str, str] = dict(
    zip((*PHASES, OTHER), ("data", "compute", "comm", "optim", "recovery", "other"), strict=True)
)


MOST_IDLE = 8  # workers whose idle shares are shown one by one


class RunTarget:
    """How far a run is to go: the last step and the number of epochs, as far as they are known."""

    def __init__(self, max_steps: int | None) -> None:
        self.last_step = self._max_steps = max_steps
        self._epochs = 1

    def accept(self, opened: StreamOpened) -> None:
        known = [number for number in (self._max_steps, opened.last_step) if number is not None]
        self.last_step, self._epochs = min(known, default=None), opened.epochs

    def epoch_text(self, row: Step) -> str:
        """Return "epoch 2 of 8"; nothing where there is one epoch only."""
        last = max(self._epochs, row.epoch + 1)
        return f"epoch {row.epoch + 1} of {last}" if last > 1 else ""


class ProgressInterval:
    """Adds up the steps between two lines of progress."""

    def __init__(self) -> None:
        self.last: Step | None = None
        self._began: float | None = None  # commit before the first step of the interval
        self._num_steps = self._num_samples = 0
        self._seconds: dict[str, float] = {}
        self._idle = IdleShares()

    def add(self, row: Step) -> None:
        if self._began is None:
            self._began = row.time - row.seconds.get("total", 0.0)
        self.last = row
        self._num_steps += 1
        self._num_samples += row.num_samples
        for phase, seconds in row.seconds.items():
            self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
        self._idle.add(row)

    def restart(self) -> None:
        """Begin the next interval where this one ends."""
        if self.last is not None:
            self._began, self._num_steps, self._num_samples, self._seconds = self.last.time, 0, 0, {}
            self._idle = IdleShares()

    @property
    def samples_per_s(self) -> float | None:
        """None where nothing is known of samples."""
        if self.last is None or self._began is None or self.last.time <= self._began or not self._num_samples:
            return None
        return self._num_samples / (self.last.time - self._began)

    @property
    def step_s(self) -> float | None:
        """The mean duration of its steps, commit to commit."""
        if self.last is None or self._began is None or not self._num_steps:
            return None
        return (self.last.time - self._began) / self._num_steps

    @property
    def shares(self) -> dict[str, float]:
        return shares(self._seconds)

    @property
    def idle(self) -> dict[int, float]:
        """Which share of its time each worker waited for the others."""
        return self._idle.shares

    def line(self, goal: RunTarget, *, with_speed: bool = True) -> str:
        """Return "step 120 of 400  epoch 1 of 3  loss 2.314  512 samples/s  data 1% compute 88% ...  idle 0:3% 1:9%".

        `with_speed=False` leaves out speed and shares: those of the first step say nothing about the others.
        """
        row = self.last
        if row is None:
            return ""
        parts = [f"step {row.step} of {goal.last_step}" if goal.last_step else f"step {row.step}", goal.epoch_text(row)]
        if row.loss is not None:
            parts.append(f"loss {number_text(row.loss)}")
        parts += [f"{printable(name)} {number_text(value)}" for name, value in row.metrics.items()]
        if with_speed and self.samples_per_s is not None:
            parts.append(f"{rate_text(self.samples_per_s)} samples/s")
        elif with_speed and not self._num_samples and self.step_s:
            parts.append(f"{rate_text(1 / self.step_s)} steps/s")
        if with_speed and self.shares:
            parts.append(shares_text(self.shares))
        if with_speed and (idle := idle_texts(self.idle)):
            parts.append(f"idle {' '.join(idle)}")
        return "  ".join(part for part in parts if part)


def shares_text(parts: Mapping[str, float]) -> str:
    """Return "data 1% compute 88% comm 8% optim 2% other 1%"."""
    return " ".join(f"{SHORT_PHASES[phase]} {share:.0%}" for phase, share in parts.items())


def idle_texts(idle: Mapping[int, float]) -> list[str]:
    """Return ["0:12%", "1:3%"], by worker; of many workers only the least and the most idle one; nothing for a single
    worker.
    """
    if len(idle) < 2:
        return []
    if len(idle) <= MOST_IDLE:
        return [f"{worker}:{share:.0%}" for worker, share in idle.items()]
    least, most = min(idle, key=lambda worker: idle[worker]), max(idle, key=lambda worker: idle[worker])
    return [f"{idle[least]:.0%} (worker {least})", "to", f"{idle[most]:.0%} (worker {most})"]


def number_text(value: float | None) -> str:
    """Return a number with four significant digits; "nan" for None, which is what JSON makes of it."""
    if value is None or math.isnan(value):
        return "nan"
    value = float(value)  # a user may report a whole number
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e6 else f"{value:.4g}"


def rate_text(value: float) -> str:
    """Return a rate with about three significant digits and thousands separated: "512", "12,345", "3.25"."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"
