"""`paceline trace`: steps of all workers as slices, clocks of hosts aligned, and a file that trace viewers read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.events import CheckpointSaved, Event, Record, WorkerLost, WorkerStarted
from paceline.logs.trace_events import TraceSlice, write_trace
from paceline.monitor.report.attempt_log import AttemptLog, StepTime
from paceline.monitor.report.trace import run_slices

SECONDS = {"data": 0.1, "compute": 0.5, "communication": 0.2, "optimizer": 0.1, "total": 1.0}
T = 1_000_000.0


def started(worker: int, host: str) -> Record:
    event = WorkerStarted(
        rank=worker, workers=2, host=host, pid=1, device="cpu", startup_s=1.0, plan="replicas=2", resumed_from_step=0
    )
    return Record(time=T, worker=worker, event=event)


def log(hosts: Sequence[str], ahead: Sequence[float], *extra: tuple[float, int | None, Event]) -> AttemptLog:
    """Two workers that commit steps 1 to 3 a second apart, by clocks that are `ahead`."""
    return AttemptLog(
        attempt=1,
        workers=2,
        began=T,
        ended=T + 10,
        state="finished",
        exit_code=0,
        last_step=3,
        records=[
            *(started(worker, host) for worker, host in enumerate(hosts)),
            *(Record(time=when, worker=worker, event=event) for when, worker, event in extra),
        ],
        steps=lambda worker: [StepTime(T + step + ahead[worker], step, SECONDS) for step in (1, 2, 3)],
    )


def steps_of(slices: Sequence[TraceSlice], row: str) -> list[tuple[str, float]]:
    return [(one.name, round(one.begin_s, 6)) for one in slices if one.row == row and one.name.startswith("step")]


def test_steps_of_all_workers_lie_where_they_were_and_parts_fill_them() -> None:
    found = list(run_slices([log(["a", "a"], [0.0, 0.02])], steps=100))
    assert steps_of(found, "worker 0") == [("step 1", 0.0), ("step 2", 1.0), ("step 3", 2.0)]
    assert steps_of(found, "worker 1") == [("step 1", 0.02), ("step 2", 1.02), ("step 3", 2.02)]
    inner = [one for one in found if one.row == "worker 0" and not one.name.startswith("step")][:5]
    assert [one.name for one in inner] == ["data", "compute", "communication", "optimizer", "other"]
    assert [round(one.begin_s, 6) for one in inner] == [0.0, 0.1, 0.6, 0.8, 0.9]
    assert sum(one.duration_s or 0.0 for one in inner) == pytest.approx(1.0)


def test_clocks_of_hosts_are_aligned_by_their_steps() -> None:
    found = list(run_slices([log(["a", "b"], [0.0, 3600.0])], steps=100))
    assert {one.group for one in found} == {"a", "b"}
    assert steps_of(found, "worker 1") == steps_of(found, "worker 0")


def test_only_the_newest_steps_are_shown() -> None:
    found = list(run_slices([log(["a", "a"], [0.0, 0.0])], steps=2))
    assert steps_of(found, "worker 0") == [("step 2", 0.0), ("step 3", 1.0)]


def test_what_happened_between_them_is_a_moment_of_its_worker() -> None:
    saved = CheckpointSaved(step=2, path="p", num_bytes=1, stall_s=0.0, write_s=0.0)
    lost = WorkerLost(rank=1, host="a", step=3, reason="killed")
    found = list(run_slices([log(["a", "a"], [0.0, 0.0], (T + 2.5, 0, saved), (T + 3.5, None, lost))], steps=9))
    moments = [(one.row, one.name, one.begin_s) for one in found if one.duration_s is None]
    assert moments == [("worker 0", "CheckpointSaved", 2.5), ("worker 1", "WorkerLost", 3.5)]


def test_the_file_is_read_by_trace_viewers(tmp_path: Path) -> None:
    slices = list(run_slices([log(["a", "b"], [0.0, 0.0])], steps=9))
    path = tmp_path / "trace.json"
    assert write_trace(path, slices) == len(slices)
    events = json.loads(path.read_text())["traceEvents"]
    names = {(one["pid"], one["args"]["name"]) for one in events if one["name"] == "process_name"}
    assert names == {(1, "a"), (2, "b")}
    shown = [one for one in events if one["ph"] == "X"]
    assert len(shown) == len(slices)
    assert (shown[0]["name"], shown[0]["ts"], shown[0]["dur"]) == ("step 1", 0, 1e6)
    assert {one["ph"] for one in events} == {"M", "X"}


def test_where_there_is_nothing_to_show_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(tmp_path)]) == 2
    assert capsys.readouterr().err
    assert main(["trace", str(tmp_path), "--steps", "0"]) == 2
    assert "--steps is 0" in capsys.readouterr().err
