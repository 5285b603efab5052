"""The simulated cluster gives the published completion times of a published policy, and its runs go on as measured."""

from __future__ import annotations

import importlib
import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quick import further

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
KEYS = [(load, workload) for load in ("1.0", "1.5") for workload in (1, 2, 3, 4)]


@pytest.fixture
def pooling(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("applications", "cluster", "runs", "shared", "tiresias")
    return SimpleNamespace(**{name: importlib.import_module(f"pooling.{name}") for name in names})


def pollux(load: str, workload: int, policy: str) -> Any:
    reference = json.loads((BENCHMARKS / "data" / "pollux" / "reference.json").read_text())
    return reference[f"load {load}"][f"workload-{workload}"][policy]


def simulated(pooling: Any, load: str, workload: int, policy: Any, *, known: bool = False, fixed: bool = False) -> Any:
    return pooling.cluster.simulate(
        pooling.applications.load_submissions(load, workload),
        pooling.applications.load_applications(),
        policy,
        knowledge=pooling.runs.Knowledge(sees_all=fixed, says_remaining=known),
        fixed_batch=fixed,
    )


@pytest.mark.thorough
@pytest.mark.parametrize(("load", "workload"), [KEYS[0], *(further(*key) for key in KEYS[1:])])
def test_tiresias_policy_gives_the_published_times(pooling: Any, load: str, workload: int) -> None:
    found = simulated(pooling, load, workload, pooling.tiresias.tiresias, fixed=True)
    published = pollux(load, workload, "tiresias")
    assert found.mean_s == pytest.approx(published["mean_jct_s"], rel=0.02)
    assert found.p99_s == pytest.approx(published["p99_jct_s"], rel=0.02)


@pytest.mark.thorough
def test_runs_finish_earlier_than_under_pollux_and_still_earlier_where_they_say_what_is_left(pooling: Any) -> None:
    policy = pooling.shared.paceline_policy(pooling.cluster.Times())
    unknown, known = (simulated(pooling, "1.0", 1, policy, known=known) for known in (False, True))
    reference = pollux("1.0", 1, "pollux")
    assert known.mean_s < 0.95 * unknown.mean_s
    assert unknown.mean_s < 0.95 * reference["mean_jct_s"]
    assert max(unknown.p99_s, known.p99_s) < 1.1 * reference["p99_jct_s"]
    assert unknown.longest_wait_s <= 60.0, "each run starts at the next decision"


def test_a_run_alone_takes_its_stand_still_and_its_steps(pooling: Any) -> None:
    app = pooling.applications.load_applications()["ncf"]
    asked = pooling.applications.Submission("ncf-0", 0.0, "ncf", 1, 32768)
    run = pooling.runs.SimulatedRun(asked, app, knowledge=pooling.runs.Knowledge())
    before = run.remaining_s
    run.move(["a"], 30.0)
    run.advance(0.0, 30.0)
    assert run.attained == 30.0 and run.remaining_s == before
    run.advance(30.0, 1000.0)
    step_s, _ = app.step_seconds((1,), 32768)
    steps = 0.0
    for epoch, (begin, end) in enumerate(pairwise([0.0, *app.progress])):
        square, variance = app.gradients(32768, epoch)
        steps += (end - begin) / ((variance + square) / (variance * 256 / 32768 + square))
    assert run.jct_s == run.attained == pytest.approx(30.0 + steps * step_s)


def test_a_run_may_have_at_most_twice_what_it_has_had(pooling: Any) -> None:
    app = pooling.applications.load_applications()["cifar10"]
    asked = pooling.applications.Submission("cifar10-0", 0.0, "cifar10", 4, 512)
    run = pooling.runs.SimulatedRun(asked, app, knowledge=pooling.runs.Knowledge())
    assert run.max_replicas == 1
    run.move(["a"], 30.0)
    run.advance(0.0, 30.0)
    assert run.max_replicas == 1, "it has only stood still"
    run.advance(30.0, 30.0)
    assert run.max_replicas == 2
    run.move(["a", "a"], 0.0)
    run.advance(60.0, 1.0)
    assert run.max_replicas == 4


def test_a_policy_that_gives_more_than_there_is_ends_the_simulation(pooling: Any) -> None:
    with pytest.raises(RuntimeError, match="more devices than there are"):
        simulated(pooling, "1.0", 1, lambda runs, nodes, now: {name: ["node-00"] * 5 for name in runs})


def test_a_step_between_two_measurements_takes_a_time_between_theirs(pooling: Any) -> None:
    app = pooling.applications.load_applications()["bert"]
    (low, _), (middle, _), (high, _) = (app.step_seconds((1, 4), local) for local in (8, 9, 11))
    assert low < middle < high
    assert app.step_seconds((4, 1), 9) == app.step_seconds((1, 4), 9), "a ring of nodes has no first one"
