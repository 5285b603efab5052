"""What a run's steps took, read from its files, and its receipt in the report: the run's own, or from what is there."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fake_run_files import Workers
from paceline.events import EventLog, WorkerFinished
from paceline.monitor.records import measured_run as reading
from paceline.monitor.records.measured_run import measured_run, started_as, work_by_worker
from paceline.monitor.records.run_record import RunRecord
from paceline.monitor.report.command import main_report
from paceline.planner.receipt import MeasuredStep
from paceline.planner.run_receipt import BEING_MADE, PredictedStep, RunPrediction, RunReceipt

SECONDS = {"data": 0.001, "compute": 0.010, "communication": 0.003, "optimizer": 0.001, "total": 0.016}
PREDICTED = PredictedStep(
    model="m",
    plan="replicas=2",
    micro=8,
    workers=2,
    step_s=0.012,
    low_s=0.009,
    high_s=0.015,
    parts={"products": 0.01, "data": 0.002},
    bytes=0.3e9,
    estimated_s=0.012,
    estimated_parts={"products": 0.01, "data": 0.002},
    estimated_bytes=0.3e9,
    corrected_by=0,
    corrected_of="",
    is_cpu=True,
)


def write_rows(run: Path, *rows: Mapping[str, Any], attempt: int = 1) -> None:
    with open(run / "metrics.jsonl", "a") as file:
        for row in rows:
            file.write(json.dumps({"attempt": attempt, "time": 1.7e9 + row["step"], "seconds": SECONDS, **row}) + "\n")


def rows(first: int, last: int, **fields: Any) -> list[dict[str, Any]]:
    return [{"step": step, **fields} for step in range(first, last + 1)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two workers, of which 12 steps are there; the second one works longer."""
    path = tmp_path / "run"
    workers = Workers(path)
    workers.start()
    for step in range(1, 13):
        workers.step(step)
    workers.close()
    write_rows(path, *rows(1, 12))
    return path


def test_the_median_of_the_newest_attempt_counts(run: Path) -> None:
    write_rows(run, *rows(13, 18, seconds={**SECONDS, "total": 0.5}), attempt=2)
    found = measured_run(run)
    assert (found.attempt, found.steps) == (2, 6)
    assert found.step is not None
    assert (found.step.step_s, found.step.steps) == (0.5, 4)
    first = measured_run(run, attempt=1, peak=7.0)
    assert first.step is None, "its rows are not at the end: another attempt has gone on"
    assert measured_run(run / "nothing").step is None


def test_steps_that_were_held_up_are_left_out_and_counted(run: Path) -> None:
    write_rows(run, *rows(13, 14, seconds={**SECONDS, "recovery": 0.2, "total": 9.0}), *rows(15, 15, skipped=True))
    found = measured_run(run)
    assert (found.steps, found.disturbed) == (15, 3)
    assert found.step is not None and found.step.step_s == 0.016


def test_rows_without_good_seconds_are_passed_over(run: Path) -> None:
    write_rows(run, *rows(13, 13, seconds={"total": 0.0}), *rows(14, 14, seconds={}))
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 15, "ti')
    assert measured_run(run).steps == 12


def test_of_a_long_run_only_the_newest_steps_are_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST_STEPS", 6)
    write_rows(run, *rows(13, 30, seconds={**SECONDS, "total": 0.1}))
    found = measured_run(run)
    assert found.steps == 8
    assert found.step is not None
    assert (found.step.step_s, found.step.steps) == (0.1, 6)


def test_only_steps_since_a_moment_count_where_one_is_named(run: Path) -> None:
    assert measured_run(run, since=1.7e9 + 8).steps == 5
    assert measured_run(run, since=1.7e9 + 13).steps == 0


def test_the_fullest_worker_says_the_memory_unless_it_is_known(run: Path) -> None:
    for worker, peak in enumerate((5, 8)):
        log = EventLog(run / "attempt_1" / f"worker_{worker}" / "events.jsonl", worker=worker)
        log.emit(WorkerFinished(rank=worker, step=12, peak_memory_bytes=peak))
        log.close()
    ended, known = measured_run(run).step, measured_run(run, peak=99.0).step
    assert ended is not None and known is not None
    assert (ended.peak, known.peak) == (8.0, 99.0)


def test_each_workers_own_work_is_known_and_how_it_started(run: Path) -> None:
    assert work_by_worker(run, 1) == {0: pytest.approx(0.092), 1: pytest.approx(0.092)}
    assert work_by_worker(run, 2) == {}
    started = started_as(run, 1)
    assert started is not None and (started.plan, started.workers) == ("replicas=2", 2)
    assert started_as(run, 2) is None


def reported(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any], str]:
    assert main_report(run, page=run / "report.html") == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    own = lines[next(number for number, line in enumerate(lines) if line.startswith("receipt")) :]
    assert max(map(len, own[: own.index("") if "" in own else None])) <= 100
    assert main_report(run, json=True) == 0
    return text, json.loads(capsys.readouterr().out), (run / "report.html").read_text()


