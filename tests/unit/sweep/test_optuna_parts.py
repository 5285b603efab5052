"""Samplers, pruners and ranges of a study file are Optuna's, with Optuna's options; others are refused by name."""

from __future__ import annotations

import builtins
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.errors import PlanError
from paceline.sweep.optuna_parts import distributions_of, grid_of, make_pruner, make_sampler, open_storage
from paceline.sweep.space import Categorical, Float, Int, Space
from simulated_trials import write_study

optuna = pytest.importorskip("optuna")
SPACE = Space(
    ranges={
        "lr": Float(low=0.1, high=0.3, step=0.1),
        "n": Int(low=1, high=5, step=2),
        "how": Categorical(choices=("a", "b")),
    },
    fixed={},
)


@pytest.mark.parametrize(
    ("said", "cls"),
    [
        ({}, "TPESampler"),
        ({"kind": "tpe", "n_startup_trials": 3, "multivariate": True, "seed": 1}, "TPESampler"),
        ({"kind": "random", "seed": 1}, "RandomSampler"),
        ({"kind": "cmaes", "popsize": 4}, "CmaEsSampler"),
        ({"kind": "qmc", "qmc_type": "halton"}, "QMCSampler"),
        ({"kind": "gp", "n_startup_trials": 3}, "GPSampler"),
        ({"kind": "grid"}, "GridByAsking"),
    ],
)
def test_samplers_are_made_by_name_with_optunas_options(said: dict[str, Any], cls: str) -> None:
    assert type(make_sampler(said, SPACE, number=0)).__name__ == cls


@pytest.mark.parametrize(
    ("said", "cls"),
    [
        ({}, "NopPruner"),
        ({"kind": "median", "n_startup_trials": 3, "n_warmup_steps": 2}, "MedianPruner"),
        ({"kind": "percentile", "percentile": 25.0}, "PercentilePruner"),
        ({"kind": "asha", "min_resource": 1, "reduction_factor": 3}, "SuccessiveHalvingPruner"),
        ({"kind": "successive-halving"}, "SuccessiveHalvingPruner"),
        ({"kind": "hyperband", "max_resource": 27}, "HyperbandPruner"),
        ({"kind": "threshold", "upper": 3.0}, "ThresholdPruner"),
        ({"kind": "patient", "patience": 2, "wrapped": {"kind": "median"}}, "PatientPruner"),
        ({"kind": "patient", "patience": 2}, "PatientPruner"),
        ({"kind": "wilcoxon"}, "WilcoxonPruner"),
    ],
)
def test_pruners_are_made_by_name_with_optunas_options(said: dict[str, Any], cls: str) -> None:
    assert type(make_pruner(said)).__name__ == cls


@pytest.mark.parametrize(
    ("table", "said", "says"),
    [
        ("sampler", {"kind": "tpee"}, "sampler.kind is 'tpee'; it must be one of tpe, random, grid"),
        ("sampler", {"n_startup": 3}, "TPESampler has no option 'n_startup'. Did you mean 'n_startup_trials'?"),
        ("sampler", {"kind": "random", "seed": "x"}, "sampler.seed is 'x'; it must be a whole number"),
        ("pruner", {"kind": "hyperbnd"}, "Did you mean 'hyperband'?"),
        ("pruner", {"kind": "percentile"}, "PercentilePruner refuses it"),
        ("pruner", {"kind": "median", "n_warmup_steps": -1}, "MedianPruner refuses it"),
        ("pruner", {"kind": "patient", "patience": 1, "wrapped": {"kind": "no"}}, "pruner.wrapped.kind is 'no'"),
        ("pruner", {"kind": "patient", "patience": 1, "wrapped": "median"}, "it must be a table"),
    ],
)
def test_what_optuna_does_not_know_is_refused_with_the_tables_name(table: str, said: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=re.escape(says)):
        make_sampler(said, SPACE, number=0) if table == "sampler" else make_pruner(said)


def test_a_seed_goes_on_with_the_trials_where_the_sampler_begins_anew() -> None:
    def drawn(kind: str, number: int) -> float:
        sampler = make_sampler({"kind": kind, "seed": 5}, SPACE, number=number)
        study = optuna.create_study(sampler=sampler)
        value: float = study.ask({"x": optuna.distributions.FloatDistribution(0, 1)}).params["x"]
        return value

    assert drawn("random", 3) == drawn("random", 3)
    assert drawn("random", 3) != drawn("random", 4)
    assert drawn("tpe", 3) != drawn("tpe", 4)


def test_ranges_become_optunas_distributions() -> None:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    assert distributions_of(SPACE) == {
        "lr": FloatDistribution(0.1, 0.3, step=0.1),
        "n": IntDistribution(1, 5, step=2),
        "how": CategoricalDistribution(("a", "b")),
    }


def test_a_grid_has_all_values_up_to_the_last_one() -> None:
    grid = grid_of(SPACE)
    assert grid["lr"] == pytest.approx([0.1, 0.2, 0.3])
    assert list(grid["n"]) == [1, 3, 5]
    assert list(grid["how"]) == ["a", "b"]
    with pytest.raises(PlanError, match=r"needs a step for parameters\.lr"):
        grid_of(Space(ranges={"lr": Float(low=0, high=1)}, fixed={}))
    with pytest.raises(PlanError, match="has 1,000,000 points; at most 100,000"):
        grid_of(Space(ranges={"n": Int(low=1, high=1000), "m": Int(low=1, high=1000)}, fixed={}))


@pytest.mark.thorough
def test_a_storage_that_cannot_be_used_is_refused_with_examples() -> None:
    for url in ("nonsense", "sqlite:////no/such/folder/optuna.db", "journal:/no/such/folder/optuna.log"):
        with pytest.raises(PlanError, match=r"storage cannot be used .* Give an URL such as sqlite:////"):
            open_storage(url)


def test_without_optuna_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found, imported = importlib.util.find_spec, builtins.__import__
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "optuna" else found(name))

    def no_optuna(name: str, *args: Any, **keywords: Any) -> Any:
        assert name.partition(".")[0] != "optuna", "it was imported"
        return imported(name, *args, **keywords)

    monkeypatch.setattr(builtins, "__import__", no_optuna)
    assert main(["sweep", str(write_study(tmp_path))]) == 2
    assert capsys.readouterr().err.strip() == (
        "paceline: A sweep needs Optuna, which this Python does not have: pip install 'paceline[sweep]'."
    )


def test_a_storage_that_fails_without_a_word_is_refused_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(url: str) -> None:
        raise ConnectionError

    monkeypatch.setattr("optuna.storages.get_storage", fails)
    with pytest.raises(PlanError, match=r"storage cannot be used \(ConnectionError: no more is said\)"):
        open_storage("mysql://user@host/optuna")
