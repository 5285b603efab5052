"""A run's page gets curves, evaluations, events, workers and logs, each when it changes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from paceline.events import CheckpointSaved, Evaluated, EventLog, Warned
from paceline.processes import process_started_s, this_host
from paceline.ui import run_view
from paceline.ui.comparison import compared
from paceline.ui.log_lines import log_lines
from paceline.ui.plan_facts import plan_parts
from paceline.ui.run_events import RunEvents
from paceline.ui.run_summary import summary_of
from paceline.ui.run_view import RunView
from synthetic_runs import SyntheticRun


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No part waits for its turn."""
    for name in (
        "SUMMARY_EVERY_S",
        "STATUS_EVERY_S",
        "STATUS_STILL_S",
        "LOGS_EVERY_S",
        "REPORT_EVERY_S",
        "REPORT_SOON_S",
    ):
        monkeypatch.setattr(run_view, name, 0.0)
    for name in ("SHARE", "REPORT_SHARE"):
        monkeypatch.setattr(run_view, name, 0.0)


def changes(view: RunView, seen: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    view.look()
    return view.changes(seen) or {}


def test_a_page_gets_everything_once_and_then_what_is_new(tmp_path: Path) -> None:
    alive = {"host": this_host(), "pid": os.getpid(), "pid_started_s": process_started_s(os.getpid()) or 0.0}
    run = SyntheticRun(path=tmp_path / "run", steps=40, last_step=80, state="running", evaluate_every=10, **alive)
    run.write()
    view = RunView(run.path, "run")
    first = changes(view)
    assert first["summary"]["step"] == 40 and first["summary"]["first_loss"] > 3
    assert first["curves"]["whole"] and first["curves"]["is_exact"]
    assert [step for step, _ in first["evaluations"]["accuracy"]] == [10, 20, 30, 40]
    assert [one["rank"] for one in first["workers"]] == [0, 1] and first["about"]["plan"] == run.plan
    assert first["about"]["parts"]["layout.replicas"] == "2" and first["logs"]["attempt"] == 1
    json.dumps(first, allow_nan=False)

    run.append(41, 42)
    after = changes(view, tuple(first["revisions"]))
    assert after["summary"]["step"] == 42 and not after["curves"]["whole"]
    assert [int(step) for _, step, *_ in after["curves"]["series"]["loss"]["points"]] == [41, 42]
    assert "evaluations" not in after and "logs" not in after
    (run.attempt / "worker_0" / "stdout.log").open("a").write("one more line\n")
    assert "logs" in changes(view, tuple(after["revisions"]))
    view.close()


def test_between_readings_of_its_files_the_summary_follows_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_view, "SUMMARY_EVERY_S", 3600.0)
    alive = {"host": this_host(), "pid": os.getpid(), "pid_started_s": process_started_s(os.getpid()) or 0.0}
    run = SyntheticRun(path=tmp_path / "run", steps=40, last_step=80, state="running", **alive)
    run.write()
    view = RunView(run.path, "run")
    first = changes(view)
    monkeypatch.setattr(run_view, "summary_of", lambda *_, **__: pytest.fail("its files were read again"))
    run.append(41, 60)
    followed = changes(view, tuple(first["revisions"]))["summary"]
    view.close()
    again = summary_of(run.path, "run", with_spark=False).facts()
    assert {name: followed[name] for name in again} == again and followed["step"] == 60
    assert followed["left_s"] == pytest.approx(20 * followed["step_s"])


def test_workers_are_looked_at_soon_where_something_has_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_view, "STATUS_EVERY_S", 3600.0)
    monkeypatch.setattr(run_view, "STATUS_STILL_S", 0.0)
    alive = {"host": this_host(), "pid": os.getpid(), "pid_started_s": process_started_s(os.getpid()) or 0.0}
    run = SyntheticRun(path=tmp_path / "run", steps=10, last_step=80, state="running", **alive)
    run.write()
    view = RunView(run.path, "run")
    first = changes(view)
    run.append(11, 20)
    after = changes(view, tuple(first["revisions"]))
    assert "workers" not in after and after["summary"]["step"] == 20  # steps alone
    EventLog(run.attempt / "events.jsonl", worker=None).emit(Warned(text="something"))
    assert "workers" in changes(view, tuple(after["revisions"]))
    view.close()


def test_a_run_without_steps_is_told_once(tmp_path: Path) -> None:
    run = SyntheticRun(path=tmp_path / "run", steps=0, last_step=5).write()
    view = RunView(run, "run")
    first = changes(view)
    assert first["curves"] == {"whole": True, "is_exact": True, "series": {}} and first["summary"]["step"] == 0
    assert changes(view, tuple(first["revisions"])) == {}
    view.close()


def test_what_a_page_has_seen_of_another_server_counts_for_nothing(tmp_path: Path) -> None:
    view = RunView(SyntheticRun(path=tmp_path / "run", steps=5).write(), "run")
    assert {"summary", "about", "curves"} <= set(changes(view, (10_000, 10_000)))
    view.close()


def test_the_report_is_read_again_after_an_incident_and_at_the_end(tmp_path: Path) -> None:
    run = SyntheticRun(path=tmp_path / "run", steps=5)
    run.write()
    view = RunView(run.path, "run")
    assert not view.is_report_due()  # nothing is known of it
    view.look()
    assert view.is_report_due()
    view.begin_report()
    view.end_report({"goodput": 0.5})
    assert changes(view)["report"] == {"goodput": 0.5} and not view.is_report_due()
    log = EventLog(run.attempt / "events.jsonl", worker=None)
    log.emit(Warned(text="no incident"))
    view.look()
    assert not view.is_report_due()
    run.lose_at = 3
    for event in run._supervisor_events():
        (run.attempt / "events.jsonl").open("a").write(json.dumps(event) + "\n")
    log.close()
    view.look()
    assert view.is_report_due()
    view.close()