def test_the_report_has_the_receipt_that_the_run_has_made(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = RunPrediction(cluster="lab <1>", attempt=1, predicted=PREDICTED)
    made.write(run / "prediction.json")
    step = MeasuredStep(step_s=0.02, parts={"compute": 0.015, "communication": 0.005}, peak=0.36e9, steps=40)
    receipt = RunReceipt.of("lab <1>", 1, PREDICTED, step, blame="most of the difference: compute & cores")
    dataclasses.replace(receipt, kept="lab.receipts.jsonl").write(run / "receipt.json")
    RunRecord.load(run).end_attempt("finished", 0)
    text, facts, page = reported(run, capsys)
    assert "predicted for lab <1>, and measured in 40 steps\nreceipt" in text
    assert ["compute", "10.0", "ms", "15.0", "ms", "+50", "%"] in [line.split() for line in text.splitlines()]
    assert "         most of the difference: compute & cores\n" in text
    assert facts["receipt"]["receipt"]["measured_s"] == 0.02
    assert facts["prediction"]["predicted"]["step_s"] == 0.012
    assert "predicted to take on lab &lt;1&gt;, and the median of 40 steps" in page
    assert '<td>compute</td><td class="n">10.0 ms</td><td class="n">15.0 ms</td><td class="n">+50 %</td>' in page
    assert "Most of the difference: compute &amp; cores." in page
    assert "corrected</th>" not in page


def test_a_corrected_prediction_has_a_column_of_its_own(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corrected = dataclasses.replace(PREDICTED, step_s=0.016, bytes=0.4e9, corrected_by=2, corrected_of="this model")
    step = MeasuredStep(step_s=0.02, parts={"compute": 0.015}, peak=0.4e9, steps=40)
    RunReceipt.of("lab", 1, corrected, step, blame="").write(run / "receipt.json")
    _, _, page = reported(run, capsys)
    whole = '<td>the whole step</td><td class="n">12.0 ms</td><td class="n">16.0 ms</td><td class="n">20.0 ms</td>'
    assert whole + '<td class="n">+25 %</td>' in page
    assert '<td>compute</td><td class="n">10.0 ms</td><td class="n"></td><td class="n">15.0 ms</td>' in page


@pytest.mark.parametrize("is_running", [True, False])
def test_a_run_that_made_no_receipt_is_compared_by_what_is_there(
    run: Path, capsys: pytest.CaptureFixture[str], is_running: bool
) -> None:
    RunPrediction(cluster="lab", attempt=1, predicted=PREDICTED).write(run / "prediction.json")
    if not is_running:
        RunRecord.load(run).end_attempt("failed", 1)
    text, facts, page = reported(run, capsys)
    assert "predicted for lab, and measured in 10 steps so far" in text
    assert ["step", "12.0", "ms", "16.0", "ms", "+33", "%"] in [line.split() for line in text.splitlines()]
    assert "no worker is slower" not in text, "communication is not most of the difference"
    assert facts["receipt"]["kept"] is None
    assert "the median of 10 steps so far" in page
    assert not (run / "receipt.json").exists(), "a report writes nothing but its page"


def test_workers_that_began_again_are_compared_by_their_newest_steps(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RunPrediction(cluster="lab", attempt=1, predicted=PREDICTED).write(run / "prediction.json")
    write_rows(run, *rows(13, 22, seconds={**SECONDS, "total": 0.024}), attempt=2)
    text, facts, _ = reported(run, capsys)
    assert "measured in 8 steps so far" in text
    assert (facts["receipt"]["attempt"], facts["receipt"]["receipt"]["measured_s"]) == (2, 0.024)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (None, "receipt  none: the run has no cluster. Measure this one once (paceline doctor --workers N"),
        (
            RunPrediction(cluster="lab", attempt=1, problem="no <stepper>"),
            "receipt  none: no prediction for lab: no <stepper>",
        ),
        (
            RunPrediction(cluster="lab", attempt=1, predicted=dataclasses.replace(PREDICTED, plan="shard=2")),
            "receipt  none: shard=2 was predicted, and replicas=2 on 2 workers was run",
        ),
        (
            RunPrediction(cluster="lab", attempt=2, predicted=PREDICTED),
            "receipt  predicted: 12.0 ms a step (80 % band: 9.00 ms to 15.0 ms), 0.3 GB in a worker;",
        ),
    ],
)
def test_why_there_is_no_receipt_is_said(
    run: Path, capsys: pytest.CaptureFixture[str], made: RunPrediction | None, says: str
) -> None:
    if made is not None:
        made.write(run / "prediction.json")
    text, facts, page = reported(run, capsys)
    assert says in text
    assert facts["receipt"] is None
    assert "<h2>Receipt</h2>" in page
    assert "<stepper>" not in page


def test_a_prediction_that_was_not_finished_is_said_to_be(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunPrediction(cluster="lab", attempt=1, problem=BEING_MADE).write(run / "prediction.json")
    assert "no prediction for lab: it is being made" in reported(run, capsys)[0]
    RunRecord.load(run).end_attempt("failed", 1)
    assert "no prediction for lab: the run ended before it was made" in reported(run, capsys)[0]


@pytest.mark.parametrize("name", ["prediction.json", "receipt.json"])
@pytest.mark.parametrize("text", ["", "[]", "{", '{"cluster": 5}', '{"predicted": {"step_s": 0}}', "\x00"])
def test_damaged_files_end_no_report(run: Path, capsys: pytest.CaptureFixture[str], name: str, text: str) -> None:
    (run / name).write_text(text)
    assert "receipt  none" in reported(run, capsys)[0]
