"""How the console words a run's events: one line each, the same on a terminal and in a log."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.events import (
    CheckpointFailed,
    CheckpointSaved,
    CheckpointSkipped,
    Evaluated,
    Event,
    Reported,
    WorkerStarted,
)
from paceline.monitor.files import local_path
from paceline.monitor.steps import PHASES, Step
from paceline.monitor.summary import shares
from paceline.units import bytes_text, duration_text

__all__ = [
    "SHORT",
    "Interval",
    "closing_table",
    "ending_text",
    "event_line",
    "number_text",
    "rate_text",
    "ready_line",
    "shares_text",
]

SHORT: dict[str, str] = dict(zip(PHASES, ("data", "compute", "comm", "optim"), strict=True))
CAUSES = {129: "the terminal was closed", 130: "Ctrl-C", 143: "SIGTERM"}  # by exit code


class Interval:
    """Adds up the steps between two lines of progress."""

    def __init__(self) -> None:
        self.last: Step | None = None
        self._began: float | None = None  # commit before the first step of the interval
        self._num_samples = 0
        self._seconds: dict[str, float] = {}

    def add(self, row: Step) -> None:
        if self._began is None:
            self._began = row.time - row.seconds.get("total", 0.0)
        self.last = row
        self._num_samples += row.num_samples
        for phase, seconds in row.seconds.items():
            self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def restart(self) -> None:
        """Begin the next interval where this one ends."""
        if self.last is not None:
            self._began, self._num_samples, self._seconds = self.last.time, 0, {}

    @property
    def samples_per_s(self) -> float | None:
        if self.last is None or self._began is None or self.last.time <= self._began:
            return None
        return self._num_samples / (self.last.time - self._began)

    @property
    def shares(self) -> dict[str, float]:
        return shares(self._seconds)

    def line(self) -> str:
        """Return "step 120  loss 2.314  512 samples/s  data 1% compute 88% comm 8% optim 3%"."""
        if self.last is None:
            return ""
        parts = [f"step {self.last.step}"]
        if self.last.loss is not None:
            parts.append(f"loss {number_text(self.last.loss)}")
        parts += [f"{name} {number_text(value)}" for name, value in self.last.metrics.items()]
        if self.samples_per_s is not None:
            parts.append(f"{rate_text(self.samples_per_s)} samples/s")
        if self.shares:
            parts.append(shares_text(self.shares))
        return "  ".join(parts)


def event_line(event: Event) -> str | None:
    """Return the line that an event deserves on the console, or None."""
    match event:
        case Evaluated(step=step, metrics=metrics, num_samples=num_samples, duration_s=duration_s):
            values = "  ".join(f"{name} {number_text(value)}" for name, value in metrics.items())
            return f"step {step}  held out: {values}  ({num_samples:,} samples in {duration_text(duration_s)})"
        case Reported(step=step, metrics=metrics):
            return f"step {step}  " + "  ".join(f"{name} {number_text(value)}" for name, value in metrics.items())
        case CheckpointSaved(step=step, path=path, num_bytes=num_bytes, stall_s=stall_s):
            about = f"{bytes_text(num_bytes)}; training waited {duration_text(stall_s)}"
            return f"step {step}  checkpoint {local_path(path)} ({about})"
        case CheckpointFailed(step=step, path=path, reason=reason):
            return f"step {step}  CHECKPOINT FAILED: {local_path(path)}: {reason}"
        case CheckpointSkipped(path=path, reason=reason):
            return f"checkpoint {local_path(path)} was passed over: {reason}"
        case _:
            return None


def ready_line(started: Iterable[WorkerStarted]) -> str:
    """Return "2 workers on cpu, ready in 1.90 s  plan replicas=2"."""
    started = list(started)
    devices = ", ".join(sorted({event.device.partition(":")[0] for event in started}))
    hosts = {event.host for event in started}
    where = f"{devices} of {len(hosts)} hosts" if len(hosts) > 1 else devices
    workers = "1 worker" if len(started) == 1 else f"{len(started)} workers"
    resumed = max(event.resumed_from_step for event in started)
    return (
        f"{workers} on {where}, ready in {duration_text(max(event.startup_s for event in started))}"
        + (f", continuing after step {resumed}" if resumed else "")
        + f"  plan {started[0].plan}"
    )


def closing_table(facts: Mapping[str, Any]) -> str:
    """Return the summary of an attempt (the contents of summary.json) as a small table, each row "what  value"."""
    title = f"{ending_text(facts)}, after {duration_text(facts['duration_s'])}"
    rows: list[tuple[str, str]] = []
    if facts["steps"]:
        rows.append(("samples/s", _speed_text(facts)))
        rows.append(("communication", f"{facts['share_communication'] or 0:.1%} of the steps' time"))
    if facts["startup_s"] is not None:
        first = (
            ""
            if facts["first_commit_s"] is None
            else f" (first step committed after {duration_text(facts['first_commit_s'])})"
        )
        rows.append(("start-up", duration_text(facts["startup_s"]) + first))
    if facts["steps"]:
        rows.append(("steps", _steps_text(facts)))
        if facts["last_loss"] is not None:
            first = "" if facts["first_loss"] is None else f"{number_text(facts['first_loss'])} -> "
            rows.append(("loss", first + number_text(facts["last_loss"])))
    if facts["evaluation"]:
        values = "  ".join(f"{name} {number_text(value)}" for name, value in facts["evaluation"].items())
        rows.append(("held out", f"{values} (step {facts['evaluation_step']})"))
    if facts["peak_memory_bytes"]:
        rows.append(("peak memory", f"{bytes_text(facts['peak_memory_bytes'])} in one worker"))
    if facts["checkpoints_saved"]:
        rows.append(("checkpoint", local_path(facts["checkpoint"])))
    elif facts["steps"] and facts["state"] != "finished":
        rows.append(("checkpoint", "none of this attempt: --save-every STEPS would have left one"))
    if facts["checkpoints_failed"]:
        rows.append(("failed saves", str(facts["checkpoints_failed"])))
    rows += [("logs", local_path(facts["log_dir"])), ("run", local_path(facts["run_dir"]))]
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def ending_text(facts: Mapping[str, Any]) -> str:
    """Return "finished at step 400" or "stopped at step 120 (Ctrl-C)"."""
    cause = CAUSES.get(facts["exit_code"])
    return f"{facts['state']} at step {facts['step']}" + (f" ({cause})" if cause else "")


def shares_text(parts: Mapping[str, float]) -> str:
    """Return "data 1% compute 88% comm 8% optim 3%"."""
    return " ".join(f"{SHORT[phase]} {share:.0%}" for phase, share in parts.items())


def number_text(value: float | None) -> str:
    """Return a number with four significant digits; "nan" for None, which is what JSON makes of it."""
    if value is None or math.isnan(value):
        return "nan"
    value = float(value)  # a user may report a whole number
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e6 else f"{value:.4g}"


def rate_text(value: float) -> str:
    """Return a rate with about three significant digits and thousands separated: "512", "12,345", "3.25"."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def _speed_text(facts: Mapping[str, Any]) -> str:
    overall, median = facts["samples_per_s"], facts["samples_per_s_median"]
    if overall is None:
        return "not known"
    return rate_text(overall) + (f" (median of the steps {rate_text(median)})" if median else "")


def _steps_text(facts: Mapping[str, Any]) -> str:
    text = f"{facts['steps']:,} ({facts['samples']:,} samples)"
    if facts["resumed_from_step"]:
        text += f", continued after step {facts['resumed_from_step']}"
    if facts["skipped_steps"]:
        text += f", {facts['skipped_steps']} of them skipped"
    return text
