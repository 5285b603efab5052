"""A run that a pool has stopped waits, and a trial that was cut short was pruned: no page calls them stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asgi_calls import AsgiCalls, talk
from paceline.ui import run_view, runs_folder
from paceline.ui.run_place import GroupEntry, place_of
from paceline.ui.run_summary import summary_of
from paceline.ui.runs_folder import RunsFolder
from synthetic_groups import queue, write_pool, write_sweep
from synthetic_runs import SyntheticRun


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_folder, "SCAN_EVERY_S", 0.0)
    monkeypatch.setattr(run_view.RunView, "is_report_due", lambda self: False)


def states(folder: RunsFolder, since: int = 0) -> dict[str, str]:
    folder.look(60)
    found = folder.changes(since) or {"runs": []}
    return {one["name"]: one["place"]["state"] or one["state"] for one in found["runs"]}


def test_a_stopped_run_of_a_queue_waits_and_a_stopped_trial_was_pruned(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name in ("paused", "saves", "cancelled", "ended", "alone"):
        run = SyntheticRun(path=runs / name, steps=5, state="finished" if name == "ended" else "stopped").write()
        if name != "alone":
            queue(runs / "lab", run)
    phases = {"paused": "waiting", "saves": "leaving", "cancelled": "stopped", "ended": "waiting"}
    pool = write_pool(runs / "lab", {name: {"phase": phase} for name, phase in phases.items()})
    trials = [{"number": n, "parameters": {}, "state": state} for n, state in enumerate(("pruned", "finished"))]
    write_sweep(runs / "study", trials)
    for number, state in enumerate(("stopped", "finished")):
        SyntheticRun(path=runs / f"study/trials/trial-{number:04}", steps=5, state=state).write()
    folder = RunsFolder(runs)
    folder.look(60)
    assert states(folder) == {
        "paused": "waiting", "saves": "waiting", "cancelled": "stopped", "ended": "finished", "alone": "stopped",
        "study/trials/trial-0000": "pruned", "study/trials/trial-0001": "finished",
    }  # fmt: skip
    seen = folder.revision
    write_pool(pool, {name: {"phase": phase} for name, phase in (phases | {"paused": "stopped"}).items()})
    assert states(folder, seen) == {"paused": "stopped"}, "a page is told that it was taken out, and nothing else"


def place(tmp_path: Path, state: str, **fields: Any) -> str:
    run = SyntheticRun(path=tmp_path / state, steps=5, state=state).write()
    return place_of(summary_of(run, state), GroupEntry(**fields)).state


def test_the_record_holds_while_the_run_is_on_and_where_the_pool_has_not_looked_yet(tmp_path: Path) -> None:
    assert place(tmp_path, "running", phase="waiting", trial_state="pruned") == ""
    assert place(tmp_path, "failed", phase="waiting") == "waiting"
    assert place(tmp_path, "failed", phase="leaving") == ""
    assert place(tmp_path, "stopped", phase="running", since=1.0) == "", "it has ended by itself just now"
    assert place(tmp_path, "stopped", phase="running", since=9e9) == "starting"
    assert place(tmp_path, "stopped", phase="odd") == ""


def test_the_page_of_a_run_says_where_it_waits(tmp_path: Path) -> None:
    run = SyntheticRun(path=tmp_path / "runs/one", steps=5, state="stopped").write()
    queue(write_pool(tmp_path / "runs/lab", {"one": {"phase": "waiting"}}), run)

    async def look(calls: AsgiCalls) -> None:
        (found,) = await calls.listen("/api/run/stream?run=one", 1)
        assert found["place"] == {"state": "waiting", "pool": "lab", "sweep": None, "number": None}
        compared = (await calls.get("/api/compare?run=one")).json
        assert compared["runs"][0]["summary"]["place"]["state"] == "waiting"

    talk(tmp_path / "runs", look)
