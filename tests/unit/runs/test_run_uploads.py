"""The supervisor's side of uploads: what it is told, and a process that ends, hangs or refuses."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.checkpoint.remote.remote_checkpoints import RemoteCheckpoints
from paceline.errors import PlanError
from paceline.events import Event, UploadBegun, UploadDone, Warned
from paceline.plan import Job
from paceline.runs.run_uploads import RunUploads
from remote_runs import BreakingStore, complete_steps, put_checkpoint

LIMIT_S = 60.0


def job_of(folder: Path, **fields: object) -> Job:
    given = {"run_dir": str(folder / "run"), "remote_dir": f"file://{folder}/far/run", **fields}
    return Job(program="t.py", **given)  # pyright: ignore[reportArgumentType]


def heard(uploads: RunUploads, events: list[Event], until: Callable[[Event], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not any(map(until, events)):
        assert time.monotonic() < deadline, events
        uploads.poll(events.append)
        time.sleep(0.02)


def test_checkpoints_are_uploaded_while_the_run_goes_on_and_at_its_end(tmp_path: Path) -> None:
    events: list[Event] = []
    with RunUploads(job_of(tmp_path)) as uploads:
        uploads.begin(print)
        put_checkpoint(tmp_path / "run", 10)
        heard(uploads, events, lambda event: isinstance(event, UploadDone))
        put_checkpoint(tmp_path / "run", 20)
        uploads.end("finished", events.append)
    assert [(type(one), one.step) for one in events if isinstance(one, UploadBegun | UploadDone)] == [
        (UploadBegun, 10), (UploadDone, 10), (UploadBegun, 20), (UploadDone, 20),
    ]  # fmt: skip
    assert complete_steps(RemoteCheckpoints(BreakingStore(f"file://{tmp_path}/far/run"))) == [10, 20]


@pytest.mark.thorough
def test_a_process_that_is_killed_is_started_again(tmp_path: Path) -> None:
    events: list[Event] = []
    with RunUploads(job_of(tmp_path)) as uploads:
        uploads.begin(print)
        assert uploads._process is not None
        os.kill(uploads._process.pid, signal.SIGKILL)
        heard(uploads, events, lambda event: isinstance(event, Warned) and "started again" in event.text)
        put_checkpoint(tmp_path / "run", 10)
        uploads.end("finished", events.append)
    assert complete_steps(RemoteCheckpoints(BreakingStore(f"file://{tmp_path}/far/run"))) == [10]


def test_a_wait_that_is_cut_short_says_what_is_not_there(tmp_path: Path) -> None:
    events: list[Event] = []
    with RunUploads(job_of(tmp_path)) as uploads:
        uploads.begin(print)
        assert uploads._process is not None
        os.kill(uploads._process.pid, signal.SIGSTOP)
        put_checkpoint(tmp_path / "run", 10)
        uploads.end("finished", events.append, is_interrupted=lambda: True)
    (warned,) = [event for event in events if isinstance(event, Warned)]
    assert "the next start of the run there uploads it" in warned.text


def test_a_sweeps_trials_do_not_share_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_PARAMETERS", '{"lr": 0.1}')
    with RunUploads(job_of(tmp_path)) as uploads, pytest.raises(PlanError, match="every trial of the sweep"):
        uploads.begin(print)


def test_without_an_address_nothing_is_done(tmp_path: Path) -> None:
    with RunUploads(job_of(tmp_path, remote_dir=None)) as uploads:
        uploads.begin(print)
        events: list[Event] = []
        uploads.poll(events.append)
        uploads.end("finished", events.append)
    assert not events and not (tmp_path / "run").exists()
