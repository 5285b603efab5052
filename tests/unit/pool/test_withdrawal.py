"""A run is taken out of a pool that is not at work: it is asked to end, or its user is told where it goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.pool import run_control
from paceline.pool.pool_run import PoolRun, queued_runs
from paceline.pool.withdrawal import take_out
from paceline.processes import process_started_s, this_host


@pytest.fixture
def supervisor() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def queued(pool: Path, **record: Any) -> PoolRun:
    """Queue a run, and write its record if there is something to be in it."""
    run_dir = pool / "first"
    run = PoolRun(
        name="first",
        command=("train.py",),
        folder="/",
        environment={},
        run_dir=str(run_dir),
        script="train.py",
        least=1,
        most=1,
        workers_each=1,
        submitted=1.0,
    )
    run.add_to(pool)
    if record:
        run_dir.mkdir()
        fields = {"run_dir": str(run_dir), "workers": 1, "attempts": [], "job": {}, "plan": "", "state": "running"}
        (run_dir / "run.json").write_text(json.dumps({**fields, **record}))
    return run


def process_of(supervisor: subprocess.Popen[bytes]) -> dict[str, Any]:
    return {"host": this_host(), "pid": supervisor.pid, "pid_started_s": process_started_s(supervisor.pid)}


def test_one_that_runs_on_this_host_is_asked_to_end(tmp_path: Path, supervisor: subprocess.Popen[bytes]) -> None:
    run = queued(tmp_path, **process_of(supervisor))
    assert take_out(run, pool=tmp_path) == ""
    assert supervisor.wait(10) == -signal.SIGTERM
    assert queued_runs(tmp_path, known={}) == {}


def test_one_on_several_hosts_is_asked_to_end_on_all_of_them(
    tmp_path: Path, supervisor: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(run_control, "ask_to_end", lambda pid: asked.append(pid) or True)
    run = queued(tmp_path, **process_of(supervisor), job={"head": "auto"})
    assert take_out(run, pool=tmp_path) == ""
    assert (asked, supervisor.poll()) == ([supervisor.pid], None), "SIGTERM would end its part on this host alone"


def test_one_that_another_host_leads_is_said_to_go_on_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = queued(tmp_path, host="elsewhere", pid=os.getpid(), pid_started_s=1.0)
    assert main(["pool", str(tmp_path), "--cancel", "first"]) == 0
    taken, goes_on = capsys.readouterr().out.splitlines()
    assert taken.startswith("first is taken out")
    assert goes_on.startswith("It still runs: no pool is there to end it, and host elsewhere leads it.")
    assert goes_on.endswith(f"There: paceline stop {run.run_dir}")


@pytest.mark.parametrize("record", [{}, {"host": "elsewhere", "pid": 7, "pid_started_s": 1.0, "state": "stopped"}])
def test_one_that_does_not_run_is_only_taken_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], record: dict[str, Any]
) -> None:
    queued(tmp_path, **record)
    assert main(["pool", str(tmp_path), "--cancel", "first"]) == 0
    assert capsys.readouterr().out == f"first is taken out; its files stay in {tmp_path / 'first'}\n"
