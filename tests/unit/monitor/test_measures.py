"""What a report tells of evaluations and reported metrics, and of which workers were there when."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from goodput_logs import finished, log, record, started, steps
from paceline.events import Evaluated, Restarted, WorkerFailed, WorkerLeft, WorkerLost
from paceline.monitor.report.command import report_facts
from paceline.monitor.report.html_measures import measure_cards
from paceline.monitor.report.html_page import page_html
from paceline.monitor.report.measures import Measure, read_measures
from paceline.monitor.report.presence import stays_of
from paceline.monitor.report.report import read_report
from synthetic_runs import SyntheticRun


def by_name(measures: tuple[Measure, ...]) -> dict[str, Measure]:
    return {one.name: one for one in measures}


def test_metrics_and_evaluations_have_their_numbers_and_curves(tmp_path: Path) -> None:
    run = SyntheticRun(path=tmp_path / "run", steps=60, evaluate_every=20)
    found = read_report(run.write()).measures
    assert [(one.name, one.is_evaluation) for one in found] == [
        ("accuracy", True), ("perplexity", True), ("accuracy", False), ("grad_norm", False), ("lr", False),
    ]  # fmt: skip
    perplexity = found[1]
    assert [point.x for point in perplexity.points] == [20, 40, 60] and perplexity.num == 3
    assert (perplexity.first, perplexity.last) == (3.0, pytest.approx(1 + 40 / 60))
    assert (perplexity.least, perplexity.most) == (perplexity.last, perplexity.first)
    rates = [row["lr"] for row in run.rows(1, 60)]
    assert found[4].num == 60 and found[4].most == pytest.approx(max(rates)) and found[4].last == rates[-1]


def test_what_is_no_number_is_left_out_and_later_evaluations_of_a_step_win(tmp_path: Path) -> None:
    rows = [{"step": 1, "time": 1.0, "a": 1, "b": "x", "c": None, "d": True}, {"step": 2, "time": 2.0, "a": 3}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = [(5, 0.1), (5, 0.9), (6, float("nan"))]
    events = [Evaluated(step=step, num_samples=1, metrics={"m": value}, duration_s=0.1) for step, value in said]
    logs = [log([record(place, event, 0)], {}) for place, event in enumerate(events)]
    found = by_name(read_measures(tmp_path / "metrics.jsonl", logs))
    assert set(found) == {"a", "m"} and found["m"].last == 0.9 and found["m"].num == 1
    assert (found["a"].first, found["a"].last, found["a"].least) == (1, 3, 1)


def test_rows_in_any_order_make_one_curve(tmp_path: Path) -> None:
    rows = [{"step": step, "time": 1.0, "a": step} for step in (3, 1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (measure,) = read_measures(tmp_path / "metrics.jsonl", [])
    assert [point.x for point in measure.points] == [1, 2, 3]


def test_the_page_and_the_json_show_them_and_names_stay_text(tmp_path: Path) -> None:
    run = SyntheticRun(path=tmp_path / "run", steps=60, evaluate_every=20)
    run.write()
    lines = [json.dumps(row | {"<script>": row["step"]}) for row in run.rows(1, 60)]
    (run.path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    report = read_report(run.path)
    page = page_html(report)
    assert "<h2>Evaluations</h2>" in page and "<h2>Reported metrics</h2>" in page and "perplexity" in page
    assert page.count("<script>") == 1 and "&lt;script&gt;" in page
    facts = json.loads(json.dumps(report_facts(report), allow_nan=False))
    assert {one["name"] for one in facts["measures"]} == {"accuracy", "perplexity", "grad_norm", "lr", "<script>"}


def test_a_run_that_reports_nothing_has_no_cards() -> None:
    assert list(measure_cards((), ())) == []


def test_each_process_of_a_place_has_a_stay_until_it_ended_in_some_way() -> None:
    lost = WorkerLost(rank=1, host="a", step=5, reason="killed", silent_s=0.5)
    left = WorkerLeft(rank=0, host="a", step=9, reason="SIGTERM", members=[1])
    records = [started(2, 0), started(2, 1), record(8, lost), started(12, 1, startup_s=1.5), record(15, left)]
    found = stays_of([log([*records, finished(19, 1, 9)], {0: steps(1, 9, 3)})])
    assert [(one.worker, one.began, one.ready, one.ended, one.end) for one in found] == [
        (0, 0, 2, 15, "left"),
        (1, 0, 2, 7.5, "lost"),
        (1, 10.5, 12, 19, "finished"),
    ]


def test_stays_end_with_a_restart_a_failure_and_the_attempt() -> None:
    again = Restarted(
        causes=["killed"], lost=[1], workers=2, at_step=5, step=5, source="memory", lost_at=7.0
    )  # fmt: skip
    failed = WorkerFailed(rank=0, host="a", step=9, reason="ValueError")
    follows = WorkerFailed(rank=1, host="a", step=9, reason="ended", follows=True)
    first = log([started(2, 0), started(2, 1)], {}, state="failed", ended=7.0)
    records = [record(7.5, again), started(9, 0, startup_s=1), started(9, 1, startup_s=1)]
    second = log([*records, record(15, failed), record(16, follows)], {}, attempt=2, began=7.5, state="failed")
    ends = [(one.worker, one.attempt, one.ended, one.end) for one in stays_of([first, second])]
    assert ends == [
        (0, 1, 7.0, "stopped"), (0, 2, 15, "failed"), (1, 1, 7.0, "lost"), (1, 2, 16, "stopped"),
    ]  # fmt: skip
    running = stays_of([log([started(2, 0)], {}, state="running")])
    assert [(one.ended, one.end) for one in running] == [(20.0, "present")]
