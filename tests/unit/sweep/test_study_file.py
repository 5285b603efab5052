"""Study files: what is read, and what is refused before anything starts."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import PlanError
from paceline.sweep.space import Categorical, Float, Int, Space
from paceline.sweep.study_file import StudyFile, read_study_file
from paceline.sweep.trial_run import check_commands, command_anew, pool_run, script_words
from simulated_trials import STUDY, write_study


def read(place: Path, text: str = STUDY, **lines: Any) -> StudyFile:
    return read_study_file(write_study(place, text, **lines))


def test_paths_start_at_the_files_folder_and_what_is_left_out_has_a_default(tmp_path: Path) -> None:
    study = read(tmp_path, STUDY.replace('pool = "pool"\n', "").replace('storage = "journal:trials.log"\n', ""))
    assert (study.name, study.folder) == ("study", tmp_path / "runs" / "study")
    assert study.storage == f"sqlite:///{tmp_path}/runs/study/optuna.db"
    assert (study.pool, study.has_own_pool) == (tmp_path / "runs" / "study" / "pool", True)
    assert study.run_dir(7) == tmp_path / "runs" / "study" / "trials" / "trial-0007"
    other = read(tmp_path, name="other", folder="/far", pool="shared", storage="sqlite:///own.db")
    assert (other.folder, other.pool, other.has_own_pool) == (Path("/far"), tmp_path / "shared", False)
    assert other.storage == f"sqlite:///{tmp_path}/own.db"
    assert read(tmp_path, storage="mysql://me@host/optuna").storage == "mysql://me@host/optuna"


def test_parameters_are_ranges_choices_and_values_that_stay() -> None:
    space = Space.read(
        {
            "lr": {"kind": "float", "low": 1e-4, "high": 1, "log": True},
            "width": {"kind": "int", "low": 16, "high": 64, "step": 16},
            "optimizer": ["sgd", "adamw"],
            "nesterov": {"kind": "categorical", "choices": [True, False]},
            "momentum": 0.9,
        }
    )
    assert space.ranges == {
        "lr": Float(low=1e-4, high=1.0, log=True),
        "width": Int(low=16, high=64, step=16),
        "optimizer": Categorical(choices=("sgd", "adamw")),
        "nesterov": Categorical(choices=(True, False)),
    }
    assert space.fixed == {"momentum": 0.9}
    assert list(space.example()) == ["lr", "width", "optimizer", "nesterov", "momentum"]


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({}, "nothing to search"),
        ({"lr": 0.1}, "nothing to search"),
        ({"lr": {"low": 0.1, "high": 1.0}}, "parameters.lr does not say which kind it is: add kind = 'Float' or 'Int'"),
        ({"lr": {"kind": "flaot", "low": 0.1, "high": 1.0}}, "Did you mean 'Float'?"),
        ({"lr": {"kind": "float", "low": 0.1}}, "parameters.lr.high is missing"),
        ({"lr": {"kind": "float", "low": 0.1, "hi": 1}}, "parameters.lr.hi: Float has no field 'hi'"),
        ({"lr": {"kind": "float", "low": 1.0, "high": 0.1}}, "parameters.lr: low is 1.0 and high is 0.1"),
        ({"lr": {"kind": "float", "low": 0, "high": 1, "log": True}}, "needs a low above 0, and low is 0.0"),
        ({"lr": {"kind": "float", "low": 1, "high": 9, "log": True, "step": 2}}, "exclude each other"),
        ({"n": {"kind": "int", "low": 1, "high": 9, "step": 0}}, "parameters.n: step is 0"),
        ({"n": {"kind": "int", "low": 1.5, "high": 9}}, "parameters.n.low is 1.5; it must be a whole number"),
        ({"n": []}, "parameters.n: choices is empty"),
        ({"n": ["a", "a"]}, "choices has 'a' twice"),
        ({"a b": [1, 2]}, "parameters.a b: a parameter's name has letters"),
        ({"n": float("nan")}, "parameters.n is nan; give a number"),
    ],
)
def test_a_parameter_that_cannot_be_is_refused_by_its_name(parameters: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError, match=re.escape(says)):
        Space.read(parameters)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ({"trials": 0}, "trials is 0; it must be at least 1"),
        ({"retries": -1}, "retries is -1"),
        ({"timeout_s": 0.0}, "timeout_s is 0.0; it must be above 0"),
        ({"slots": 2}, "leave one out"),
        ({"trails": 3}, "has no field 'trails'. Did you mean 'trials'?"),
        ({"script": "none.py"}, "script is 'none.py', which does not exist"),
        ({"script": "job.toml"}, "it must be a Python script"),
        ({"name": "a/b"}, "name is 'a/b'; it names runs and a folder"),
        ({"trials": "many"}, "trials is 'many'; it must be a whole number or none"),
    ],
)
def test_a_line_that_cannot_be_is_refused_with_the_files_name(tmp_path: Path, lines: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=re.escape(says)) as refused:
        read(tmp_path, **lines)
    assert str(refused.value).startswith(f"{tmp_path}/study.toml: ")


def test_an_objective_names_its_direction_in_its_own_table(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"direction belongs into the table \[objective\]"):
        read(tmp_path, 'direction = "minimize"\n' + STUDY)
    with pytest.raises(PlanError, match=r"objective.direction is missing"):
        read(tmp_path, STUDY.replace('direction = "maximize"\n', ""))
    with pytest.raises(PlanError, match=r"'up'; it must be 'minimize' or 'maximize'"):
        read(tmp_path, STUDY.replace('"maximize"', '"up"'))
    with pytest.raises(PlanError, match=r"objective is missing"):
        read(tmp_path, STUDY[: STUDY.index("[objective]")] + STUDY[STUDY.index("[sampler]") :])


# What becomes of a trial's values.


def test_values_are_filled_in_wherever_the_study_names_them(tmp_path: Path) -> None:
    study = read(
        tmp_path,
        STUDY.replace("x = {", 'size = [32, 64]\ntext = "a b"\nx = {')
        + '[environment]\nX = "{x}"\n[job]\nsave_every = 5\n',
        arguments='--x {x} --text {text} --json {{\\"n\\":{size}}}',
        plan="replicas=1-3+batch(size={size})",
        priority=2.0,
        deadline_s=60.0,
    )
    check_commands(study)
    run = pool_run(study, 7, {"x": 0.125, "size": 64, "text": "a b"})
    plan = "replicas=1-3+batch(size=64)"
    assert run.command == (
        *("--plan", plan, "--set", "save_every=5", "train.py", "--"),
        *("--x", "0.125", "--text", "a b", "--json", '{"n":64}'),
    )
    assert (run.name, run.run_dir, run.folder) == ("study-trial-0007", str(study.run_dir(7)), str(tmp_path))
    assert (run.least, run.most, run.workers_each, run.priority) == (1, 3, 1, 2.0)
    assert run.deadline == pytest.approx(run.submitted + 60)
    assert run.environment["X"] == "0.125"
    assert command_anew(study, {"x": 0.125, "size": 64, "text": "a b"}).endswith(
        f"env X=0.125 paceline run --plan '{plan}' --set save_every=5 train.py -- --x 0.125 --text 'a b' "
        """--json '{"n":64}'"""
    )


def test_without_arguments_each_parameter_is_an_option_of_the_script(tmp_path: Path) -> None:
    text = STUDY.replace('arguments = "--x {x}"\n', "").replace("x = {", "nesterov = [true, false]\nx = {")
    study = read(tmp_path, text)
    assert script_words(study, {"nesterov": True, "x": 0.5}) == ["--nesterov=true", "--x=0.5"]


@pytest.mark.parametrize("value", [-1e-05, -3.0, 1e-300, -1e300])
def test_the_script_reads_the_value_of_such_an_option_whatever_its_sign_and_size(tmp_path: Path, value: float) -> None:
    study = read(tmp_path, STUDY.replace('arguments = "--x {x}"\n', "").replace("low = 0.0", "low = -1.0"))
    parser = argparse.ArgumentParser()
    parser.add_argument("--x", type=float)
    assert parser.parse_args(script_words(study, {"x": value})).x == value


def test_replicas_of_a_study_win_over_those_of_its_plan(tmp_path: Path) -> None:
    for replicas, expected in (("2-4", (2, 4)), (3, (3, 3))):
        run = pool_run(read(tmp_path, replicas=replicas, plan="replicas=1"), 0, {"x": 1.0})
        assert (run.least, run.most) == expected
        assert run.command[:4] == ("--plan", "replicas=1", "--set", f"plan.layout.replicas={replicas}")
    run = pool_run(read(tmp_path), 0, {"x": 1.0})
    assert (run.least, run.most) == (1, 2), "the script's own"


@pytest.mark.parametrize(
    ("lines", "more", "says"),
    [
        ({"arguments": "--x {y}"}, "", "{y} stands for no parameter. There are: x."),
        ({"arguments": "--x 1"}, "", "the parameter x is used nowhere"),
        ({"plan": "replicas=1-2+batch(siez=3)"}, "", "Did you mean"),
        ({"replicas": "many"}, "", "replicas"),
        ({}, "[job]\nrun_dir = 'a'\n", "job.run_dir cannot be set: each trial has its own"),
        ({}, "[job]\nsave_evry = 3\n", "has no field 'save_evry'. Did you mean 'save_every'?"),
        ({}, "[job]\nkeep = 0\n", "Job.keep is 0; it must be at least 1"),
    ],
)
def test_a_command_that_cannot_work_is_refused_before_the_first_trial(
    tmp_path: Path, lines: dict[str, Any], more: str, says: str
) -> None:
    study = read(tmp_path, STUDY + more, **lines)
    with pytest.raises(PlanError, match=re.escape(says)) as refused:
        check_commands(study)
    assert str(refused.value).startswith(str(study.path))
