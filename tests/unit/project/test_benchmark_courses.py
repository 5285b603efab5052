"""How measurements of far sites are judged: time to a loss, measured, or told from the steps that another link took."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
TARGET = 2.0


@pytest.fixture
def courses(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("driving.courses")


def course(courses: Any, *, steps: int, step_s: float, held_out: dict[int, float], begin_s: float = 0.0) -> Any:
    by_step = range(1, steps + 1)
    return courses.Course(
        losses=dict.fromkeys(by_step, 3.0),
        seconds={step: begin_s + step * step_s for step in by_step},
        num_bytes={step: 1000.0 * step for step in by_step},
        held_out=held_out,
    )


def matrix(courses: Any, plan: str = "allreduce+int8") -> Any:
    """It needs 48 steps of a second on the first link; on the other it was stopped after 20 of three seconds."""
    task = courses.Task(steps=100, batch=4, lr=0.1, every=16, held_out=8, target=TARGET)
    whole = course(courses, steps=64, step_s=1.0, held_out={32: 3.0, 64: 1.0})
    part = course(courses, steps=20, step_s=3.0, held_out={16: 4.0}, begin_s=5.0)
    return courses.Matrix(task=task, courses={"0:0": {plan: whole}, "20:50": {plan: part}})


def test_a_loss_is_met_on_the_line_between_two_measurements(courses: Any) -> None:
    met = course(courses, steps=64, step_s=0.5, held_out={16: 4.0, 32: 3.0, 48: 1.0})
    assert met.steps_to(2.0) == 40
    assert met.steps_to(4.5) == 16
    assert met.steps_to(0.5) is None
    assert met.seconds_at(40) == pytest.approx(20.0)
    assert met.bytes_at(40) == pytest.approx(40_000)


def test_where_a_link_was_too_slow_its_step_is_taken_as_often_as_the_first_link_needed(courses: Any) -> None:
    found = matrix(courses)
    assert found.seconds("0:0", "allreduce+int8") == (48.0, "")
    assert found.seconds("20:50", "allreduce+int8") == (pytest.approx(5.0 + 48 * 3.0), "~")
    assert found.best("20:50") == (pytest.approx(149.0), "allreduce+int8")


def test_where_losses_depend_on_who_is_faster_nothing_is_told_from_another_link(courses: Any) -> None:
    found = matrix(courses, "parameter_server(staleness=4)+raw")
    assert found.seconds("20:50", "parameter_server(staleness=4)+raw") == (65.0, ">")
    assert found.best("20:50") is None


def test_the_table_says_what_is_measured_and_what_is_told_and_a_file_keeps_it(courses: Any, tmp_path: Path) -> None:
    matrix(courses).write(tmp_path / "kept.json")
    found = courses.Matrix.read(tmp_path / "kept.json")
    assert found == matrix(courses)
    assert list(found.table())[-1] == "| `allreduce+int8` | 48 | 0.0 | **48.0 (1.00x)** | **~149.0 (3.10x)** |"


def test_a_plan_that_failed_on_a_link_is_in_the_table(courses: Any) -> None:
    found = matrix(courses)
    found.courses["20:50"].clear()
    assert list(found.table())[-1].endswith("| failed |")
