"""The record of a run is whole whatever became of its writer, or of the file: the supervisor is killed, and started
again; another program writes over it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from network_hosts import free_port
from programs import (
    PACELINE,
    Announcements,
    checkpoints,
    command,
    losses,
    record,
    reference_losses,
    run,
    write_program,
)

LIMIT_S = 100.0
LOOK_S = 0.01  # nothing tells when a file grows


def rows(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_until_there_are(count: int, run_dir: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while rows(run_dir) < count:
        assert time.monotonic() < deadline, f"{rows(run_dir)} rows"
        time.sleep(LOOK_S)


def test_steps_that_a_killed_supervisor_did_not_come_to_write_are_there_after_the_next_start(tmp_path: Path) -> None:
    program, run_dir = write_program(tmp_path), tmp_path / "run"
    words = [*PACELINE, "run", program, "--run-dir", run_dir, "--save-every", "4", "--no-tensorboard"]
    with command(*words, "--", "--epochs", "10000") as running:
        wait_until_there_are(8, run_dir)
        supervisor = record(run_dir)["pid"]
        os.kill(supervisor, signal.SIGSTOP)  # its workers go on for some seconds, and nobody writes their rows
        written = rows(run_dir)
        deadline = time.monotonic() + LIMIT_S
        while max(checkpoints(run_dir), default=0) < written + 8:
            assert time.monotonic() < deadline, "the workers go on"
            time.sleep(LOOK_S)
        os.kill(supervisor, signal.SIGKILL)
        assert running.process.wait(LIMIT_S) == -signal.SIGKILL
        while running.left():
            assert time.monotonic() < deadline + LIMIT_S, running.left()
            time.sleep(LOOK_S)
    saved = max(checkpoints(run_dir))
    assert rows(run_dir) < saved, "rows are missing"
    code, output = run(*words, "--max-steps", str(saved + 4), "--", "--epochs", "10000")
    assert code == 0, output
    found = losses(run_dir)  # an error where a step is missing
    assert len(found) == saved + 4
    assert found[:8] == pytest.approx(reference_losses(), rel=1e-5)


def test_workers_of_another_launcher_end_well_where_their_record_was_damaged(tmp_path: Path) -> None:
    program, run_dir = write_program(tmp_path), tmp_path / "run"
    world = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = world | {"RANK": "0", "LOCAL_RANK": "0", "PACELINE_RUN_DIR": str(run_dir)}
    with (
        closing(Announcements(tmp_path / "pipe")) as pipe,
        command(sys.executable, program, "--tell", pipe.path, environment=environment) as running,
    ):
        (told,) = running.told(pipe, 1)
        os.kill(told["pid"], signal.SIGSTOP)
        before = record(run_dir)
        (run_dir / "run.json").write_text("not a record")
        os.kill(told["pid"], signal.SIGCONT)
        code, output = running.end()
    assert code == 0, output
    assert "Traceback" not in output
    after = record(run_dir)
    assert (after["state"], after["exit_code"]) == ("finished", 0)
    assert after["attempts"][0]["started"] == before["attempts"][0]["started"]
