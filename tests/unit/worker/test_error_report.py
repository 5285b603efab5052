"""What error.json keeps of an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.plan import Job
from paceline.plan.job import Assignment
from paceline.worker.record.error_report import write_error


def assignment(worker_dir: Path) -> Assignment:
    return Assignment(
        rank=0,
        workers=1,
        local_rank=0,
        local_workers=1,
        host="h",
        host_index=0,
        hosts=1,
        address="",
        run_dir="",
        attempt=1,
        worker_dir=str(worker_dir),
        channel_fd=-1,
        command_started=0.0,
        job=Job(),
    )


@pytest.mark.parametrize(
    ("message", "has_cause"),
    [
        ("DataLoader worker (pid 7) is killed by signal: Killed.", False),
        ("DataLoader worker (pid(s) 7) exited unexpectedly", False),
        ("another error", True),
    ],
)
def test_what_was_interrupted_by_the_end_of_a_loader_is_no_cause_of_it(
    tmp_path: Path, message: str, has_cause: bool
) -> None:
    try:
        try:
            raise EOFError("the pipe of that loader")
        except EOFError as broken:
            raise RuntimeError(message) from broken
    except RuntimeError as error:
        write_error(error, assignment(tmp_path), step=3)
    told = json.loads((tmp_path / "error.json").read_text())
    assert told["message"] == message
    assert ("the pipe of that loader" in told["traceback"]) == has_cause
