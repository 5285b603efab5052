"""A run's prediction and receipt, as files and in words: predicted, measured, learned, and what is to blame."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.planner.receipt import MeasuredStep
from paceline.planner.run_receipt import PredictedStep, RunPrediction, RunReceipt
from paceline.planner.step_causes import REST, WorkObserved, cause_of

PREDICTED = PredictedStep(
    model="m",
    plan="replicas=2+batch(size=16,micro=8)",
    micro=8,
    workers=2,
    step_s=0.019,
    low_s=0.014,
    high_s=0.026,
    parts={"products": 0.015, "other": 0.004},
    bytes=0.3e9,
    estimated_s=0.010,
    estimated_parts={"products": 0.008, "data": 0.001, "optimizer": 0.001},
    estimated_bytes=0.2e9,
    corrected_by=1,
    corrected_of="this model on 2 workers",
    is_cpu=True,
    remarks=("a remark",),
)
MEASURED = MeasuredStep(
    step_s=0.021,
    parts={"compute": 0.016, "communication": 0.002, "optimizer": 0.001, "data": 0.001},
    peak=0.31e9,
    steps=40,
)


def receipt(**changed: Any) -> RunReceipt:
    one = RunReceipt.of("lab", 1, PREDICTED, MEASURED, blame="most of the difference: compute")
    return dataclasses.replace(one, **changed)


def test_a_prediction_and_a_receipt_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    made = RunPrediction(cluster="lab.toml:two", attempt=2, receipts="lab.receipts.jsonl", predicted=PREDICTED)
    made.write(tmp_path / "prediction.json")
    assert RunPrediction.read(tmp_path / "prediction.json") == made
    one = receipt(kept="lab.receipts.jsonl")
    one.write(tmp_path / "receipt.json")
    assert RunReceipt.read(tmp_path / "receipt.json") == one
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prediction.json", "receipt.json"]


@pytest.mark.parametrize("value", [0, -1.0, "nan", "x", None, [], {"products": -1.0}, 10**400])
@pytest.mark.parametrize("name", ["step_s", "estimated_s", "bytes", "estimated_parts"])
def test_a_damaged_file_is_as_none(tmp_path: Path, name: str, value: object) -> None:
    path = tmp_path / "prediction.json"
    RunPrediction(cluster="lab", attempt=1, predicted=PREDICTED).write(path)
    told = json.loads(path.read_text())
    told["predicted"][name] = value
    path.write_text(json.dumps(told))
    assert RunPrediction.read(path) is None
    path.write_text('{"cluster"')
    assert RunPrediction.read(path) is None
    assert RunReceipt.read(tmp_path / "receipt.json") is None


def test_the_next_prediction_learns_from_the_cost_model_and_not_from_its_correction() -> None:
    one = receipt().receipt
    assert (one.predicted_s, one.predicted_bytes, one.measured_s) == (0.010, 0.2e9, 0.021)
    assert one.predicted_of("compute") == 0.008
    assert (one.model, one.micro, one.workers) == ("m", 8, 2)


def test_one_line_compares_what_was_told_before_the_run() -> None:
    assert receipt().summary == (
        "a step took 21.0 ms, predicted 19.0 ms (+11 %); memory 0.31 GB, predicted 0.3 GB (+3 %)"
    )
    unknown = dataclasses.replace(receipt().receipt, measured_bytes=None)
    assert receipt(receipt=unknown).summary == "a step took 21.0 ms, predicted 19.0 ms (+11 %)"


def test_a_corrected_prediction_stands_below_the_cost_models_parts() -> None:
    lines = list(receipt(kept="lab.receipts.jsonl").lines())
    assert lines[0].split() == ["receipt", "cost", "model", "measured"]
    assert ["compute", "8.00", "ms", "16.0", "ms", "+100", "%"] in [line.split() for line in lines]
    assert [line.strip() for line in lines[-3:]] == [
        "most of the difference: compute",
        "corrected by 1 receipt of this model on 2 workers, the prediction was 19.0 ms and 0.3 GB",
        "kept in lab.receipts.jsonl: the next predictions for this cluster are corrected by it",
    ]
    plain = list(receipt(corrected_by=0, not_kept="the run has failed").lines())
    assert plain[0].split() == ["receipt", "predicted", "measured"]
    assert plain[-1].strip() == "not kept: the run has failed"
    assert not any("corrected by" in line for line in plain)


def test_a_prediction_in_one_line() -> None:
    assert PREDICTED.text == "19.0 ms a step (80 % band: 14.0 ms to 26.0 ms), 0.3 GB in a worker"


@pytest.mark.parametrize(
    ("name", "error", "seen", "says"),
    [
        ("data", 0.1, WorkObserved(), "the loop waited for samples, which no prediction has"),
        (REST, 0.1, WorkObserved(), "the script's own code between steps, and its records"),
        ("compute", 0.1, WorkObserved(core_wait=0.35), "workers had no core in 35 % of the time: other processes run "),
        ("compute", 0.1, WorkObserved(core_wait=0.05), ""),
        ("optimizer", 0.1, WorkObserved(), ""),
        ("communication", 0.1, WorkObserved(work_s={0: 0.1}), ""),
        (
            "communication",
            0.1,
            WorkObserved(work_s={0: 0.1, 1: 0.2, 2: 0.1}),
            "the others wait for worker 1, which works 200 ms a step and the others 100 ms",
        ),
        ("communication", 0.1, WorkObserved(work_s={0: 0.1, 1: 0.105}), "no worker is slower than the others"),
        ("communication", 1.0, WorkObserved(work_s={0: 0.1, 1: 0.2}), "no worker is slower than the others"),
        ("compute", -0.1, WorkObserved(core_wait=0.9), ""),
    ],
)
def test_causes_are_named_as_far_as_they_are_known(name: str, error: float, seen: WorkObserved, says: str) -> None:
    found = cause_of(name, error, seen)
    assert found.startswith(says)
    assert bool(found) == bool(says)


def test_the_cause_stands_behind_the_part_that_is_to_blame() -> None:
    blame = PREDICTED.receipt(MEASURED).blame(WorkObserved(core_wait=0.5))
    assert blame.startswith("most of the difference: compute took 8.00 ms longer than predicted (workers had no core")
