"""Watches one start of a task's program from outside, and tells what it sees as events of the run: what the program
uses, whether it stands still, where its curves are, and the numbers in them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Hashable, Sequence
from pathlib import Path

from paceline.comm.flight_recorder import STACK_SIGNAL
from paceline.compat.tensorflow.program_scalars import ProgramRow, ProgramScalars
from paceline.compat.tensorflow.stillness import STILL_S, Stillness
from paceline.compat.tensorflow.task_look import TaskLook, catches_signal, event_files, link_curves
from paceline.events import EventLog, TaskScalars, TaskUsage, Warned
from paceline.monitor.hang.stack_dumps import StackFile, place_of
from paceline.plan.job import Assignment

__all__ = ["ProgramWatch"]

FIRST_LOOK_S, LOOK_S, USAGE_S = 1.0, 2.0, 10.0  # looks at a program; how often it is told what it uses


class ProgramWatch:
    """Call `look` often, and `close` when the program has ended. `restarts`: as in TaskStarted."""

    def __init__(self, pid: int, assignment: Assignment, *, name: str, restarts: int, events: EventLog) -> None:
        self._pid, self._rank, self._name, self._restarts = pid, assignment.rank, name, restarts
        self._events = events
        self._worker_dir = Path(assignment.worker_dir)
        self._tensorboard = Path(assignment.run_dir) / "tensorboard" if assignment.job.tensorboard else None
        self._look_at = time.monotonic() + FIRST_LOOK_S
        self._usage_at = 0.0
        self._told, self._looked = TaskLook(pid), TaskLook(pid)
        self._stillness = Stillness(min(STILL_S, assignment.job.timeout_s))
        self._still_s = 0.0
        self._stack = StackFile(self._worker_dir)
        self._is_asked = False  # for its stack
        self._place = ""  # where it stands still
        # Of what all write alike, the first task's word is taken: Keras has the others write into folders that it
        # removes.
        self._scalars = ProgramScalars() if assignment.rank == 0 else None

    def look(self, *, is_ready: bool) -> None:
        """Look at the program, if it is time to; `is_ready`: it listens."""
        now_s = time.monotonic()
        if now_s < self._look_at:
            return
        self._look_at = now_s + LOOK_S
        files = event_files(self._pid)
        self._link(files)
        self._tell_scalars(files)
        is_news = self._look_for_stillness(now_s, files)
        if is_news or now_s >= self._usage_at:
            self._usage_at = now_s + USAGE_S
            self._tell_usage(is_ready=is_ready)

    def close(self) -> None:
        """Read what the program has written last."""
        self._tell_scalars((), is_last=True)

    def _look_for_stillness(self, now_s: float, files: Sequence[Path]) -> bool:
        """Note for how long it has stood still, and where; return whether that is to be told at once."""
        usage, before = self._looked.take(), (self._still_s > 0, self._place)
        if usage is None:
            return False
        self._still_s = self._stillness.take(now_s, cores=usage.cores, written=self._written(files))
        if self._still_s == 0.0:
            self._is_asked, self._place = False, ""
        elif not self._is_asked and catches_signal(self._pid, STACK_SIGNAL):
            self._is_asked = True
            self._stack.ask()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, STACK_SIGNAL)
        elif self._is_asked and not self._place:
            self._place = place_of(self._stack.answer() or ())
        return (self._still_s > 0, self._place) != before

    def _written(self, files: Sequence[Path]) -> Hashable:
        """The sizes of its logs and event files."""
        sizes: list[tuple[str, int]] = []
        for path in (self._worker_dir / "stdout.log", self._worker_dir / "stderr.log", *files):
            with contextlib.suppress(OSError):
                sizes.append((str(path), path.stat().st_size))
        return tuple(sizes)

    def _tell_usage(self, *, is_ready: bool) -> None:
        usage = self._told.take()
        if usage is None:
            return
        self._events.emit(
            TaskUsage(
                rank=self._rank,
                name=self._name,
                pid=self._pid,
                up_s=round(usage.age_s, 1),
                cores=round(usage.cores, 3),
                memory_bytes=usage.memory_bytes,
                restarts=self._restarts,
                ready=is_ready,
                still_s=round(self._still_s, 1),
                place=self._place,
            )
        )

    def _tell_scalars(self, files: Sequence[Path], *, is_last: bool = False) -> None:
        for row in self._new_rows(files, is_last=is_last):
            said = TaskScalars(
                rank=self._rank,
                name=self._name,
                program_step=row.step,
                written=row.time,
                epoch=row.epoch,
                loss=row.loss,
                metrics=row.metrics,
            )
            self._events.emit(said)

    def _new_rows(self, files: Sequence[Path], *, is_last: bool) -> Sequence[ProgramRow]:
        """Rows of the program's scalars; none from the first error on, which must not end the program: TensorBoard's
        protobuf may not fit TensorFlow's."""
        if self._scalars is None:
            return ()
        try:
            return self._scalars.take(files, is_last=is_last)
        except Exception as error:
            self._scalars = None
            self._events.emit(Warned(text=f"the program's event files cannot be read any more: {error!r}"))
            return ()

    def _link(self, files: Sequence[Path]) -> None:
        """Have TensorBoard find the folders of these files below the run's."""
        if self._tensorboard is not None:
            with contextlib.suppress(OSError):  # a disk without links: TensorBoard is pointed there by hand
                link_curves(sorted({path.parent for path in files}), self._tensorboard, self._name)
