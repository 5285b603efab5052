"""Predictions of a step: parts that add up, the executed schedules' idle time, and what must not be reversed."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.errors import PlanError
from paceline.plan import Layout
from paceline.planner.axes import Axes
from paceline.planner.case import Case
from paceline.planner.cluster import Cluster, catalogue
from paceline.planner.constants import Constants
from paceline.planner.idle_slots import idle_slots
from paceline.planner.model_costs import transformer
from paceline.planner.predict import PARTS, Prediction, Workload
from paceline.planner.software import EAGER, FUSED, MEGATRON, UNFUSED_ATTENTION
from paceline.schedule.pipeline import build
from paceline.schedule.pipeline_timeline import StageCost, simulate

LLAMA = transformer(
    layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, gated=True, sequence=4096, vocabulary=128256
)
H100 = catalogue().device("h100")


def case(workers: int = 8, **changes: object) -> Case:
    axes = changes.pop("axes", None) or Axes(shard=workers)
    usual = Case(
        model=LLAMA,
        cluster=Cluster.of(H100, workers, devices_per_host=8),
        axes=axes,  # pyright: ignore[reportArgumentType]
        micro_batch=1,
        micro_batches=8,
        software=FUSED,
    )
    return dataclasses.replace(usual, **changes)  # pyright: ignore[reportArgumentType]


def predicted(one: Case, constants: Constants | None = None) -> Prediction:
    return Workload(one).predict(constants or Constants())


@pytest.mark.parametrize(
    "axes",
    [
        Axes(replicas=8, zero=0),
        Axes(shard=8, zero=1),
        Axes(shard=8),
        Axes(tensor=8),
        Axes(tensor=8, sequence=True),
        Axes(stages=8, zero=0),
        Axes(stages=8, chunks=2, schedule="interleaved"),
        Axes(context=8),
        Axes(replicas=2, tensor=2, stages=2, zero=0),
    ],
)
@pytest.mark.parametrize("recompute", ["none", "full", "half", "selective"])
def test_parts_add_up_to_the_step(axes: Axes, recompute: str) -> None:
    found = predicted(case(axes=axes, recompute=recompute))
    assert found.parts.keys() == PARTS.keys()
    assert all(value >= 0 for value in found.parts.values())
    assert sum(found.parts.values()) == pytest.approx(found.step_s)
    assert found.tokens_per_s == pytest.approx(case(axes=axes).tokens / found.step_s)
    assert 0 < found.mfu < 1


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
@pytest.mark.parametrize(("stages", "micros"), [(2, 4), (4, 8), (4, 32), (4, 1), (4, 3)])
def test_idle_time_is_that_of_the_schedules_that_are_executed(schedule: str, stages: int, micros: int) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    pipeline = build(schedule, num_workers=stages, num_micro=micros, stages_per_worker=chunks)
    timeline = simulate(pipeline, StageCost(forward=1 / chunks, backward_input=1 / chunks, backward_weight=1 / chunks))
    axes = Axes(stages=stages, chunks=chunks, schedule=schedule)  # pyright: ignore[reportArgumentType]
    assert timeline.makespan - 3 * micros == pytest.approx(3 * idle_slots(axes, micros))


def test_the_factor_scales_all_parts() -> None:
    work = Workload(case())
    once, twice = work.predict(Constants()), work.predict(Constants(), factor=2.0)
    assert twice.step_s == pytest.approx(2 * once.step_s)
    assert twice.parts["products"] == pytest.approx(2 * once.parts["products"])


@pytest.mark.parametrize("rate", ["link", "memory_bandwidth"])
def test_a_faster_device_is_not_slower(rate: str) -> None:
    better = dataclasses.replace(H100, **{rate: getattr(H100, rate) * 2})
    for axes in (Axes(shard=8), Axes(tensor=8), Axes(stages=8)):
        slow = case(axes=axes)
        fast = dataclasses.replace(slow, cluster=dataclasses.replace(slow.cluster, device=better))
        assert predicted(fast).step_s < predicted(slow).step_s


def test_a_slow_network_shows_as_exposed_communication() -> None:
    fast = case(16, axes=Axes(shard=16))
    slow = dataclasses.replace(fast, cluster=dataclasses.replace(fast.cluster, network=1e9))
    assert predicted(slow).parts["data"] > 20 * predicted(fast).parts["data"]
    assert predicted(slow).parts["products"] == predicted(fast).parts["products"]


def test_recompute_costs_a_forward_at_most() -> None:
    by_kind = {
        kind: predicted(case(recompute=kind)).parts["recompute"] for kind in ("none", "selective", "half", "full")
    }
    assert by_kind["none"] == 0 < by_kind["selective"] < by_kind["full"]
    assert by_kind["half"] == pytest.approx(by_kind["full"] / 2)


def test_software_hides_communication_and_fuses_kernels() -> None:
    axes = Axes(tensor=8, sequence=True)
    assert (
        predicted(case(axes=axes, software=MEGATRON)).parts["tensor"] < predicted(case(axes=axes)).parts["tensor"] / 2
    )
    assert predicted(case(software=EAGER)).parts["moves"] > predicted(case()).parts["moves"]
    assert predicted(case(software=UNFUSED_ATTENTION)).parts["attention"] > 2 * predicted(case()).parts["attention"]


def test_half_of_the_pairs_are_skipped_by_causal_attention() -> None:
    whole = dataclasses.replace(FUSED, skips_pairs=False)
    assert predicted(case(software=whole)).parts["attention"] == pytest.approx(2 * predicted(case()).parts["attention"])


def test_8_bit_products_are_faster_and_quantising_costs() -> None:
    eight, sixteen = predicted(case(precision="fp8")), predicted(case())
    assert eight.parts["products"] < sixteen.parts["products"] * 0.7
    assert eight.parts["moves"] > sixteen.parts["moves"]


def test_experts_exchange_tokens() -> None:
    mixtral = transformer(
        layers=32, hidden=4096, heads=32, ffn=14336, gated=True, experts=8, routed=2, sequence=4096, vocabulary=32000
    )
    spread = predicted(case(model=mixtral, axes=Axes(experts=8, zero=0)))
    assert spread.parts["experts"] > 0
    assert spread.parts["products"] > predicted(case(axes=Axes(replicas=8, zero=0))).parts["products"]


def test_a_layout_becomes_axes() -> None:
    axes = Axes.of(Layout(shard=2, tensor=2, stages=2, schedule="interleaved", stages_per_worker=3), 16)
    assert (axes.replicas, axes.shard, axes.tensor, axes.stages, axes.chunks) == (2, 2, 2, 2, 3)
    assert axes.workers == 16
    assert Axes.of(Layout(), 4).zero == 0
    with pytest.raises(PlanError, match="does not take 3 workers"):
        Axes.of(Layout(tensor=2), 3)


def test_groups_know_how_many_of_them_share_a_host() -> None:
    axes = Axes(tensor=4, replicas=16)
    assert axes.inside(4, 1, 8) == 4
    assert axes.inside(16, 4, 8) == 2
    assert axes.inside(16, 16, 8) == 1


@pytest.mark.parametrize(("micro", "micros"), [(0, 1), (1, 0)])
def test_no_batch_is_refused(micro: float, micros: float) -> None:
    with pytest.raises(PlanError, match="at least 1"):
        case(micro_batch=micro, micro_batches=micros)
    with pytest.raises(PlanError, match="tensor is 0"):
        Axes(tensor=0)
