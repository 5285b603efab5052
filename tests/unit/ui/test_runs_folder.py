"""The overview: which runs a folder has, how each stands, and what is read again when something changes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.processes import process_started_s, this_host
from paceline.ui import runs_folder
from paceline.ui.run_summary import RunSummary, summary_of
from paceline.ui.runs_folder import RunsFolder
from synthetic_runs import SyntheticRun, many_runs

ALL_S = 60.0


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look scans, and asks whether processes are there."""
    monkeypatch.setattr(runs_folder, "SCAN_EVERY_S", 0.0)
    monkeypatch.setattr(runs_folder, "CHECK_EVERY_S", 0.0)


def told(folder: RunsFolder, since: int = 0) -> dict[str, dict[str, Any]]:
    folder.look(ALL_S)
    changes = folder.changes(since)
    return {} if changes is None else {run["name"]: run for run in changes["runs"]}


def test_runs_are_found_below_each_other_and_not_inside_of_runs(tmp_path: Path) -> None:
    for name in ("a", "sweep/b", "sweep/deep/c", ".hidden/d"):
        SyntheticRun(path=tmp_path / name, steps=3).write()
    SyntheticRun(path=tmp_path / "a/checkpoints/e", steps=3).write()
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    folder = RunsFolder(tmp_path)
    assert set(told(folder)) == {"a", "sweep/b", "sweep/deep/c"}
    assert folder.find("sweep/b") == tmp_path / "sweep/b"
    assert folder.find("../" + tmp_path.name + "/a") is folder.find("/etc") is folder.find("a/checkpoints/e") is None


def test_a_name_that_is_no_text_is_spelled_out(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"odd\xff")
    SyntheticRun(path=path, steps=3).write()
    folder = RunsFolder(tmp_path)
    (name,) = told(folder)
    assert name == r"odd\udcff" and folder.find(name) == path


def test_a_run_may_be_the_folder_itself_and_a_folder_may_be_missing(tmp_path: Path) -> None:
    run = SyntheticRun(path=tmp_path / "one", steps=3).write()
    assert set(told(RunsFolder(run))) == {"one"}
    folder = RunsFolder(tmp_path / "later")
    assert told(folder) == {}
    SyntheticRun(path=tmp_path / "later/run", steps=3).write()
    assert set(told(folder)) == {"run"}


def test_only_what_has_changed_is_told(tmp_path: Path) -> None:
    first, second = (SyntheticRun(path=tmp_path / name, steps=5, last_step=9) for name in ("one", "two"))
    first.write()
    second.write()
    folder = RunsFolder(tmp_path)
    assert told(folder)["one"]["step"] == 5
    seen = folder.revision
    assert told(folder, seen) == {} and folder.changes(seen) is None
    second.append(6, 7)
    assert {name: run["step"] for name, run in told(folder, seen).items()} == {"two": 7}
    seen = folder.revision
    shutil.rmtree(first.path)
    folder.look()
    changes = folder.changes(seen)
    assert changes is not None and (changes["gone"], changes["runs"]) == (["one"], [])


def test_many_runs_are_told_newest_first_as_far_as_there_is_time(tmp_path: Path) -> None:
    many_runs(tmp_path, 30, steps=3)
    newest = tmp_path / "sweep-0/run-0007"
    for path in tmp_path.glob("*/*/"):
        os.utime(path, (1, 1) if path != newest else (2_000_000_000, 2_000_000_000))
    folder = RunsFolder(tmp_path)
    folder.look(0.0)
    changes = folder.changes(0)
    assert changes is not None and changes["num_waiting"] == 30  # no time: but a later look has some
    folder.look(1e-9)
    while folder.changes(0)["num_waiting"]:  # type: ignore[index]
        before = folder.changes(0)["num_waiting"]  # type: ignore[index]
        folder.look(0.05)
        assert folder.changes(0)["num_waiting"] < before  # type: ignore[index]
    assert len(told(folder)) == 30


def test_summary_of_a_running_run_says_what_is_left(tmp_path: Path) -> None:
    alive = {"host": this_host(), "pid": os.getpid(), "pid_started_s": process_started_s(os.getpid()) or 0.0}
    run = SyntheticRun(path=tmp_path / "run", steps=50, last_step=150, state="running", args=("--lr", "0.1"), **alive)
    run.write()
    found = summary_of(run.path, "run")
    assert (found.state, found.is_checked, found.step, found.last_step) == ("running", True, 50, 150)
    assert found.step_s == pytest.approx(0.4) and found.left_s == pytest.approx(40.0)
    assert (found.program, found.plan, found.workers) == ("train.py --lr 0.1", run.plan, 2)
    assert len(found.spark) >= 25 and found.spark[0] is not None and found.spark[0] > 3 > (found.spark[-1] or 9)
    assert found.loss == pytest.approx(next(run.rows(50, 50))["loss"], rel=0.5)


def test_summary_of_a_run_whose_process_is_gone_or_that_failed_says_so(tmp_path: Path) -> None:
    lost = SyntheticRun(path=tmp_path / "lost", steps=5, state="running", host=this_host(), pid=2**22 - 1)
    assert summary_of(lost.write(), "lost").state == "lost"
    failed = SyntheticRun(path=tmp_path / "failed", steps=5, state="failed", error="worker 0: ValueError: \x1b[2J")
    found = summary_of(failed.write(), "failed")
    assert found.problem == r"worker 0: ValueError: \x1b[2J"  # it cannot act on a terminal or a page


@pytest.mark.parametrize("text", ["", "[]", '{"attempts": 3}', '{"attempts": [{"attempt": 1e9}]}'])
def test_a_damaged_record_is_shown_as_one(tmp_path: Path, text: str) -> None:
    run = SyntheticRun(path=tmp_path / "run", steps=3).write()
    (run / "run.json").write_text(text)
    found: RunSummary = summary_of(run, "run")
    assert found.state == "unreadable" and "cannot be read" in found.problem
