"""Hosts that share the disk of the run's directory and are given no address: `--head auto`, also on one machine."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_runs import losses, one_machine, until, write_program

TOKEN = "0123456789abcdef0123"
LIMIT_S = 120.0


@contextlib.contextmanager
def host(program: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """One host's command, as an engine gives it."""
    words = [sys.executable, "-m", "paceline", "run", str(program), "--head", "auto", "--run-dir", "r", *options]
    environment = os.environ | {"PACELINE_TOKEN": TOKEN, "PACELINE_ENGINE": "slurm"}
    process = subprocess.Popen(
        words,
        cwd=program.parent,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=LIMIT_S)
    return process.returncode, output


def test_hosts_meet_in_the_directory_with_different_numbers_of_workers(tmp_path: Path) -> None:
    program, plan = write_program(tmp_path, sleep_s=0.0), ("--plan", "batch(size=24,micro=4)")
    options = ("--hosts", "2", "--workers", "3", *plan)
    with host(program, *options, "--slots", "1") as one, host(program, *options, "--slots", "2") as other:
        ends = [ended(one), ended(other)]
    assert [code for code, _ in ends] == [0, 0], ends
    text = ends[0][1] + ends[1][1]
    assert text.count("finished at step 20") == 1, "one console shows the run"
    assert "go on with" not in text
    alone = one_machine(write_program(tmp_path / "alone", sleep_s=0.0), tmp_path / "one", *plan)
    assert losses(tmp_path / "r") == pytest.approx(alone, rel=1e-6)
    assert not (tmp_path / "r" / "head.json").exists()


def test_slots_that_do_not_make_up_the_workers_end_the_start(tmp_path: Path) -> None:
    program = write_program(tmp_path)
    options = ("--hosts", "2", "--workers", "4", "--slots", "1")
    with host(program, *options) as one, host(program, *options) as other:
        ends = [ended(one), ended(other)]
    assert [code for code, _ in ends] == [2, 2], ends
    assert all("the 2 hosts have 2 slots for 4 workers" in text for _, text in ends)


@pytest.mark.further
def test_a_host_joins_a_run_whose_other_host_is_on_the_same_machine_and_one_that_is_lost_comes_back(
    tmp_path: Path,
) -> None:
    program = write_program(tmp_path, samples=14400, sleep_s=0.02)
    options = ("--hosts", "1", "--workers", "1", "--plan", "replicas=1-2+batch(size=24,micro=4)")

    def at_work() -> int:
        words = [sys.executable, "-m", "paceline", "status", "r", "--json"]
        said = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S).stdout
        try:
            return sum(worker["state"] == "running" for worker in json.loads(said)["workers"])
        except ValueError:
            return 0

    def newcomers() -> int:
        """Workers that have joined and taken a step with the others: they have the run's state."""
        events = map(json.loads, (tmp_path / "r" / "attempt_1" / "events.jsonl").read_text().splitlines())
        return sum(event["event"] == "WorkerJoined" for event in events)

    with host(program, *options) as one:
        until(lambda: at_work() == 1, "the first host is at work")
        with host(program, *options) as other:
            until(lambda: newcomers() == 1, "the second one has joined")
            one.kill()  # the coordinator; its worker ends with it
            until(lambda: at_work() == 1, "the second one goes on")
            with host(program, *options) as again:
                until(lambda: newcomers() == 2, "the first one is back")
                (tmp_path / "hurry").touch()
                ends = [ended(other), ended(again)]
    assert [code for code, _ in ends] == [0, 0], ends
    record = json.loads((tmp_path / "r" / "run.json").read_text())
    assert [attempt["attempt"] for attempt in record["attempts"]] == [1]
    assert sorted(losses(tmp_path / "r")) == list(range(1, 601))
