"""Writes TensorBoard scalars by step: loss, reported metrics, eval/*, progress/*, samples_per_second, seconds/*, idle.

`seconds/*` says where the time between two commits went; its parts add up to `seconds/total`. `idle/worker_k` is the
share of that time in which worker k waited for the others. With many workers only the least and the most idle one are
written. Epochs count from 0.

Which points there are, and how they are thinned, is in `scalars`. It is a `RunLogger`. It needs no thread of its own,
since it only writes files of the run's directory: the reader of the run's events gives it everything directly.

The package's own protocol buffers and record writer are used, without the writer above them: that one starts a thread,
and imports TensorFlow where it is installed. Importing the package takes 0.3 s, so rows wait in memory for a moment and
are written together. Start-up does not pay for the import.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import clock
from paceline.errors import writing
from paceline.events import Record, WorkerStarted
from paceline.monitor.export.run_logger import LoggedRun, ScalarPoint
from paceline.monitor.export.scalars import ScalarPoints
from paceline.monitor.records.steps import Step
from paceline.units import name_text

if TYPE_CHECKING:
    from tensorboard.summary.writer.record_writer import RecordWriter

__all__ = ["TensorBoardFile"]

EVERY_S = 2.0  # rows are written this long after the first that waits


class TensorBoardFile:
    """Appends scalars to one new event file in `directory`; the file appears with the first of them.

    Raises RunFileError where it cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._waiting: list[ScalarPoint] = []
        self._points = ScalarPoints()
        self._due = 0.0
        self._resumed_from_step = 0
        self._writer: RecordWriter | None = None
        self._event: Any = None  # the class of TensorBoard's records, once it is imported

    def accept(self, item: Record | Step) -> None:
        if not isinstance(item, Step) and isinstance(item.event, WorkerStarted):
            self._resumed_from_step = item.event.resumed_from_step
        self.log(self._points.take(item))

    def start(self, run: LoggedRun) -> None:
        """Nothing is asked: TensorBoard drops the points of steps that are taken again."""

    def log(self, points: Sequence[ScalarPoint]) -> None:
        self._waiting += points

    def end(self, state: str) -> None:
        self.close()

    def poll(self, now: float) -> None:
        """Write what has waited long enough; `now` is monotonic, in seconds."""
        if self._waiting:
            if self._due == 0.0:
                self._due = now + EVERY_S
            if now >= self._due:
                self._write()

    def close(self) -> None:
        self.log(self._points.rest())
        self._write()
        if self._writer is not None:
            with writing(self.directory):
                self._writer.close()
            self._writer = None

    def _write(self) -> None:
        self._due = 0.0
        if not self._waiting:
            return
        with writing(self.directory):
            writer = self._writer = self._writer or self._begin()
            for point in self._waiting:
                event = self._event(wall_time=point.time, step=point.step)
                for tag, value in point.values.items():
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
