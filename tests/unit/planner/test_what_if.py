"""What-if: words as cases, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.errors import PlanError
from paceline.plan import Batch, Compute, Layout, Plan
from paceline.planner.cluster import catalogue
from paceline.planner.what_if import rate_of, read_changes, variations, with_workers

PLAN = Plan(layout=Layout(replicas=4, shard=2), batch=Batch(size=64, micro=4))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("25Gbit", 25e9 / 8),
        ("25Gb", 25e9 / 8),
        ("25Gb/s", 25e9 / 8),
        ("100gbit/s", 100e9 / 8),
        ("3GB", 3e9),
        ("3GB/s", 3e9),
        ("2.5e2MB", 2.5e8),
        ("7", 7.0),
    ],
)
def test_bits_are_told_from_bytes(text: str, expected: float) -> None:
    assert rate_of(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "fast", "0Gbit", "-3GB", "3XB", "GB", "1e999GB", "1.2.3GB"])
def test_what_is_no_rate_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(PlanError, match="is no rate"):
        rate_of(text)


def test_cases_are_all_combinations_in_order() -> None:
    changes = read_changes(["workers=8,16 link=25Gbit", "link=3GB"])
    found = list(variations(PLAN, catalogue().cluster("h100x8-ib"), catalogue(), changes, workers=8))
    assert [(case.workers, case.cluster.network) for case in found] == [
        (8, 3.125e9),
        (8, 3e9),
        (16, 3.125e9),
        (16, 3e9),
    ]
    assert [case.cluster.hosts for case in found] == [1, 1, 2, 2]
    assert [case.plan.layout.replicas for case in found if case.plan] == [4, 4, 8, 8]
    assert all(case.plan is not None and case.plan.batch == PLAN.batch for case in found)


def test_devices_hosts_batch_and_precision_change() -> None:
    words = ["device=h200 memory=40GB device_link=100GB per_host=4 batch=8/worker precision=bf16 workers=16"]
    (case,) = variations(PLAN, catalogue().cluster("h100x8-ib"), catalogue(), read_changes(words), workers=8)
    assert case.cluster.device.name == "h200"
    assert (case.cluster.device.memory, case.cluster.device.link) == (40e9, 100e9)
    assert (case.cluster.hosts, case.cluster.devices_per_host) == (4, 4)
    assert case.plan is not None
    assert (case.plan.batch.size, case.plan.batch.micro, case.plan.compute.precision) == (128, 4, "bf16")


def test_a_loss_scale_stays_with_fp16_alone() -> None:
    plan = dataclasses.replace(PLAN, compute=Compute(precision="fp16", loss_scale=64))
    found = variations(
        plan, catalogue().cluster("h100x8-ib"), catalogue(), read_changes(["precision=fp16,bf16"]), workers=8
    )
    assert [case.asked.compute for case in found] == [plan.compute, Compute(precision="bf16")]


def test_a_layout_that_does_not_take_the_workers_has_no_plan_and_keeps_what_was_asked() -> None:
    (case,) = variations(
        PLAN, catalogue().cluster("h100x8-ib"), catalogue(), {"workers": ["7"], "batch": ["70"]}, workers=8
    )
    assert case.plan is None
    assert case.asked.batch.size == 70
    assert with_workers(PLAN, 6) == Plan(layout=Layout(replicas=3, shard=2), batch=PLAN.batch)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["worker=3"], "Did you mean 'workers'"),
        (["workers"], "is nothing that may be changed"),
        (["workers="], "has no value"),
        ([f"workers={','.join(map(str, range(1, 50)))} batch={','.join(map(str, range(1, 50)))}"], "2,401 cases"),
    ],
)
def test_words_that_are_not_understood_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        read_changes(words)


@pytest.mark.parametrize("change", ["workers=0", "workers=1.5", "workers=many", "batch=-2", "precision=int4"])
def test_values_out_of_range_are_refused_with_the_remedy(change: str) -> None:
    with pytest.raises(PlanError, match="write"):
        list(variations(PLAN, catalogue().cluster("h100x8-ib"), catalogue(), read_changes([change]), workers=8))
