"""The console of a notebook: one display, updated in place, over all attempts of a run."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline import Job
from paceline.events import Evaluated, Event, Record, StreamOpened, WorkerFailed, WorkerStarted
from paceline.monitor.console.notebook import LossCurve, NotebookConsole, find_display
from paceline.monitor.records.steps import Step
from paceline.monitor.watch import Watch


class Kept:
    """A display that keeps what it is told to show."""

    def __init__(self) -> None:
        self.html: list[str] = []
        self.texts: list[str] = []

    def update(self, html: str, text: str) -> None:
        self.html.append(html)
        self.texts.append(text)


def step(number: int, **fields: Any) -> Step:
    values: dict[str, Any] = {
        "step": number, "epoch": 0, "time": 100.0 + number, "num_samples": 8, "loss": 1 / number,
        "metrics": {"lr": 0.5}, "samples_per_s": 8.0, "seconds": {"compute": 0.75, "total": 1.0},
        "skipped": False, "num_bytes_sent": 10, "workers": (0, 1),
    }  # fmt: skip
    return Step(**{**values, **fields})


def said(event: Event) -> Record:
    return Record(100.0, 0, event)


def started(worker: int) -> Record:
    return said(
        WorkerStarted(
            rank=worker, workers=2, host="a", pid=1, device="cpu", startup_s=1.0, plan="replicas=2", resumed_from_step=0
        )
    )


def console(display: Kept) -> NotebookConsole:
    return NotebookConsole(display, run_dir=Path("runs/r"), workers=2, local=range(2), max_steps=40)


def words(html: str) -> str:
    return re.sub(r"<[^>]*>|&nbsp;", " ", html)


def test_the_block_shows_progress_loss_time_workers_plan_and_output() -> None:
    display = Kept()
    shown = console(display)
    shown.poll(10.0)
    assert "starting the workers" in display.html[-1]
    for item in (started(0), started(1), said(StreamOpened(name="d", num_samples=80, epochs=4, last_step=40))):
        shown.accept(item)
    shown.show("a line of <b>output</b>")
    for number in range(1, 11):
        shown.accept(step(number))
    shown.accept(said(Evaluated(step=10, num_samples=4, metrics={"accuracy": 0.5}, duration_s=0.1)))
    shown.poll(10.5)
    assert len(display.html) == 1, "not twice in a second"
    shown.poll(11.1)
    html = display.html[-1]
    text = re.sub(r"\s+", " ", words(html))
    for part in ("running", "replicas=2", "step 10 of 40", "25%", "epoch 1 of 4", "0:30 left", "8 samples/s",
                 "loss 0.1", "lr 0.5", "■ compute 75%", "● ● 2", "accuracy 0.5", "at step 10"):  # fmt: skip
        assert part in text, part
    assert "width:25.00%" in html and html.count("<polyline") == 1
    assert "a line of &lt;b&gt;output&lt;/b&gt;" in html and "<script" not in html
    assert display.texts[-1].splitlines()[0] == "a line of <b>output</b>"
    assert display.texts[-1].splitlines()[1].startswith("step 10 of 40  epoch 1 of 4  loss 0.1")


def test_the_last_state_stays_with_lines_that_come_after_it() -> None:
    display = Kept()
    shown = console(display)
    shown.accept(started(0))
    shown.accept(step(40))
    shown.accept(said(WorkerFailed(rank=1, host="a", step=40, reason="killed")))
    shown.ended("failed")
    shown.close()
    shown.show("what went wrong")
    assert (
        ">failed</b>" in display.html[-1]
        and "what went wrong" in display.html[-1]
        and "left" not in words(display.html[-1])
    )
    assert "✗" in display.html[-1]


def test_an_attempt_that_begins_again_goes_on_in_the_same_display(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    display = Kept()
    monkeypatch.setattr("paceline.monitor.watch.find_display", lambda: display)
    job = Job(tensorboard=False, run_dir=str(tmp_path))
    for number in (1, 2):
        (tmp_path / f"attempt_{number}").mkdir()
    first = Watch(tmp_path, 1, 2, job=job)
    first.say("from the first attempt")
    first.finish("failed", 1, goes_on=True)
    assert ">running</b>" in display.html[-1]
    second = Watch(tmp_path, 2, 2, job=job, screen=first.lasting_screen)
    second.finish("finished", 0)
    assert ">finished</b>" in display.html[-1] and "from the first attempt" in display.texts[-1]


def test_long_output_and_long_runs_stay_small() -> None:
    display = Kept()
    shown = console(display)
    for number in range(1, 20_001):
        shown.accept(step(number, loss=float("nan") if number % 100 == 0 else 1.0))
    for number in range(1000):
        shown.show(f"line {number}")
    shown.close()
    assert "(800 lines before: paceline logs runs/r)" in display.html[-1]
    assert len(display.html[-1]) < 20_000


def test_the_curve_keeps_means_of_equal_stretches() -> None:
    curve = LossCurve(4)
    for number in range(1, 9):
        curve.add(number, float(number))
    assert curve.points == [(2.5, 2.5), (6.5, 6.5)]


def test_outside_of_a_notebook_there_is_no_display(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        """IPython in a terminal has a shell, and no kernel."""

        @staticmethod
        def get_ipython() -> object:
            return object()

    for module in (None, Terminal):
        monkeypatch.setitem(sys.modules, "IPython", module)  # pyright: ignore[reportArgumentType]
        assert find_display() is None
