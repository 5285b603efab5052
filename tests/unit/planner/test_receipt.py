"""Receipts: medians of what was measured, causes of the difference, and what the next prediction learns."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import PlanError
from paceline.plan import Batch, Plan
from paceline.planner.cluster import catalogue
from paceline.planner.constants import built_in
from paceline.planner.correction import UNCORRECTED, Correction
from paceline.planner.model_costs import transformer
from paceline.planner.receipt import Receipt, correction_of, measured_step, read_receipts
from paceline.planner.search import PricedPlan, price

MODEL = transformer(layers=4, hidden=1024, heads=16, sequence=512, vocabulary=32000)


def rows(*totals: float) -> list[dict[str, Any]]:
    seconds = {"data": 0.01, "compute": 0.7, "communication": 0.2, "optimizer": 0.05}
    return [{"step": step, "seconds": seconds | {"total": total}} for step, total in enumerate(totals, start=1)]


def receipt(**changed: Any) -> Receipt:
    one = Receipt(
        model="m",
        plan="replicas=2",
        micro=8,
        workers=2,
        predicted_s=1.0,
        predicted_parts={"products": 0.6, "moves": 0.2, "data": 0.1, "optimizer": 0.1},
        predicted_bytes=2e9,
        measured_s=1.3,
        measured_parts={"compute": 1.2, "communication": 0.04, "optimizer": 0.05, "data": 0.0},
        measured_bytes=2.2e9,
    )
    return dataclasses.replace(one, **changed)


def of(micro: int, layout: str = "replicas=2") -> Plan:
    return Plan.parse(f"{layout}+batch(size=64,micro={micro})")


def priced(correction: Correction = UNCORRECTED) -> PricedPlan:
    plan = Plan(batch=Batch(size=64, micro=8)).resolve(8)
    return price(plan, MODEL, catalogue().cluster("h100x8-ib"), built_in(), workers=8, correction=correction)


def test_the_median_step_counts_without_the_first_two() -> None:
    found = measured_step([*rows(9.0, 9.0, 1.0, 1.2, 1.1), {"step": 6}], peak=5e9)
    assert found is not None
    assert (found.step_s, found.peak, found.steps) == (1.1, 5e9, 3)
    assert found.parts == {"compute": 0.7, "communication": 0.2, "optimizer": 0.05, "data": 0.01}
    assert measured_step(rows(9.0, 9.0, 1.0, 1.2), peak=None) is None


def test_a_receipt_has_both_sides_and_names_what_differs_most() -> None:
    lines = list(receipt().lines())
    found = [line.split() for line in lines]
    assert ["step", "1.00", "s", "1.30", "s", "+30", "%"] in found
    assert ["compute", "800", "ms", "1.20", "s", "+50", "%"] in found
    assert ["memory", "2", "GB", "2.2", "GB", "+10", "%"] in found
    assert lines[-1] == "         most of the difference: compute took 400 ms longer than predicted"
    assert not any(
        "most of" in line
        for line in receipt(
            measured_s=1.0, measured_parts={"compute": 0.8, "communication": 0.1, "optimizer": 0.1}
        ).lines()
    )


def test_seconds_that_are_in_no_part_are_told() -> None:
    lines = list(receipt(measured_s=2.3).lines())
    assert ["other", "0", "s", "1.01", "s"] in [line.split() for line in lines]
    assert "what is in no part took 1.01 s longer than predicted" in lines[-1]


def test_the_parts_of_a_prediction_are_all_in_its_receipt() -> None:
    one = priced()
    found = Receipt.of("m", one, measured_step(rows(1.0, 1.0, 1.0, 1.0, 1.0), peak=None) or pytest.fail("too few"))
    assert sum(found.predicted_parts.values()) == pytest.approx(one.step.step_s)
    assert sum(found.predicted_of(name) for name in found.measured_parts) == pytest.approx(one.step.step_s)
    assert (found.plan, found.workers, found.predicted_bytes) == (str(one.plan), 8, one.memory.peak)


def test_receipts_are_kept_and_read(tmp_path: Path) -> None:
    path = tmp_path / "c.receipts.jsonl"
    assert read_receipts(path) == []
    for one in (receipt(), receipt(workers=4)):
        one.append_to(path)
    assert read_receipts(path) == [receipt(), receipt(workers=4)]


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", json.dumps(dataclasses.asdict(receipt(predicted_s=0.0))), json.dumps({"model": "m"})]
)
def test_a_line_that_is_no_receipt_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "c.receipts.jsonl"
    receipt().append_to(path)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(PlanError, match="line 2 is no receipt"):
        read_receipts(path)


def test_the_same_model_and_workers_correct_part_by_part() -> None:
    found = correction_of([receipt(), receipt(model="other"), receipt(workers=4)], "m", of(8), workers=2)
    assert (found.compute, found.optimizer) == (pytest.approx(1.5), pytest.approx(0.5))
    assert (found.communication, found.added_s) == (pytest.approx(0.5), 0.0), "0.05 s are left of 0.1 s"
    assert (found.receipts, found.of) == (1, "this model on 2 workers")
    assert found.added_bytes == pytest.approx(0.2e9)
    slow = receipt(measured_s=1.7)
    found = correction_of([slow], "m", of(8), workers=2)
    assert (found.communication, found.added_s) == (1.0, pytest.approx(1.7 - 1.25 - 0.1))


def test_the_bubble_of_a_pipeline_grows_with_compute() -> None:
    parts = {"products": 0.4, "idle": 0.2, "sends": 0.1}
    one = receipt(predicted_s=0.7, predicted_parts=parts, measured_s=1.5, measured_parts={"compute": 0.8})
    found = correction_of([one], "m", of(8), workers=2)
    assert (found.compute, found.communication) == (pytest.approx(2.0), 1.0)
    assert found.added_s == pytest.approx(1.5 - 0.8 - 2 * 0.2 - 0.1)


def test_the_nearest_micro_batch_counts() -> None:
    small, large = receipt(micro=4, measured_parts={"compute": 1.6}), receipt(micro=32)
    assert correction_of([small, large], "m", of(8), workers=2).compute == pytest.approx(2.0)
    assert correction_of([small, large], "m", of(16), workers=2).compute == pytest.approx(1.5)
    both = correction_of([small, receipt(micro=16)], "m", of(8), workers=2)
    assert (both.receipts, both.compute) == (2, pytest.approx(1.75)), "equally near"


def test_communication_is_that_of_the_same_cuts_and_compute_that_of_the_same_micro_batch() -> None:
    plain = receipt(micro=16, measured_parts={"compute": 1.6}, measured_s=1.65)
    shards = receipt(plan="shard=2", micro=16, measured_parts={"compute": 0.8}, measured_s=1.0)
    shard, whole = (correction_of([plain, shards], "m", of(16, one), workers=2) for one in ("shard=2", "replicas=2"))
    assert (shard.compute, whole.compute) == (pytest.approx(1.0), pytest.approx(2.0))
    assert (shard.communication, shard.added_s) == (1.0, pytest.approx(1.0 - 0.8 - 0.1))
    assert (whole.communication, whole.added_s) == (pytest.approx(0.5), 0.0)
    first = correction_of([plain], "m", of(16, "shard=2"), workers=2)
    assert (first.compute, first.communication, first.added_s) == (pytest.approx(2.0), 1.0, 0.0), "no such exchange yet"


def test_other_workers_and_other_models_correct_the_whole_step() -> None:
    found = correction_of([receipt(workers=4), receipt(model="other", measured_s=9.0)], "m", of(8), workers=2)
    assert (found.compute, found.communication, found.of) == (pytest.approx(1.3), pytest.approx(1.3), "this model")
    found = correction_of([receipt(measured_s=2.0), receipt(measured_s=4.0)], "new", of(8), workers=2)
    assert (found.compute, found.receipts, found.of) == (pytest.approx(3.0), 2, "other models")
    assert correction_of([], "m", of(8), workers=2) is UNCORRECTED


def test_a_corrected_step_is_the_sum_of_its_corrected_parts() -> None:
    plain = priced()
    assert plain.step is plain.estimated
    found = priced(Correction(compute=2.0, optimizer=3.0, communication=5.0, added_s=0.01, receipts=1))
    parts, before = found.step.parts, plain.step.parts
    assert parts["products"] == pytest.approx(2 * before["products"])
    assert parts["optimizer"] == pytest.approx(3 * before["optimizer"])
    assert parts["data"] == pytest.approx(5 * before["data"])
    assert parts["other"] == 0.01
    assert found.step.step_s == pytest.approx(sum(parts.values()))
    assert found.step.mfu == pytest.approx(plain.step.mfu * plain.step.step_s / found.step.step_s)
    assert found.estimated == plain.step


def test_memory_beyond_the_prediction_is_the_runtimes() -> None:
    plain = priced()
    found = priced(Correction(added_bytes=1e9, receipts=1))
    assert found.memory.parts["runtime"] == pytest.approx(plain.memory.parts["runtime"] + 1e9)
    assert (
        found.memory.peak == pytest.approx(sum(found.memory.parts.values())) == pytest.approx(plain.memory.peak + 1e9)
    )
    assert found.estimated_bytes == plain.memory.peak
    assert priced(Correction(added_bytes=-1e12, receipts=1)).memory.parts["runtime"] == 0.0


def test_a_run_that_was_measured_is_predicted_as_it_was() -> None:
    one = priced()
    measured = measured_step(rows(*[1.0] * 6), peak=None) or pytest.fail("too few")
    kept = Receipt.of("m", one, measured)
    again = priced(correction_of([kept], "m", of(8), workers=8))
    assert again.step.step_s == pytest.approx(1.0, rel=1e-6)
