"""Writes TensorBoard scalars by step: loss, reported metrics, eval/*, progress/*, samples_per_second, seconds/*, idle.

`seconds/*` says where the time between two commits went; its parts add up to `seconds/total`. `idle/worker_k` is the
share of that time in which worker k waited for the others. With many workers only the least and the most idle one are
written. Epochs count from 0.

An attempt's first 20,000 steps have a point each. Later points are the means of 10 steps, and after 500,000 steps of
100; `loss_range/least` and `loss_range/most` come with them, so that no spike disappears.

The package's own protocol buffers and record writer are used, without the writer above them: that one starts a thread,
and imports TensorFlow where it is installed. Importing the package takes 0.3 s, so rows wait in memory for a moment and
are written together. Start-up does not pay for the import.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import clock
from paceline.errors import writing
from paceline.events import Evaluated, Record, Reported, WorkerStarted
from paceline.monitor.records.steps import IdleShares, Step, parts_of
from paceline.units import name_text

if TYPE_CHECKING:
    from tensorboard.summary.writer.record_writer import RecordWriter

__all__ = ["TensorBoardFile"]

MOST_IDLE = 32  # workers that have a curve of their own
EACH, TENS = 20_000, 500_000  # steps of an attempt: until the one each has a point, until the other ten have one
EVERY_S = 2.0  # rows are written this long after the first that waits


class TensorBoardFile:
    """Appends scalars to one new event file in `directory`; the file appears with the first of them.

    Raises RunFileError where it cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._waiting: list[tuple[float, int, dict[str, float]]] = []
        self._due = 0.0
        self._resumed_from_step = 0
        self._writer: RecordWriter | None = None
        self._event: Any = None  # the class of TensorBoard's records, once it is imported
        self._num_steps = 0
        self._mean = _Mean()

    def accept(self, item: Record | Step) -> None:
        if isinstance(item, Step):
            self._num_steps += 1
            if self._num_steps <= EACH:
                self._add(item.time, item.step, _scalars(item))
                return
            self._mean.add(item.time, item.step, _scalars(item))
            if self._mean.num >= (10 if self._num_steps <= TENS else 100):
                self._add(*self._mean.taken())
        elif isinstance(item.event, Evaluated):
            self._add(item.time, item.event.step, _below("eval", item.event.metrics))
        elif isinstance(item.event, Reported):
            self._add(item.time, item.event.step, dict(item.event.metrics))
        elif isinstance(item.event, WorkerStarted):
            self._resumed_from_step = item.event.resumed_from_step

    def poll(self, now: float) -> None:
        """Write what has waited long enough; `now` is monotonic, in seconds."""
        if self._waiting:
            if self._due == 0.0:
                self._due = now + EVERY_S
            if now >= self._due:
                self._write()

    def close(self) -> None:
        if self._mean.num:
            self._add(*self._mean.taken())
        self._write()
        if self._writer is not None:
            with writing(self.directory):
                self._writer.close()
            self._writer = None

    def _add(self, when: float, step: int, scalars: dict[str, float]) -> None:
        self._waiting.append((when, step, scalars))

    def _write(self) -> None:
        self._due = 0.0
        if not self._waiting:
            return
        with writing(self.directory):
            writer = self._writer = self._writer or self._begin()
            for when, step, scalars in self._waiting:
                event = self._event(wall_time=when, step=step)
                for tag, value in scalars.items():
                    event.summary.value.add(tag=name_text(tag), simple_value=value)
                writer.write(event.SerializeToString())
            self._waiting.clear()
            writer.flush()

    def _begin(self) -> RecordWriter:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        messages: Any = event_pb2  # its classes are made at run time
        self._event = messages.Event

        self.directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads a directory's files in the order of their names: the time, to the nanosecond, comes first.
        seconds, nanoseconds = divmod(time.time_ns(), 1_000_000_000)
        path = self.directory / f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{socket.gethostname()}"
        writer = RecordWriter(open(path, "wb"))  # noqa: SIM115  # the writer closes it
        writer.write(self._event(wall_time=clock.now(), file_version="brain.Event:2").SerializeToString())
        if self._resumed_from_step:  # points of later steps in earlier files are void: they are taken again
            start = messages.SessionLog(status=messages.SessionLog.START)
            mark = self._event(wall_time=clock.now(), step=self._resumed_from_step + 1, session_log=start)
            writer.write(mark.SerializeToString())
        return writer


class _Mean:
    """Scalars of steps that follow each other, on their way to one point."""

    def __init__(self) -> None:
        self.num = 0
        self._place = 0.0, 0  # time and step of the last one
        self._values: dict[str, list[float]] = {}

    def add(self, when: float, step: int, scalars: Mapping[str, float]) -> None:
        self.num += 1
        self._place = when, step
        for name, value in scalars.items():
            self._values.setdefault(name, []).append(value)

    def taken(self) -> tuple[float, int, dict[str, float]]:
        """The point, and forget it: of each name the mean of its numbers; NaN where it had no other value."""
        points: dict[str, float] = {}
        for name, values in self._values.items():
            numbers = [value for value in values if not math.isnan(value)]
            points[name] = sum(numbers) / len(numbers) if numbers else math.nan
            if name == "loss" and numbers:
                points |= {"loss_range/least": min(numbers), "loss_range/most": max(numbers)}
        self.num = 0
        self._values.clear()
        when, step = self._place
        return when, step, points


def _scalars(row: Step) -> dict[str, float]:
    scalars = {"loss": row.loss, **row.metrics, "samples_per_second": row.samples_per_s, "progress/epoch": row.epoch}
    scalars["progress/workers"] = len(row.workers)
    scalars["noise_scale"] = row.noise_scale
    scalars.update(_below("seconds", {**row.seconds, **parts_of(row.seconds)}))
    scalars.update(_below("idle", _idle(row)))
    return {name: value for name, value in scalars.items() if value is not None and not math.isinf(value)}


def _below(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in values.items()}


def _idle(row: Step) -> dict[str, float]:
    idle = IdleShares()
    idle.add(row)
    shares = idle.shares
    if len(shares) < 2:
        return {}
    if len(shares) > MOST_IDLE:
        return {"least": min(shares.values()), "most": max(shares.values())}
    return {f"worker_{worker}": share for worker, share in shares.items()}
