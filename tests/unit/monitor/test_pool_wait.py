"""`paceline status` says that a run waits in its pool, as far as the pool's files say so of this very run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline import environment
from paceline.monitor.records.run_record import RunRecord
from paceline.monitor.status.status import main_status, status
from paceline.plan import Job
from paceline.runs.attempt_start import begin_record
from synthetic_groups import queue, write_pool


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that its pool has paused."""
    monkeypatch.setenv(environment.POOL, str(tmp_path / "lab"))
    begin_record(tmp_path / "one", Job(program="train.py"), workers=1, plan=None).end_attempt("stopped", 75)
    queue(write_pool(tmp_path / "lab", {"one": {"phase": "waiting"}}), tmp_path / "one")
    return tmp_path / "one"


def test_a_paused_run_waits_and_the_attempt_was_stopped(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    assert main_status(Path("one")) == 0
    assert "one: waits in pool lab (the last attempt stopped with exit code 75)\n" in capsys.readouterr().out
    assert main_status(Path("one"), json=True) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["state"], facts["waits_in"]) == ("stopped", str(run.parent / "lab"))


@pytest.mark.parametrize(
    ("phase", "state", "waits"),
    [("leaving", "stopped", True), ("leaving", "failed", False), ("waiting", "failed", True),
     ("waiting", "finished", False), ("stopped", "stopped", False), ("running", "stopped", False),
     (7, "stopped", False)],
)  # fmt: skip
def test_it_waits_where_the_pool_will_go_on_with_it(run: Path, phase: object, state: str, waits: bool) -> None:
    RunRecord.load(run).changed(state=state)
    write_pool(run.parent / "lab", {"one": {"phase": phase}})
    assert (status(run).waits_in is not None) == waits


def test_another_run_of_the_queue_is_not_this_one_whatever_its_name(run: Path) -> None:
    named = run.parent / "lab/queue/one.json"
    named.rename(named.with_name("study-trial-0001.json"))
    queue(run.parent / "lab", run.parent / "else" / "one")
    assert status(run).waits_in is None
    write_pool(run.parent / "lab", {name: {"phase": "waiting"} for name in ("one", "study-trial-0001")})
    assert status(run).waits_in == str(run.parent / "lab")


def test_a_pool_that_is_gone_or_damaged_says_nothing(run: Path) -> None:
    for content in (b"{", b'{"runs": [1]}', b'{"runs": {"one": 3, "../one": {"phase": "waiting"}}}'):
        (run.parent / "lab/pool.json").write_bytes(content)
        (run.parent / "lab/queue/one.json").write_bytes(content)
        assert status(run).waits_in is None
    (run.parent / "lab/pool.json").unlink()
    assert status(run).waits_in is None


def test_a_start_outside_of_the_pool_belongs_to_none(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.POOL)
    begin_record(run, Job(program="train.py"), workers=1, plan=None).end_attempt("stopped", 75)
    assert RunRecord.load(run).pool is None and status(run).waits_in is None