def test_an_opened_page_gets_a_fresh_report_once_and_is_told_how_old_the_other_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr("paceline.ui.run_view.time.monotonic", lambda: now_s)
    monkeypatch.setattr(run_view, "REPORT_EVERY_S", 30.0)
    alive = {"host": this_host(), "pid": os.getpid(), "pid_started_s": process_started_s(os.getpid()) or 0.0}
    run = SyntheticRun(path=tmp_path / "run", steps=5, state="running", **alive)
    run.write()
    view = RunView(run.path, "run")
    view.look()
    view.begin_report()
    assert changes(view)["reading"] == {"is_on": True, "age_s": None}
    view.end_report({"goodput": 0.5})
    view.is_opened()
    assert not view.is_report_due(), "the one that is there is new"
    now_s += 20
    assert not view.is_report_due()
    view.is_opened()
    view.is_opened()
    assert view.is_report_due()
    view.begin_report()
    assert changes(view)["reading"] == {"is_on": True, "age_s": 20.0}
    view.end_report({"goodput": 0.6})
    assert changes(view)["reading"]["is_on"] is False and not view.is_report_due(), "one for both pages"
    monkeypatch.setattr(run_view, "REPORT_SOON_S", 60.0)
    run.state = "finished"
    run.write()
    view.look()
    assert view.is_report_due(), "it has just ended"
    view.close()


def test_events_are_told_once_however_many_workers_say_them(tmp_path: Path) -> None:
    run = SyntheticRun(path=tmp_path / "run", steps=5, workers=3)
    run.write()
    for worker in range(3):
        log = EventLog(run.attempt / f"worker_{worker}" / "events.jsonl", worker=worker)
        log.emit(Evaluated(step=5, num_samples=10, metrics={"accuracy": 0.5}, duration_s=0.1 * worker))
        log.emit(CheckpointSaved(step=5, path="x", num_bytes=10, stall_s=0.1 * worker, write_s=0.1))
        log.emit(Evaluated(step=6, num_samples=10, metrics={"accuracy": float("nan"), "loss\x1b": 2.0}, duration_s=0.1))
        log.close()
    events = RunEvents(run.path)
    assert events.poll(1, 1.0) and not events.poll(1, 1.0)
    told = [one for one in events.lines() if one["kind"] in ("Evaluated", "CheckpointSaved")]
    assert [(one["kind"], one["step"]) for one in told] == [("Evaluated", 5), ("CheckpointSaved", 5), ("Evaluated", 6)]
    assert events.evaluations() == {"accuracy": [[5, 0.5]], "loss\\x1b": [[6, 2.0]]}
    events.close()


def test_evaluations_of_earlier_attempts_stay_and_newer_ones_win(tmp_path: Path) -> None:
    run = SyntheticRun(path=tmp_path / "run", steps=20, evaluate_every=10)
    run.write()
    second = run.path / "attempt_2" / "worker_0"
    second.mkdir(parents=True)
    log = EventLog(second / "events.jsonl", worker=0)
    log.emit(Evaluated(step=20, num_samples=10, metrics={"accuracy": 0.25}, duration_s=0.1))
    log.close()
    events = RunEvents(run.path)
    events.poll(2, 1.0)
    found = events.evaluations()["accuracy"]
    assert [step for step, _ in found] == [10, 20]
    assert found[1][1] == 0.25
    events.close()


def test_logs_are_the_newest_lines_and_a_filter_looks_further_back(tmp_path: Path) -> None:
    run = SyntheticRun(path=tmp_path / "run", steps=3)
    run.write()
    lines = [f"line {number}" for number in range(3000)]
    (run.attempt / "worker_1" / "stdout.log").write_text(
        "\x1b[31mNeedle\x1b[0m \x07\n" + "".join(f"{x}\n" for x in lines)
    )
    found = log_lines(run.path, 1, worker=1, stream="stdout", find="")
    assert [one["text"] for one in found] == lines[-400:]
    assert log_lines(run.path, 1, worker=None, stream=None, find="needle") == [
        {"worker": 1, "stream": "stdout", "text": r"Needle \x07"}
    ]
    assert {one["worker"] for one in log_lines(run.path, 1, worker=None, stream=None, find="")} == {0, 1}
    assert log_lines(run.path, 1, worker=7, stream=None, find="") == []


def test_a_comparison_says_what_differs_in_plan_job_and_outcome(tmp_path: Path) -> None:
    plans = ("replicas=2+batch(size=64)", "replicas=2+wire=powersgd(rank=4)+batch(size=64)")
    runs: list[dict[str, Any]] = []
    for place, plan in enumerate(plans):
        run = SyntheticRun(
            path=tmp_path / str(place), steps=30, plan=plan, level=place + 0.5, args=("--lr", str(place))
        )
        view = RunView(run.write(), str(place))
        runs.append(changes(view))
        view.close()
    rows = {(row["group"], row["name"]): row for row in compared(runs)}
    assert rows["plan", "wire.kind"]["values"] == ["Raw", "PowerSGD"] and rows["plan", "wire.kind"]["differs"]
    assert rows["plan", "wire.rank"]["values"] == [None, "4"]
    assert not rows["plan", "batch.size"]["differs"] and rows["outcome", "loss"]["differs"]
    assert rows["job", "args"]["values"] == ["--lr 0", "--lr 1"]


def test_parts_of_a_plan_of_another_version_are_unknown() -> None:
    assert plan_parts("replicas=2+tomorrow(x=1)") == {}
    assert plan_parts("shard=4+zero=1")["layout.zero"] == "1"
