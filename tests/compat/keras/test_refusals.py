"""What would not be right on several workers is refused before a step, with the value and the way."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from keras_runs import run_program

SAID = {
    "generator": r"PlanError: fit\(\) got a generator, which gives its batches one after another.*a torch Dataset",
    "sampler": r"PlanError: .*the sampler WeightedRandomSampler.*worker\.batches\(dataset, weights=",
    "text": "ValueError: an array of <U1 cannot be a tensor: turn text into numbers",
    "rows": r"ValueError: Data cardinality is ambiguous.*\[3, 16\]",
    "both weights": "ValueError: You cannot `class_weight` and `sample_weight` at the same time",
    "targets beside a dataset": r"ValueError: fit\(x=TensorDataset, y=\.\.\.\)",
    "split of a dataset": "ValueError: validation_split=0.5",
    "own step": "PlanError: OwnStep has a train_step of its own.*Override compute_loss",
    "metric": r"PlanError: the metric 'running' \(Running\) does not add up.*Keep sums and counts",
    "compiled": r"PlanError: compile\(jit_compile=True\).*compute\(compile=true\)",
    "not compiled": r"ValueError: .*call model.compile",
    "half precision": r"PlanError: LossScaleOptimizer scales losses.*mixed_bfloat16",
    "no reduction": "PlanError: a loss was compiled with reduction=None.*sum_over_batch_size",
    "backup": "PlanError: the callback BackupAndRestore.*the same command goes on",
    "distribution": "PlanError: keras.distribution has a DataParallel set, which does nothing.*--plan replicas=4",
    "own fit afterwards": r"PlanError: model.fit\(\) of a model that is trained by Paceline.*compat.keras.fit",
    "optimizer of another model": "ValueError: .*was not prepared",
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_program("refused.py", tmp_path_factory.mktemp("refused") / "found.json", workers=1)


@pytest.mark.parametrize("name", SAID)
def test_case_is_refused_with_the_way(refused: Any, name: str) -> None:
    assert re.match(SAID[name], refused[name]), refused[name]


@pytest.mark.parametrize(
    ("workers", "plan", "said"),
    [
        (2, "tensor=2", "Keras' layers are none of torch's.*shard=n"),
        (2, "replicas=2+localsgd(every=2)", "replicas take steps by themselves.*AllReduce"),
        (1, "parameterserver", "a Keras optimizer under|replicas take steps by themselves"),
    ],
)
def test_plan_is_refused_with_the_way(tmp_path: Path, workers: int, plan: str, said: str) -> None:
    told = run_program("zoo.py", tmp_path / "found.json", "conv", workers=workers, plan=plan, fails=True)
    assert re.search(said, " ".join(told.split())), told
