"""The files that one worker writes into the run directory, and the Job's settings of when to write them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import RunFileError, writing
from paceline.events import Event, EventLog, Warned, WorkerFinished
from paceline.plan.job import Assignment, Job
from paceline.private_files import make_run_directory
from paceline.worker.record.error_report import release_error_space, reserve_error_space
from paceline.worker.record.module_capture import ModuleCapture
from paceline.worker.record.parity_capture import ParityCapture
from paceline.worker.record.sample_ledger import ResumeOrigin, SampleLedger
from paceline.worker.record.wire_capture import WireCapture

__all__ = ["RunFiles"]


class RunFiles:
    """Events, ledger and captures of one worker, plus the schedule of saves.

    A file that cannot be written raises RunFileError: a step that is in no ledger could not be audited.
    """

    def __init__(self, assignment: Assignment, job: Job) -> None:
        self.assignment, self._job = assignment, job
        self.run_dir = Path(assignment.run_dir)
        self.worker_dir = Path(assignment.worker_dir)
        self._events_path = self.worker_dir / "events.jsonl"
        self._is_given_up = False
        with writing(self._events_path):
            make_run_directory(self.run_dir)
            self.worker_dir.mkdir(parents=True, exist_ok=True)
            self._events = EventLog(self._events_path, worker=assignment.rank, seals=not job.capture_dir)
            reserve_error_space(self.worker_dir)
        self._ledger: SampleLedger | None = None
        self.capture = ParityCapture(Path(job.capture_dir), assignment.rank) if job.capture_dir else None
        self.module_capture: ModuleCapture | None = None
        self.wire_capture = WireCapture(Path(job.capture_dir), assignment.rank) if job.capture_dir else None
        if job.capture_dir:
            self.module_capture = ModuleCapture.asked_for(Path(job.capture_dir), assignment.rank)

    @property
    def ledger(self) -> SampleLedger:
        """Open from `begin` on."""
        if self._ledger is None:
            raise RuntimeError("the ledger is not open yet")
        return self._ledger

    @property
    def attempt(self) -> int:
        return self.assignment.attempt

    @property
    def checkpoint_dir(self) -> Path:
        return self.run_dir / "checkpoints"

    @property
    def may_resume(self) -> bool:
        return not self._job.fresh

    @property
    def keep(self) -> int:
        return self._job.keep

    @property
    def silence_s(self) -> float:
        return self._job.silence_s

    @property
    def saves_at_end(self) -> bool:
        return self._job.save_at_end

    def begin(self, origin: ResumeOrigin | None) -> None:
        """Open the ledger of this attempt, which goes on from `origin`; again after a restore. None: this worker joins
        a running one.
        """
        if self._ledger is None:
            self._ledger = SampleLedger(
                self.worker_dir / "ledger.jsonl",
                attempt=self.attempt,
                origin=origin,
                say=lambda text: self.emit(Warned(text=text)),
            )
        elif origin is not None:
            self._ledger.begin(origin)

    def emit(self, event: Event) -> None:
        """Append an event; may be called from any thread."""
        with self._given_up_or_raised(), writing(self._events_path):
            self._events.emit(event)

    def is_save_due(self, step: int) -> bool:
        return self._job.save_every is not None and step > 0 and step % self._job.save_every == 0

    @property
    def save_every_s(self) -> float:
        """Seconds between two saves by time; 0: there are none."""
        return 0.0 if self.saves_regularly else self._job.save_every_s

    @property
    def save_every(self) -> int | None:
        return self._job.save_every

    @property
    def max_steps(self) -> int | None:
        return self._job.max_steps

    @property
    def balances(self) -> bool:
        return self._job.balance

    @property
    def measures_noise(self) -> bool:
        return self._job.noise_scale

    @property
    def saves_regularly(self) -> bool:
        return self._job.save_every is not None

    def is_last_step(self, step: int) -> bool:
        return self._job.max_steps is not None and step >= self._job.max_steps

    def finish(self, step: int, *, peak_memory_bytes: int, state_bytes: int) -> None:
        """Record that this worker has finished, and close all files. `state_bytes`: of the model and its optimizer."""
        finished = {"step": step, "peak_memory_bytes": peak_memory_bytes, "state_bytes": state_bytes}
        self.emit(WorkerFinished(rank=self.assignment.rank, **finished))
        self.close()
        release_error_space(self.worker_dir)

    def give_up(self) -> None:
        """After an error, which counts more: from now on a file that cannot be written is ignored."""
        self._is_given_up = True

    def close(self) -> None:
        with self._given_up_or_raised(), writing(self._events_path):
            self._events.close()
        if self._ledger is not None:
            with self._given_up_or_raised():
                self._ledger.close()

    @contextlib.contextmanager
    def _given_up_or_raised(self) -> Iterator[None]:
        try:
            yield
        except RunFileError:
            if not self._is_given_up:
                raise
