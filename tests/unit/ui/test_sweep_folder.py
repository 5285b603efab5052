"""A sweep on the page: its trials as they change, its best, and what of a damaged or hostile file is left out."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from paceline.ui import runs_folder
from paceline.ui.runs_folder import RunsFolder
from paceline.ui.sweep_folder import SweepFolder
from synthetic_groups import searched, write_pool, write_sweep
from synthetic_runs import SyntheticRun


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_folder, "SCAN_EVERY_S", 0.0)
    monkeypatch.setattr(runs_folder, "SCAN_SELDOM_S", 0.0)


def trial(number: int, value: float | None, **fields: Any) -> dict[str, Any]:
    return {"number": number, "parameters": {"lr": 0.1 * (number + 1)}, "value": value, **fields}


def read(path: Path) -> SweepFolder:
    sweep = SweepFolder(path, "study")
    sweep.look()
    return sweep


def test_the_best_and_the_values_so_far_follow_the_direction(tmp_path: Path) -> None:
    rows = [trial(0, 0.5), trial(1, 0.9, state="pruned"), trial(2, 0.7), trial(3, 0.8, state="running"), trial(4, 0.6)]
    most = read(write_sweep(tmp_path / "most", rows)).summary()
    assert (most["best"], most["value"], most["values"]) == (2, 0.7, [0.5, 0.7, 0.7])
    assert most["counts"] == {"running": 1, "finished": 3, "pruned": 1} and most["wanted"] == 40
    least = read(write_sweep(tmp_path / "least", rows, direction="minimize")).summary()
    assert (least["best"], least["values"]) == (0, [0.5, 0.5, 0.5])
    told = read(write_sweep(tmp_path / "told", rows, best=4)).summary()
    assert (told["best"], told["value"]) == (4, 0.6), "the sweep's own word counts"


def test_a_page_gets_the_trials_that_it_lacks(tmp_path: Path) -> None:
    sweep = read(write_sweep(tmp_path / "study", [trial(0, 0.5), trial(1, None, state="running")]))
    first = sweep.changes(0)
    assert first is not None and first["whole"] and [one["number"] for one in first["trials"]] == [0, 1]
    (seen,) = first["revisions"]
    assert sweep.changes(seen) is None and not sweep.look()
    write_sweep(tmp_path / "study", [trial(0, 0.5), trial(1, 0.6, state="running"), trial(2, None, state="waiting")])
    assert sweep.look()
    second = sweep.changes(seen)
    assert second is not None and not second["whole"] and [one["number"] for one in second["trials"]] == [1, 2]
    sweep.has_pages({1: "study/trials/trial-0001"}, pool=None)
    third = sweep.changes(second["revisions"][0])
    assert third is not None and [(one["number"], one["page"]) for one in third["trials"]] == [
        (1, "study/trials/trial-0001")
    ]
    write_sweep(tmp_path / "study", [trial(0, 0.1)])  # another study in the same folder
    sweep.look()
    fourth = sweep.changes(third["revisions"][0])
    assert fourth is not None and fourth["whole"] and len(fourth["trials"]) == 1
    other_server = sweep.changes(99)
    assert other_server is not None and other_server["whole"]


def test_a_process_that_is_gone_is_said_though_no_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = read(write_sweep(tmp_path / "study", []))
    assert sweep.summary()["state"] == "running" and not sweep.look()
    monkeypatch.setattr("paceline.ui.sweep_folder.is_same_process", lambda pid, started: False)
    assert sweep.look() and sweep.summary()["state"] == "lost" and not sweep.look()
    assert read(write_sweep(tmp_path / "ended", [], state="finished")).summary()["state"] == "finished"
    assert read(write_sweep(tmp_path / "far", [], host="other")).summary()["state"] == "elsewhere"


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'{"trials": 5}', b'{"trials": [null, 3, {"number": -1}, {"number": "x"}, {"number": true}]}',
     b'{"name": 5, "direction": "up", "state": [], "wanted": -3, "best": {}, "pool": "\\u0000", "trials": []}'],
)  # fmt: skip
def test_a_damaged_file_has_no_trials_and_breaks_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "sweep.json").write_bytes(content)
    folder = RunsFolder(tmp_path)
    folder.look(60)
    found = folder.sweep(tmp_path.name, 0)
    assert found is not None and found["trials"] == []
    json.dumps(found, allow_nan=False)


def test_values_and_directories_that_cannot_be_are_left_out(tmp_path: Path) -> None:
    rows = [trial(0, None, run_dir="../../etc"), trial(1, None, run_dir="/etc"), trial(2, None, parameters={"a": [1]})]
    rows[2] |= {"value": "high", "state": "odd", "step": -1, "why": None}
    sweep = read(write_sweep(tmp_path / "study", rows))
    assert sweep.run_dirs() == {2: "trials/trial-0002"}
    changes = sweep.changes(0)
    assert changes is not None
    last = changes["trials"][2]
    assert (last["value"], last["state"], last["step"], last["why"]) == (None, "waiting", 0, "")
    assert last["parameters"] == {"a": "[1]"}
    os.remove(tmp_path / "study/sweep.json")
    os.mkfifo(tmp_path / "study/sweep.json")
    assert sweep.look() and sweep.problem


def test_trials_lead_to_their_runs_and_runs_to_their_trial(tmp_path: Path) -> None:
    study = write_sweep(tmp_path / "study", searched(12))
    run = SyntheticRun(path=study / "trials/trial-0003", steps=5).write()
    write_pool(study / "pool", {})
    folder = RunsFolder(tmp_path)
    folder.look(60)
    found = folder.sweep("study", 0)
    assert found is not None and found["study"]["pool_page"] == "study/pool"
    assert {one["number"]: one["page"] for one in found["trials"] if one["page"]} == {3: "study/trials/trial-0003"}
    assert folder.groups_of(run) == [{"kind": "sweep", "name": "study", "number": 3}]
    assert folder.sweep("other", 0) is None and not folder.has_sweep("other")
