"""Predicted bytes, beside figures that papers print."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.planner.axes import Axes
from paceline.planner.case import Case
from paceline.planner.cluster import Cluster, catalogue
from paceline.planner.memory import MEMORY_PARTS, in_flight, predict_memory, state_bytes, verdict
from paceline.planner.model_costs import transformer
from paceline.planner.software import FUSED, UNFUSED_ATTENTION
from paceline.schedule.pipeline import build, peak_in_flight

GPT = transformer(layers=96, hidden=12288, heads=96, sequence=2048, vocabulary=51200, tied=True, dropout=True)


@pytest.mark.parametrize(
    ("zero", "members", "gigabytes"),
    [(1, 4, 52.5), (1, 64, 31.4), (2, 4, 41.3), (2, 64, 16.6), (3, 4, 30.0), (3, 64, 1.88), (0, 64, 120.0)],
)
def test_state_is_that_of_the_zero_paper(zero: int, members: int, gigabytes: float) -> None:
    """Rajbhandari et al. 2020, table 1, of 7.5 B parameters."""
    assert state_bytes(7.5e9, zero=zero, members=members) / 1e9 == pytest.approx(gigabytes, rel=0.005)


def case(axes: Axes, **changes: object) -> Case:
    usual = Case(
        model=GPT,
        cluster=Cluster.of(catalogue().device("a100"), axes.workers, devices_per_host=8),
        axes=axes,
        micro_batch=1,
        micro_batches=64,
        software=dataclasses.replace(UNFUSED_ATTENTION, dropout=True),
        precision="fp16",
    )
    return dataclasses.replace(usual, **changes)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("axes", "recompute", "each"),
    [  # bytes of a block per token and hidden unit, Korthikanti et al. 2022, table 2; 5 a s / h = 80
        (Axes(tensor=8), "none", 10 + 24 / 8 + 80 / 8),
        (Axes(tensor=8, sequence=True), "none", (34 + 80) / 8),
        (Axes(tensor=8), "selective", 10 + 24 / 8),
        (Axes(tensor=8, sequence=True), "selective", 34 / 8),
        (Axes(tensor=8), "full", 2.0),
    ],
)
def test_kept_values_are_those_of_korthikanti(axes: Axes, recompute: str, each: float) -> None:
    found = predict_memory(case(axes, recompute=recompute))
    assert found.parts["kept"] == pytest.approx(2048 * 12288 * 96 * each, rel=1e-6)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_micro_batches_in_flight_are_those_of_the_schedules_that_are_executed(schedule: str) -> None:
    pipeline = build(schedule, num_workers=4, num_micro=16)
    axes = Axes(stages=4, schedule=schedule)  # pyright: ignore[reportArgumentType]
    assert in_flight(case(axes, micro_batches=16)) == peak_in_flight(pipeline.orders[0])


def test_parts_add_up_and_the_factor_scales_them() -> None:
    one = case(Axes(tensor=8, stages=8, replicas=2, zero=0))
    found, twice = predict_memory(one), predict_memory(one, factor=2.0)
    assert found.parts.keys() == MEMORY_PARTS.keys()
    assert sum(found.parts.values()) == pytest.approx(found.peak)
    assert twice.peak == pytest.approx(2 * found.peak)


def test_more_workers_hold_less() -> None:
    peaks = [predict_memory(case(Axes(shard=n), software=FUSED, recompute="full")).peak for n in (8, 64, 512)]
    assert peaks[0] > peaks[1] > peaks[2]


def test_a_verdict_is_unsure_within_the_band_and_fits_only_with_a_margin() -> None:
    one = case(Axes(shard=64), software=FUSED, recompute="full")
    found = predict_memory(one)

    def on(memory: float) -> str:
        device = dataclasses.replace(one.cluster.device, memory=memory)
        return verdict(
            dataclasses.replace(one, cluster=dataclasses.replace(one.cluster, device=device)), found, half_width=0.1
        )

    assert on(found.peak * 1.25) == "fits"
    assert on(found.peak * 1.15) == "unsure"
    assert on(found.peak * 0.95) == "unsure"
    assert on(found.peak * 0.88) == "does not fit"
