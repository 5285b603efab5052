"""A function that hosts run: it goes to them, and its value, its error and its rows come back."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from engine_submissions import asked
from paceline.errors import PlanError, WorkerError, WorkersLostError
from paceline.launch.engines.catalog import read_engine, refusals
from paceline.launch.engines.sent_function import (
    Answers,
    SentFunction,
    read_outcome,
    tell_outcome,
    tell_row,
    unpack,
)

MARK = "5b0a"


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that were told, without their mark."""
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith(f"{MARK} ") for line in lines)
    return [line.removeprefix(f"{MARK} ") for line in lines]


def test_a_function_and_its_arguments_arrive_and_the_engines_own_win() -> None:
    sent = SentFunction(name="double", pickled=cloudpickle.dumps((lambda x: 2 * x, {"keep": 2, "workers": 9})))
    function, fields = unpack(sent.told({"workers": 4, "run_dir": "r"}))
    assert function(21) == 42
    assert fields == {"keep": 2, "workers": 4, "run_dir": "r"}


def test_a_host_that_lacks_a_module_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("def train(worker): ...\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        module = importlib.import_module("only_here")
        told = SentFunction(name="train", pickled=cloudpickle.dumps((module.train, {}))).told({})
    monkeypatch.delitem(sys.modules, "only_here")
    with pytest.raises(PlanError, match=r"cannot be read on host .*No module named 'only_here'.*the same Python"):
        unpack(told)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_the_value_is_that_of_the_host_that_leads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], order: tuple[int, ...]
) -> None:
    for value in (None, {"loss": 0.5, "weights": bytes(100_000)}, None):
        tell_outcome(MARK, value=value)
    lines = told(capsys)
    answers = Answers(on_row=None)
    for number in order:
        answers.take(lines[number])
    answers.save(tmp_path)
    assert read_outcome(tmp_path) == ({"loss": 0.5, "weights": bytes(100_000)}, None)


def test_the_error_is_that_of_the_worker_which_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost = WorkersLostError("host b is lost", worker=1, code=76).plain()
    failed = WorkerError("worker 1 failed", worker=1, host="b", step=7, traceback="Traceback ... ValueError: no")
    for error in (lost, failed, PlanError("no")):
        tell_outcome(MARK, error=error)
    answers = Answers(on_row=None)
    for line in told(capsys):
        answers.take(line)
    answers.save(tmp_path)
    value, error = read_outcome(tmp_path)
    assert value is None
    assert isinstance(error, WorkerError) and not isinstance(error, SystemExit)
    assert (error.worker, error.host, error.step, error.traceback) == (1, "b", 7, failed.traceback)


def test_where_one_host_finished_the_error_of_another_is_no_error_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tell_outcome(MARK, error=WorkerError("it left", worker=1))
    tell_outcome(MARK, value=None)
    answers = Answers(on_row=None)
    for line in told(capsys):
        answers.take(line)
    answers.save(tmp_path)
    assert read_outcome(tmp_path) == (None, None)


def test_where_no_host_said_anything_there_is_no_outcome(tmp_path: Path) -> None:
    assert read_outcome(tmp_path) == (None, None)
    Answers(on_row=None).save(tmp_path)
    assert read_outcome(tmp_path) == (None, None)


def test_rows_come_once_also_where_steps_are_taken_again(capsys: pytest.CaptureFixture[str]) -> None:
    rows = list[dict[str, Any]]()
    answers = Answers(on_row=rows.append)
    for step in (1, 2, 3, 2, 3, 4):
        tell_row(MARK, {"step": step, "loss": None})
    for line in told(capsys):
        answers.take(line)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]


@pytest.mark.parametrize("engine", ["slurm", "kubernetes(image=a,volume=b)", "ssh(hosts=(a,))", "ray"])
def test_only_ray_takes_a_function(engine: str) -> None:
    sent = SentFunction(name="train", pickled=b"")
    found = [str(each) for each in refusals(read_engine(engine), asked(hosts=1, function=sent), detach=False)]
    assert any("train is a function of a notebook" in text for text in found) == (engine != "ray"), found


def test_a_function_of_a_notebook_is_named_where_the_engine_takes_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import paceline

    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)

    def train(worker: object) -> None:
        """Never called."""

    with pytest.raises(PlanError, match="Slurm runs a script on its hosts, and train is a function of a notebook"):
        paceline.run(train, on="slurm", hosts=2, workers=2)
    assert list(tmp_path.iterdir()) == []
