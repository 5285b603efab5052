"""`fit` gives the history that Keras' own `fit` gives of the same samples in the same order, under every plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keras_runs import compare, run_own, run_program

EXACT = ("dense", "conv", "outputs", "weighted", "masked", "autoencoder")
RANDOM = ("transformer", "statistics")  # dropout, and statistics of micro-batches: Keras' own are others
ALL = ",".join((*EXACT, *RANDOM))


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What two workers make of all models, one after the other in one program."""
    return run_program("zoo.py", tmp_path_factory.mktemp("two") / "found.json", ALL, workers=2)


@pytest.fixture(scope="module")
def of_keras(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What Keras itself makes of the models without random layers."""
    return run_own("zoo.py", tmp_path_factory.mktemp("own") / "found.json", ALL)


@pytest.mark.parametrize("name", EXACT)
def test_two_workers_have_the_history_of_keras_itself(of_two: Any, of_keras: Any, name: str) -> None:
    compare(of_two[name], of_keras[name])


@pytest.mark.parametrize(
    ("workers", "plan"), [(1, "replicas=1"), (3, "replicas=3"), (2, "shard=2"), (2, "shard=2+zero=1")]
)
def test_other_plans_have_the_same_history(of_two: Any, tmp_path: Path, workers: int, plan: str) -> None:
    found = run_program("zoo.py", tmp_path / "found.json", ALL, workers=workers, plan=plan)
    for name in ALL.split(","):
        compare(found[name], of_two[name])


def test_random_layers_draw_in_each_micro_batch(of_two: Any, of_keras: Any) -> None:
    # Were all masks of a step the same, or those of Keras, losses would be, too.
    assert all(of_two[name]["loss"] != of_keras[name]["loss"] for name in RANDOM)
