"""The process that copies a run's checkpoints to object storage, over all attempts of the run, as its supervisor
sees it: begun before anything starts, heard while the run goes on, waited for at its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from paceline import environment, run_lock
from paceline.errors import PlanError
from paceline.events import Event, Note, UploadBegun, UploadDone, UploadFailed, Warned
from paceline.plain_data import read_object
from paceline.plan import Job
from paceline.private_files import make_run_directory
from paceline.storage.address import check_address

__all__ = ["RunUploads", "check_remote_dir"]

MODULE = "paceline.checkpoint.remote.upload_process"
LOG = "uploads.log"
MOST_STARTS = 4  # of the process, where it ends by itself
AFTER_FAILURE_S = 30.0  # a run that has failed is waited for no longer
POLL_S = 0.05


def check_remote_dir(job: Job) -> None:
    """Raise PlanError where the address is none, or the package for it is not installed."""
    if job.remote_dir is not None:
        check_address(job.remote_dir, option="remote_dir (--remote-dir)")


class RunUploads:
    """A context manager: at its end the process is gone. Without `remote_dir`, nothing is done."""

    def __init__(self, job: Job) -> None:
        """`job` has its run_dir."""
        self._job, self._run_dir = job, Path(str(job.run_dir))
        self._address = (
            None if job.remote_dir is None else check_address(job.remote_dir, option="remote_dir (--remote-dir)")
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._heard, self._num_starts, self._left = b"", 0, list[int]()
        self._has_ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._abandon()

    def begin(self, say: Callable[[str], None]) -> None:
        """Look whether the store can be used, and download a checkpoint that is newer than the run's own.

        Returns once the run may begin. Raises PlanError, with the remedy, where it may not.
        """
        if self._address is None:
            return
        if environment.trial_parameters():
            raise PlanError(
                f"remote_dir is {self._address} for every trial of the sweep, and each would go on from the others' "
                "checkpoints: leave it out."
            )
        is_in_use = run_lock.is_held(self._run_dir)  # the start says so, or joins the run there
        self._start(is_fresh=self._job.fresh, fetches=not is_in_use)
        while True:
            said = self._next(None)
            if said is None:
                raise PlanError(f"the process that copies checkpoints to {self._address} has ended{self._why()}")
            match said.get("says"):
                case "note":
                    say(str(said["text"]))
                case "refused":
                    raise PlanError(f"remote_dir cannot be used: {said['text']}")
                case "ready":
                    return
                case _:
                    continue

    def poll(self, emit: Callable[[Event], None]) -> None:
        """Pass on what has happened since the last call; start the process again where it has ended by itself."""
        if self._process is None or self._has_ended:
            return
        while (said := self._next(0.0)) is not None:
            self._pass_on(said, emit)
        if self._process.poll() is not None and not self._has_ended:
            self._has_ended = True
            text = f"the process that copies checkpoints to {self._address} has ended{self._why()}"
            if self._num_starts < MOST_STARTS:
                emit(Warned(text=f"{text}. It is started again"))
                self._start(is_fresh=False, fetches=False)
            else:
                emit(Warned(text=f"{text}, {MOST_STARTS} times now: nothing more is uploaded"))

    def end(
        self,
        state: str,
        emit: Callable[[Event], None],
        *,
        poll: Callable[[], None] = lambda: None,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        """The run has ended so: wait for what is not uploaded yet, and say what is not. `poll` is called meanwhile."""
        process = self._process
        if process is None or process.stdin is None:
            return
        limit_s = self._job.remote_wait_s
        if state != "finished":
            limit_s = min(limit_s, self._job.grace_s if state == "stopped" else AFTER_FAILURE_S)
        until = time.monotonic() + limit_s
        with contextlib.suppress(OSError):
            process.stdin.write(b'{"end": true}\n')
            process.stdin.flush()
        has_told, is_cut = False, False
        while not self._has_ended and process.poll() is None and not (is_cut := is_interrupted()):
            said = self._next(POLL_S)
            if said is not None:
                self._pass_on(said, emit)
            poll()
            if time.monotonic() >= until:
                is_cut = True
                break
            if said is None and not has_told and until - time.monotonic() < limit_s - 2:
                has_told = True
                emit(Note(text=f"waiting for uploads to {self._address}, {limit_s:.0f} s at most"))
        while not is_cut and (said := self._next(0.0)) is not None:
            self._pass_on(said, emit)
        if not self._has_ended or self._left:
            steps = ", ".join(map(str, self._left))
            what = f"the checkpoint of step {steps}" if steps else f"what was to be uploaded within {limit_s:.0f} s"
            emit(
                Warned(
                    text=f"not in {self._address}: {what}. It is in {self._run_dir}, and the next start of the run "
                    "there uploads it"
                )
            )
        poll()
        self._abandon()

    def _start(self, *, is_fresh: bool, fetches: bool) -> None:
        self._close_pipes()
        self._num_starts += 1
        self._has_ended, self._heard = False, b""
        make_run_directory(self._run_dir)
        with open(self._run_dir / LOG, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment.child_environment(),
                start_new_session=True,  # Ctrl-C is the run's
            )
        asked = {
            "run_dir": str(self._run_dir.absolute()),
            "address": self._address,
            "keep": self._job.keep,
            "fresh": is_fresh,
            "alone": self._job.hosts == 1,
            "fetch": fetches,
        }
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended, which is seen where it is heard
                self._process.stdin.write(json.dumps(asked).encode() + b"\n")
                self._process.stdin.flush()

    def _pass_on(self, said: dict[str, Any], emit: Callable[[Event], None]) -> None:
        step, where = int(said.get("step") or 0), str(said.get("address", self._address))
        match said.get("says"):
            case "begun":
                emit(UploadBegun(step=step, path=where, num_bytes=int(said["num_bytes"])))
            case "done":
                emit(
                    UploadDone(
                        step=step,
                        path=where,
                        num_bytes=int(said["num_bytes"]),
                        num_sent_bytes=int(said["num_sent"]),
                        upload_s=float(said["seconds"]),
                    )
                )
                if said.get("remains"):
                    emit(Warned(text=f"older checkpoints in {self._address} could not be deleted: {said['remains']}"))
            case "failed":
                emit(UploadFailed(step=step, path=where, reason=str(said["reason"])))
            case "refused":
                emit(Warned(text=f"checkpoints are not copied to {self._address}: {said['text']}"))
            case "ended":
                self._has_ended, self._left = True, [int(one) for one in said["left"]]
            case "note":
                emit(Note(text=str(said["text"])))
            case _:
                pass

    def _next(self, limit_s: float | None) -> dict[str, Any] | None:
        """Return what the process says next; None: nothing within so long, or it has ended."""
        for line in self._lines(limit_s):
            with contextlib.suppress(ValueError):
                return read_object(line)
        return None

    def _lines(self, limit_s: float | None) -> Iterator[bytes]:
        pipe = None if self._process is None else self._process.stdout
        while pipe is not None:
            line, newline, rest = self._heard.partition(b"\n")
            if newline:
                self._heard = rest
                yield line
                continue
            if not select.select([pipe], [], [], limit_s)[0]:
                return
            more = os.read(pipe.fileno(), 1 << 16)
            if not more:
                return
            self._heard += more

    def _why(self) -> str:
        """What is known of the end of the process."""
        process = self._process
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = None if process is None else process.wait(5)
        with contextlib.suppress(OSError):
            lines = (self._run_dir / LOG).read_text(errors="replace").strip().splitlines()
            if lines:
                return f" (status {code}): {lines[-1]} (more in {self._run_dir / LOG})"
        return f" (status {code})"

    def _abandon(self) -> None:
        """End the process at once, whatever it is at: what is not uploaded is gone on with at the next start."""
        process = self._process
        if process is not None:
            process.kill()
            process.wait()
            self._close_pipes()
            self._process = None
            with contextlib.suppress(OSError):
                if not (self._run_dir / LOG).stat().st_size:
                    (self._run_dir / LOG).unlink()
                self._run_dir.rmdir()  # of a run that was refused nothing is left

    def _close_pipes(self) -> None:
        for pipe in () if self._process is None else (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
