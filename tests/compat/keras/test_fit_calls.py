"""What else `fit` takes: data in other forms, callbacks, several calls, and a stop in the middle of an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keras_runs import compare, run_program


@pytest.fixture(scope="module")
def of_one(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_program("inputs.py", tmp_path_factory.mktemp("one") / "found.json", workers=1)


@pytest.mark.parametrize("plan", ["replicas=2", "shard=2"])
def test_forms_of_data_callbacks_and_saved_models_are_those_of_one_worker(
    of_one: Any, tmp_path: Path, plan: str
) -> None:
    found = run_program("inputs.py", tmp_path / "found.json", workers=2, plan=plan)
    assert found["loaded"]["numbers"] == [0.0]
    assert len(found["arrays"]["loss"]) < 6, "EarlyStopping stopped nothing, so it shows nothing"
    assert len(set(found["arrays"]["learning_rate"])) > 1, "ReduceLROnPlateau changed nothing"
    assert len(found["whim"]["loss"]) == 1, "all stop where the first worker does"
    for name, expected in of_one.items():
        compare(found[name], expected)
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["epoch", *map(str, range(len(lines) - 1))]
    assert {"best.keras", "each.weights.h5", "last.keras"} <= {path.name for path in tmp_path.iterdir()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What two workers make of the program whose worker is killed in the tests."""
    folder = tmp_path_factory.mktemp("whole")
    return run_program("resumed.py", folder / "found.json", "never", str(folder / "note"), workers=2)


def test_killed_run_goes_on_in_the_middle_of_an_epoch_on_other_workers(undisturbed: Any, tmp_path: Path) -> None:
    out, run_dir = tmp_path / "found.json", tmp_path / "run"
    args, saves = ("0", str(tmp_path / "note")), ("--save-every", "3")
    run_program("resumed.py", out, *args, workers=2, run_dir=run_dir, options=saves, fails=True)
    found = run_program("resumed.py", out, *args, workers=1, run_dir=run_dir, options=saves)
    same_end(found, undisturbed)
    epochs = [line.partition(",")[0] for line in out.with_suffix(".csv").read_text().splitlines()]
    assert epochs == ["epoch", "0", "1", "2", "3"]


def test_elastic_run_goes_on_without_the_worker_that_was_killed(undisturbed: Any, tmp_path: Path) -> None:
    out, note = tmp_path / "found.json", tmp_path / "note"
    found = run_program("resumed.py", out, "1", str(note), workers=2, plan="replicas=1-2")
    assert note.exists(), "nobody was killed"
    same_end(found, undisturbed)


def same_end(found: Any, expected: Any) -> None:
    """Assert that history and weights are those of another run."""
    weights = "weights"
    assert found[weights] == pytest.approx(expected[weights], rel=1e-4)
    compare({**found, weights: []}, {**expected, weights: []})
    assert len(set(found["learning_rate"])) > 1, "ReduceLROnPlateau changed nothing"
