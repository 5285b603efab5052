"""What follows from how workers ended."""

from __future__ import annotations

import dataclasses
import json
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import WorkerError, WorkersLostError
from paceline.launch.job.outcome import STUCK, JobOutcome, WorkerExit, interrupted, lost_worker, read_error, verdict

WELL = WorkerExit(
    worker=0, host="a", pid=10, exit_code=0, signal=None, peak_memory_bytes=1, error=None, sent_by_us=False
)


def ended(worker: int, exit_code: int | None = 1, *, sent_by_us: bool = False, **error: Any) -> WorkerExit:
    return dataclasses.replace(WELL, worker=worker, exit_code=exit_code, sent_by_us=sent_by_us, error=error or None)


def test_all_well_is_finished() -> None:
    outcome = verdict([WELL, ended(1, 0)])
    assert (outcome.state, outcome.exit_code, outcome.failures) == ("finished", 0, ())
    assert len(outcome.exits) == 2


@pytest.mark.parametrize(
    ("exits", "exit_code"),
    [
        ([ended(1, usage=False)], 1),
        ([ended(1, 2, usage=True)], 2),
        ([ended(1, 2, usage=True), ended(2, usage=False)], 1),
        ([ended(1, 2, usage=True), ended(2, usage=False, echo=True)], 2),
        ([ended(1, 2, usage=True), ended(2, None, sent_by_us=True)], 2),
        ([ended(1, None)], 1),
        ([ended(1, echo=True)], 1),
    ],
)
def test_only_causes_decide_the_exit_code(exits: list[WorkerExit], exit_code: int) -> None:
    outcome = verdict([WELL, *exits])
    assert (outcome.state, outcome.exit_code, outcome.failures) == ("failed", exit_code, tuple(exits))


KILLED = dataclasses.replace(ended(1, None), signal=int(signal.SIGKILL))
HOST_LOST = lost_worker(2, host="b", pid=7, kind="HostLost", message="gone")


@pytest.mark.parametrize(
    ("exits", "exit_code"),
    [
        ([KILLED], 76),
        ([KILLED, ended(2, echo=True), ended(3, None, sent_by_us=True)], 76),
        ([HOST_LOST, lost_worker(3, host="b", pid=8, kind="HostLost", message="gone", echo=True)], 76),
        ([lost_worker(1, host="a", pid=7, kind="WarmParentLost", message="killed")], 76),
        ([KILLED, ended(2, kind="ValueError")], 1),
        ([KILLED, ended(2, 2, usage=True)], 1),
        ([HOST_LOST, dataclasses.replace(KILLED, signal=int(signal.SIGSEGV))], 1),
        ([dataclasses.replace(KILLED, signal=int(signal.SIGABRT))], 1),
        ([lost_worker(1, host="a", pid=7, kind="Hang", message="it hangs")], 1),
        ([KILLED, lost_worker(2, host="a", pid=7, kind=STUCK, message="it does not end", sent_by_us=True)], 1),
    ],
)
def test_workers_that_were_only_lost_may_restart_and_a_programs_own_crash_is_a_failure(
    exits: list[WorkerExit], exit_code: int
) -> None:
    outcome = verdict([WELL, *exits])
    assert (outcome.state, outcome.exit_code, outcome.failures) == ("failed", exit_code, tuple(exits))


def test_the_error_of_lost_workers_survives_pickling_and_ends_a_script_that_does_not_catch_it() -> None:
    about = {"worker": 1, "host": "a", "step": 3, "exit_code": None, "traceback": ""}
    error = pickle.loads(pickle.dumps(WorkersLostError("worker 1 was killed", code=76, **about)))
    assert isinstance(error, WorkerError) and isinstance(error, SystemExit)
    assert (str(error), error.code, {name: getattr(error, name) for name in about}) == (
        "worker 1 was killed",
        76,
        about,
    )


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_stopped_job_has_no_failures_and_the_shells_exit_code(signum: int, code: int) -> None:
    outcome = interrupted(signum, [ended(1, None, sent_by_us=True)], by=" on host b")
    assert (outcome.state, outcome.exit_code, outcome.failures) == ("stopped", code, ())
    assert outcome.reason == f"stopped by {signal.Signals(signum).name} on host b"


def test_outcomes_travel_as_json() -> None:
    outcome = verdict(
        [WELL, lost_worker(1, host="b", pid=7, kind="HostLost", message="gone"), ended(2, kind="ValueError")]
    )
    again = JobOutcome.from_json(json.loads(json.dumps(outcome.to_json())))
    assert again.failures == outcome.failures
    assert [one.worker for one in again.exits] == [0, 1, 2]
    assert dataclasses.replace(again, exits=()) == dataclasses.replace(outcome, exits=())


def test_error_files_are_read_with_care(tmp_path: Path) -> None:
    assert read_error(tmp_path) is None
    file = tmp_path / "error.json"
    for text in ("", '{"kind": "ValueErr', "[1]", "\ud800".encode("utf-8", "surrogatepass").decode("latin-1")):
        file.write_text(text)
        assert read_error(tmp_path) is None
    file.write_text(
        json.dumps({"kind": "ValueError", "message": "m" * 100_000, "traceback": "t" * 100_000 + "the end"})
    )
    error = read_error(tmp_path)
    assert error is not None
    assert error["kind"] == "ValueError"
    assert len(error["message"]) < 10_000
    assert len(error["traceback"]) < 10_000
    assert error["traceback"].endswith("the end")
