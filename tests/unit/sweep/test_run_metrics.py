"""What a trial's run reports is read as it goes: each step once, whatever the run goes through."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fake_run_files import Workers
from paceline.events import Evaluated, Reported
from paceline.sweep.run_metrics import Measured, RunMetrics
from paceline.sweep.study_file import Objective


def objective(metric: str, **fields: Any) -> Objective:
    return Objective(metric=metric, direction="minimize", **fields)


def evaluated(step: int, **metrics: float) -> Evaluated:
    return Evaluated(step=step, num_samples=1, metrics=metrics, duration_s=0.1)


def add_rows(run: Path, *steps: int, **columns: Any) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        for step in steps:
            row = {"step": step, "time": 1.0, "loss": float(step), "epoch": 0, **columns}
            file.write(json.dumps(row) + "\n")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_an_evaluation_is_read_once_though_all_workers_say_it(run: Path) -> None:
    reader = RunMetrics(run, objective("eval/loss"))
    assert reader.poll() == [], "there is no run yet"
    workers = Workers(run)
    workers.start()
    workers.step(1)
    assert reader.poll() == []
    workers.emit(evaluated(10, loss=0.5, accuracy=0.9))
    assert reader.poll() == [Measured(10, 0.5)]
    assert reader.poll() == []
    workers.emit(evaluated(20, loss=math.nan))
    (found,) = reader.poll()
    assert (found.step, math.isnan(found.value)) == (20, True)
    assert {"eval/loss", "eval/accuracy"} <= reader.names
    workers.close()
    reader.close()


def test_steps_that_an_attempt_takes_again_are_not_read_again(run: Path) -> None:
    reader = RunMetrics(run, objective("eval/loss"))
    first = Workers(run, count=1)
    for step in (10, 20):
        first.emit(evaluated(step, loss=step / 100))
    assert reader.poll() == [Measured(10, 0.1), Measured(20, 0.2)]
    first.close()
    second = Workers(run, count=3)
    for step in (20, 30):
        second.emit(evaluated(step, loss=step / 50))
    assert reader.poll() == [Measured(30, 0.6)]
    assert reader.final() == Measured(30, 0.6)
    second.close()
    late = RunMetrics(run, objective("eval/loss"))
    assert [one.step for one in late.poll()] == [10, 20, 30], "by a process that was not there: the same"
    reader.close()
    late.close()


def test_a_metric_of_steps_counts_as_its_mean_over_so_many_of_them(run: Path) -> None:
    run.mkdir()
    reader = RunMetrics(run, objective("loss", every=4))
    add_rows(run, 1, 2, 3)
    assert reader.poll() == [], "not yet whole"
    add_rows(run, 4, 5, 6)
    assert reader.poll() == [Measured(4, 2.5)]
    add_rows(run, 7, 8, 9, 10)
    assert reader.poll() == [Measured(8, 6.5)]
    assert reader.final() == Measured(10, 8.5), "the last four steps"
    reader.close()


def test_a_file_of_rows_that_is_replaced_is_gone_on_with_where_it_was(run: Path) -> None:
    run.mkdir()
    reader = RunMetrics(run, objective("loss", every=2))
    add_rows(run, 1, 2, 3, 4, 5)
    assert [one.step for one in reader.poll()] == [2, 4]
    kept = "".join((run / "metrics.jsonl").read_text().splitlines(keepends=True)[:3])
    (run / "new").write_text(kept)
    (run / "new").replace(run / "metrics.jsonl")  # what an attempt does that goes on from step 3
    add_rows(run, 4, 5, 6)
    assert reader.poll() == [Measured(6, 5.5)]
    reader.close()


def test_a_metric_that_only_some_steps_have_counts_where_it_comes(run: Path) -> None:
    run.mkdir()
    reader = RunMetrics(run, objective("perplexity", every=10))
    add_rows(run, *range(1, 15))
    add_rows(run, 15, perplexity=9.0)
    add_rows(run, *range(16, 21))
    assert reader.poll() == [Measured(20, 9.0)]
    add_rows(run, *range(21, 26))
    add_rows(run, 26, perplexity=7.0)
    assert reader.poll() == []
    assert reader.final() == Measured(26, 7.0)
    reader.close()


def test_steps_that_no_worker_took_do_not_count_and_values_that_are_not_finite_do(run: Path) -> None:
    run.mkdir()
    reader = RunMetrics(run, objective("loss", every=2))
    add_rows(run, 1)
    add_rows(run, 2, loss=None, skipped=True)
    add_rows(run, 3)
    assert reader.poll() == [Measured(2, 1.0)]
    add_rows(run, 4, loss=None)
    (found,) = reader.poll()
    assert (found.step, math.isnan(found.value)) == (4, True)
    reader.close()


def test_what_is_reported_behind_the_last_step_is_read(run: Path) -> None:
    reader = RunMetrics(run, objective("score"))
    workers = Workers(run, count=1)
    add_rows(run, 1, 2)
    workers.emit(Reported(step=2, metrics={"score": 4.0}))
    assert reader.poll() == [Measured(2, 4.0)]
    assert reader.final() == Measured(2, 4.0)
    workers.close()
    reader.close()


def test_a_metric_is_missing_once_an_evaluation_is_over_without_it(run: Path) -> None:
    reader = RunMetrics(run, objective("eval/f1"))
    workers = Workers(run, count=1)
    add_rows(run, *range(1, 11))
    workers.emit(evaluated(10, loss=0.5))
    reader.poll()
    assert not reader.is_missing(is_over=False), "another evaluation may follow at this step"
    add_rows(run, 11)
    reader.poll()
    assert reader.is_missing(is_over=False)
    assert reader.names == {"loss", "eval/loss"}
    workers.emit(evaluated(20, f1=0.5))
    reader.poll()
    assert not reader.is_missing(is_over=True)
    workers.close()
    reader.close()


@pytest.mark.parametrize(("epoch", "is_missing"), [(0, False), (1, False), (2, True)])
def test_a_metric_of_steps_is_missing_once_a_whole_epoch_has_passed(run: Path, epoch: int, is_missing: bool) -> None:
    run.mkdir()
    reader = RunMetrics(run, objective("perplexity"))
    add_rows(run, 1)
    add_rows(run, 2, epoch=epoch)
    reader.poll()
    assert reader.is_missing(is_over=False) == is_missing
    assert reader.is_missing(is_over=True)
    reader.close()


@pytest.mark.parametrize("name", ["step", "time", "seconds"])
def test_what_nobody_reports_is_no_metric(run: Path, name: str) -> None:
    run.mkdir()
    reader = RunMetrics(run, objective(name))
    add_rows(run, *range(1, 30), seconds={"total": 1.0})
    assert reader.poll() == []
    assert reader.is_missing(is_over=True)
    assert reader.names == {"loss"}
    reader.close()
