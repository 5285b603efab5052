"""What a pool does with a run is no incident of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.ui.pool_history import Decision
from paceline.ui.pool_pauses import with_pauses
from paceline.ui.run_place import NOWHERE
from paceline.ui.run_view import RunView
from paceline.ui.runs_folder import RunsFolder
from synthetic_groups import SUBMITTED, decide, queue, write_pool
from synthetic_runs import SyntheticRun

TEXT = "attempt 1 ended after step 12: preempted; attempt 2 went on from step 12, steps lost 0"


def report(cause: str = "preempted") -> dict[str, Any]:
    incident = {"kind": "end", "attempt": 1, "causes": [cause], "text": TEXT.replace("preempted", cause), "cost": "9 s"}
    return {"attempts": [{"attempt": 1, "began": 1000.0, "duration_s": 500.0}], "incidents": [incident], "goodput": 0.5}


def decision(time: float, before: int, after: int) -> Decision:
    return Decision(time=time, run="a", before=before, after=after, why="")


@pytest.mark.parametrize(
    ("decisions", "cause"),
    [
        ([decision(1000, 0, 1), decision(1490, 1, 0)], "paused by its pool"),
        ([decision(1490, 1, 2), decision(1700, 2, 0)], "started anew by its pool"),
        ([decision(1100, 1, 2)], "preempted"),  # long ago: somebody else has stopped it
        ([decision(1499, 0, 1), decision(1501, 1, 0)], "preempted"),
        ([], "preempted"),
    ],
)
def test_an_end_that_its_pool_decided_just_before_is_a_pause(decisions: list[Decision], cause: str) -> None:
    (found,) = with_pauses(report(), decisions)["incidents"]
    assert found["text"] == TEXT.replace("preempted", cause)
    assert (found["kind"], found["causes"]) == ("end" if cause == "preempted" else "paused", [cause])


def test_a_failure_stays_one_whatever_the_pool_decided() -> None:
    failed = report("worker 1 ran out of memory")
    assert with_pauses(failed, [decision(1490, 1, 0)]) == failed


def test_the_page_gets_it_from_the_pool_that_has_the_run(tmp_path: Path) -> None:
    run = SyntheticRun(path=tmp_path / "a", steps=5).write()
    queue(write_pool(tmp_path / "lab", {}), run)
    decide(tmp_path / "lab", [(SUBMITTED, "b", 2, 0, ""), (1490.0, "a", 1, 0, ""), (900.0, "a", 0, 1, "")])
    folder = RunsFolder(tmp_path)
    folder.look(60)
    decisions = folder.decisions_on(run)
    assert [(one.time, one.after) for one in decisions] == [(900.0, 1), (1490.0, 0)]
    view = RunView(run, "a")
    view.end_report(report())
    view.belongs_to([], NOWHERE, decisions)
    assert (view.changes((0, 0)) or {})["report"]["incidents"][0]["kind"] == "paused"
    view.end_report({"problem": "none"})
    assert (view.changes((0, 0)) or {})["report"] == {"problem": "none"}
    view.close()
