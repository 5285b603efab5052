"""A pool on the page: what is read from its folder, whatever lies there, and how many devices each run had."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.ui import runs_folder
from paceline.ui.pool_devices import devices_of
from paceline.ui.pool_folder import PoolFolder
from paceline.ui.pool_history import Decision, decision_of, history_of
from paceline.ui.runs_folder import RunsFolder
from synthetic_groups import SUBMITTED, decide, queue, write_pool
from synthetic_runs import SyntheticRun

RUNNING = {"phase": "running", "replicas": 2, "devices": 2, "step": 7, "last_step": 90, "why": "b goes to 2"}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_folder, "SCAN_EVERY_S", 0.0)
    monkeypatch.setattr(runs_folder, "SCAN_SELDOM_S", 0.0)


def told(path: Path) -> dict[str, Any]:
    pool = PoolFolder(path, "pool")
    pool.look()
    return pool.facts({})


def test_a_pool_shows_its_queue_in_order_with_what_each_run_has_and_why(tmp_path: Path) -> None:
    pool = write_pool(tmp_path / "pool", {"b": RUNNING, "a": {"phase": "waiting", "why": "a waits for 3 devices"}})
    queue(pool, tmp_path / "a", least=3, most=4, submitted=SUBMITTED + 5, deadline=SUBMITTED + 99, priority=2.0)
    queue(pool, tmp_path / "b", most=3)
    found = told(pool)
    b, a = found["runs"]
    assert (found["state"], found["slots"], found["held"], found["num_waiting"]) == ("running", 4, 2, 1)
    assert (b["name"], b["phase"], b["replicas"], b["least"], b["most"], b["step"], b["last_step"]) == (
        "b", "running", 2, 1, 3, 7, 90,
    )  # fmt: skip
    assert (a["phase"], a["why"], a["priority"], a["deadline"]) == (
        "waiting", "a waits for 3 devices", 2.0, SUBMITTED + 99,
    )  # fmt: skip
    assert [node["holders"] for node in found["nodes"]] == [[{"run": "b", "devices": 2}]]
    assert "s3cret" not in json.dumps(found), "a queued run's file has its user's environment"


def test_what_changes_is_noticed_and_what_does_not_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = write_pool(tmp_path / "pool", {})
    folder = PoolFolder(pool, "pool")
    assert folder.look() and not folder.look()
    queue(pool, tmp_path / "a")
    assert folder.look() and not folder.look() and list(folder.queued) == ["a"]
    write_pool(pool, {"a": RUNNING})
    assert folder.look() and folder.summary()["held"] == 2
    decide(pool, [(SUBMITTED, "a", 0, 2, "a starts")])
    assert folder.look() and folder.facts({})["decisions"][0]["why"] == "a starts"
    (pool / "queue" / "a.json").unlink()
    assert folder.look() and folder.facts({})["runs"] == []
    monkeypatch.setattr("paceline.ui.pool_folder.is_same_process", lambda pid, started: False)
    assert folder.look() and folder.summary()["state"] == "stopped", "its process has gone, and no file says so"


def test_a_pool_of_another_host_runs_while_its_folder_is_locked(tmp_path: Path) -> None:
    pool = write_pool(tmp_path / "pool", {}, host="elsewhere", has_ended=False)
    folder = PoolFolder(pool, "pool")
    folder.look()
    assert folder.summary()["state"] == "stopped"
    held = subprocess.Popen(
        [sys.executable, "-c", "import sys; from pathlib import Path; from paceline import run_lock\n"
         "print(run_lock.hold(Path(sys.argv[1])), flush=True); sys.stdin.read()", str(pool)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with held:
        assert held.stdout is not None and held.stdin is not None and held.stdout.readline() == b"True\n"
        assert folder.look() and folder.summary()["state"] == "running"
        write_pool(pool, {}, host="elsewhere", has_ended=True)
        assert folder.look() and folder.summary()["state"] == "stopped", "its user has ended it, and said so"
        held.stdin.close()
        held.wait(20)


@pytest.mark.parametrize(
    "record",
    [b"", b"{", b"[]", b'{"slots": "many", "runs": {"a": 3}}', b'{"runs": []}', b'{"slots": -1, "pid": 1e400}',
     b'{"slots": 99999999999999999999, "runs": {"a": {"phase": 5, "replicas": -4, "step": null, "why": 9}}}',
     b'{"nodes": {"n1": "x", "n2": {"slots": []}}, "runs": {"a": {"phase": "running", "parts": {"n1": [1, {}]}}}}',
     b'{"nodes": [], "runs": {"a": {"phase": "running", "replicas": 1, "parts": [], "workers_each": "x"}}}'],
)  # fmt: skip
def test_a_damaged_record_is_shown_as_far_as_it_can_be(tmp_path: Path, record: bytes) -> None:
    pool = tmp_path / "pool"
    queue(pool, tmp_path / "a")
    (pool / "pool.json").write_bytes(record)
    (pool / "queue" / "junk.json").write_bytes(record)
    (pool / "decisions.jsonl").write_bytes(record + b"\n")
    found = told(pool)
    assert [run["name"] for run in found["runs"]] == ["a"] and found["decisions"] == []
    assert 0 <= found["held"] <= found["slots"] + 1
    json.dumps(found, allow_nan=False)


def test_a_named_pipe_in_a_pool_keeps_nobody_waiting(tmp_path: Path) -> None:
    (tmp_path / "pool/queue").mkdir(parents=True)
    for name in ("pool.json", "queue/a.json", "decisions.jsonl"):
        os.mkfifo(tmp_path / "pool" / name)
    assert told(tmp_path / "pool")["problem"] != ""


def test_devices_are_shown_by_node_where_the_pool_has_some() -> None:
    record = {
        "nodes": {
            "n1": {"slots": 4, "state": "here", "used": 1},
            "n2": {"slots": 4, "state": "here"},
            "n3": {"slots": 4, "state": "silent"},
            "n4": {"slots": 4, "state": "left"},
        },
        "runs": {
            "a": {"parts": {"n1": {"replicas": 1, "start": 1}, "n2": {"replicas": 2, "start": 2, "leaves": True}}},
            "b": {"parts": {"n2": {"replicas": 1, "start": 1}}, "workers_each": 2},
            "c": {"parts": {"n9": {"replicas": 4}, "n1": 7}},
        },
    }
    nodes = devices_of(record, {"a": 3, "b": 2, "c": 3})
    assert [(node["name"], node["slots"], node["is_here"]) for node in nodes] == [
        ("n1", 4, True), ("n2", 4, True), ("n3", 4, False),
    ]  # fmt: skip
    held = [{one["run"]: one["devices"] for one in node["holders"]} for node in nodes]
    assert held == [{"a": 1, "c": 3}, {"a": 2, "b": 2}, {}]


def row(time: float, run: str, before: int, after: int) -> Decision:
    return Decision(time=time, run=run, before=before, after=after, why="")


def test_the_history_ends_where_runs_end_and_counts_devices() -> None:
    rows = [row(1, "a", 0, 2), row(3, "gone", 0, 1), row(5, "late", 0, 1), row(7, "b", 0, 1), row(9, "a", 0, 1)]
    found = history_of(rows, each={"a": 2, "b": 1}, ends={"a": None, "b": 10.0}, missed={}, slots=6)
    assert found == {
        "a": [[1, 4], [7, 0], [9, 2]],  # it started anew, and the others had its devices before
        "gone": [[3, 1], [9, 0]],  # nothing more is known of it
        "late": [[5, 1], [9, 0]],
        "b": [[7, 1], [10.0, 0]],
    }
    assert history_of(rows[:2], each={}, ends={}, missed={"gone": 5.0}, slots=6)["gone"] == [[3, 1], [5.0, 0]]


def test_a_run_that_was_missed_late_counts_until_others_had_its_devices() -> None:
    rows = [row(10.0 * number, f"trial-{number}", 0, 1) for number in range(8)]
    rows += [row(75.0, "long", 0, 1), row(90.0, "long", 1, 2), row(90.01, "trial-7", 1, 0)]
    missed = {f"trial-{number}": 99.0 for number in range(8)}  # all at once, when a page was opened
    found = history_of(rows, each={}, ends={"long": None}, missed=missed, slots=2)
    moments = sorted({time for changes in found.values() for time, _ in changes})
    held = [sum(_devices_at(changes, moment + 0.5) for changes in found.values()) for moment in moments]
    assert max(held) == 2 == held[-1], "never more than the pool has"
    assert found["trial-0"] == [[0, 1], [20, 0]] and found["long"] == [[75, 1], [90, 2]]


def _devices_at(changes: list[list[float]], moment: float) -> float:
    return next((devices for time, devices in reversed(changes) if time <= moment), 0)


def test_a_run_that_is_taken_out_ends_when_it_is_missed_if_one_looked_just_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = write_pool(tmp_path / "pool", {"a": {"phase": "running", "replicas": 1, "devices": 2}})
    queue(pool, tmp_path / "a", workers_each=2)
    decide(pool, [(SUBMITTED, "a", 0, 1, "a starts"), (SUBMITTED + 9, "b", 0, 1, "b starts")])
    folder = PoolFolder(pool, "pool")
    folder.look()
    assert folder.facts({})["history"]["a"] == [[SUBMITTED, 2]]
    (pool / "queue/a.json").unlink()
    monkeypatch.setattr("paceline.clock.now", lambda: SUBMITTED + 60)
    folder.look()
    assert folder.facts({})["history"]["a"] == [[SUBMITTED, 2], [SUBMITTED + 60, 0]]
    queue(pool, tmp_path / "a", workers_each=2)
    folder.look()
    assert folder.facts({})["history"]["a"] == [[SUBMITTED, 2]]
    (pool / "queue/a.json").unlink()
    monkeypatch.setattr("paceline.ui.pool_folder.SHORTLY_S", 0.0)
    folder.look()
    assert folder.facts({})["history"]["a"] == [[SUBMITTED, 2], [SUBMITTED + 9, 0]], "nobody knows when it went"


@pytest.mark.parametrize("line", [b"", b"[]", b'{"time": 1}', b'{"time": -1, "run": "a", "before": 0, "after": 1}',
                                  b'{"time": 1, "run": "a", "before": true, "after": 1}'])  # fmt: skip
def test_a_line_that_is_no_decision_is_passed_over(line: bytes) -> None:
    assert decision_of(line) is None


def test_pools_are_found_below_the_folder_and_know_the_pages_of_their_runs(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    run = SyntheticRun(path=runs / "deep/a", steps=30, last_step=90, state="running").write()
    elsewhere = SyntheticRun(path=tmp_path / "other/b", steps=3).write()
    pool = write_pool(runs / "lab", {"a": RUNNING})
    queue(pool, run)
    queue(pool, elsewhere)
    queue(pool, runs / "later")
    folder = RunsFolder(runs)
    folder.look(60)
    folder.look(60)  # what lies elsewhere is known once the queue was read
    changes = folder.changes(0)
    assert changes is not None
    assert [one["name"] for one in changes["pools"]] == ["lab"] and changes["sweeps"] == []
    assert {one["name"] for one in changes["runs"]} == {"deep/a", "lab/b"}
    found = folder.pool("lab")
    assert found is not None
    assert {one["name"]: one["page"] for one in found["runs"]} == {"a": "deep/a", "b": "lab/b", "later": None}
    assert found["runs"][0]["step"] == 30, "what the run itself says is newer"
    assert folder.groups_of(run) == [{"kind": "pool", "name": "lab"}]
    assert folder.groups_of(tmp_path) == [] and folder.pool("deep") is None
    revision = changes["revision"]
    write_pool(pool, {})
    folder.look(60)
    assert folder.changes(revision)["pools"][0]["held"] == 0  # pyright: ignore[reportOptionalSubscript]


def test_a_pool_may_be_the_folder_itself(tmp_path: Path) -> None:
    pool = write_pool(tmp_path / "pool", {})
    queue(pool, SyntheticRun(path=tmp_path / "elsewhere/a", steps=3).write())
    folder = RunsFolder(pool)
    folder.look(60)
    folder.look(60)
    assert folder.pool_dir("pool") == pool and folder.find("a") == tmp_path / "elsewhere/a"


def test_a_file_of_another_user_cannot_name_a_run_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = write_pool(tmp_path / "pool", {})
    queue(pool, SyntheticRun(path=tmp_path / "elsewhere/a", steps=3).write())
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    folder = RunsFolder(pool)
    folder.look(60)
    folder.look(60)
    assert folder.find("a") is None
