"""KerasHub's own models train under data and fully sharded plans, with the history of one worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keras_runs import HERE, compare, run_program

PROGRAM = HERE.parent / "tensorflow" / "keras_hub_models.py"
NAMES = ("bert", "gpt2", "gemma", "resnet")


@pytest.fixture(scope="module")
def of_one(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_program(PROGRAM, tmp_path_factory.mktemp("one") / "found.json", workers=1)


@pytest.mark.parametrize("plan", ["replicas=2", "shard=2"])
def test_models_have_the_history_of_one_worker(of_one: Any, tmp_path: Path, plan: str) -> None:
    found = run_program(PROGRAM, tmp_path / "found.json", workers=2, plan=plan)
    assert tuple(found) == NAMES
    for name in NAMES:
        compare(found[name], of_one[name])
