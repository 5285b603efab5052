"""Plans in FP8 are predicted where a rate is published, and nowhere else."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.errors import PlanError
from paceline.plan import Batch, Compute, Layout, Plan
from paceline.planner.cluster import catalogue
from paceline.planner.constants import built_in
from paceline.planner.model_costs import transformer
from paceline.planner.plan_case import case_of
from paceline.planner.search import price

LARGE = transformer(layers=32, hidden=8192, heads=64, sequence=4096, vocabulary=32000)
PLAN = Plan(layout=Layout(shard=8), batch=Batch(size=64, micro=1), compute=Compute(precision="fp8"))
HOST = catalogue().cluster("h100x8-ib")


def test_large_products_are_faster_in_fp8_and_memory_is_that_of_bf16() -> None:
    bf16 = dataclasses.replace(PLAN, compute=Compute(precision="bf16"))
    eight, sixteen = (price(plan, LARGE, HOST, built_in(), workers=8) for plan in (PLAN, bf16))
    assert 0.5 < eight.step.step_s / sixteen.step.step_s < 0.95
    assert eight.memory.peak == pytest.approx(sixteen.memory.peak, rel=0.01)


def test_without_a_published_rate_there_is_no_prediction() -> None:
    emulated = dataclasses.replace(PLAN, compute=Compute(precision="fp8", fp8_emulate=True))
    with pytest.raises(PlanError, match="no published rate for emulated FP8"):
        case_of(emulated, LARGE, HOST, workers=8)
    peak = {name: rate for name, rate in HOST.device.peak.items() if name != "fp8"}
    old = dataclasses.replace(HOST, device=dataclasses.replace(HOST.device, peak=peak))
    with pytest.raises(PlanError, match=f"no published rate for FP8 on {HOST.device.name}. Predict with"):
        case_of(PLAN, LARGE, old, workers=8)
