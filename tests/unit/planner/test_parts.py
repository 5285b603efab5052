"""Single parts of a step, in seconds that one can work out by hand: ideal constants, a device of round numbers."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest

from paceline.planner.axes import Axes
from paceline.planner.case import Case
from paceline.planner.cluster import Cluster, Sharding, catalogue
from paceline.planner.constants import Constants
from paceline.planner.model_costs import Attention, Block, ModelCosts
from paceline.planner.predict import Prediction, Workload
from paceline.planner.software import EAGER, FUSED

DEVICE = dataclasses.replace(catalogue().device("h100"), memory_bandwidth=1e12, link=100e9)
ADAM_STEP = 32.0  # bytes of a parameter: moments and master weight read and written, gradient, weight
IDEAL = Constants(link=1.0, network=1.0, latency=1e-6, passes=2.0, unfused=3.0, overlap=1.0, straggle=1e-4)
BLOCK = Block(
    count=4,
    parameters=10**9,
    matmuls=(),
    hidden=1000,
    attention=Attention(heads=8, head_size=128, span=1000.0, kv_elements=2000.0),
    moved=3e6,
    moved_split=1e6,
    single=20e6,
    launches=5,
)
MODEL = ModelCosts(blocks=(BLOCK,), sequence=1)


def step(axes: Axes, **changes: object) -> Prediction:
    cluster = Cluster(device=DEVICE, hosts=-(-axes.workers // 8), devices_per_host=8, network=10e9)
    usual = Case(model=MODEL, cluster=cluster, axes=axes, micro_batch=100, micro_batches=2, software=FUSED)
    return Workload(dataclasses.replace(usual, **changes)).predict(IDEAL)  # pyright: ignore[reportArgumentType]


def without_count(block: Block) -> ModelCosts:
    return dataclasses.replace(MODEL, blocks=(dataclasses.replace(block, single=None),))


def test_moved_elements_are_two_bytes_over_the_bandwidth() -> None:
    # 4 blocks, 2 micro-batches of 100; backward moves 1.7 times as much.
    each = 4 * 2 * 100 * 2 / 1e12 * 2.7
    assert step(Axes()).parts["moves"] == pytest.approx(4e6 * each)  # counted: passes are in it
    assert step(Axes(), software=EAGER).parts["moves"] == pytest.approx(20e6 * each)
    assert step(Axes(), model=without_count(BLOCK)).parts["moves"] == pytest.approx(4e6 * each * 2)
    eager = step(Axes(), model=without_count(BLOCK), software=EAGER)
    assert eager.parts["moves"] == pytest.approx(4e6 * each * 2 * 3)
    assert step(Axes(), precision="fp32").parts["moves"] == pytest.approx(4e6 * each * 2)


def test_tensor_parallel_splits_what_it_can() -> None:
    each = 4 * 2 * 100 * 2 / 1e12 * 2.7
    assert step(Axes(tensor=4)).parts["moves"] == pytest.approx((3e6 + 1e6 / 4) * each)
    assert step(Axes(tensor=4, sequence=True)).parts["moves"] == pytest.approx(4e6 / 4 * each)


def test_a_small_step_waits_for_launches() -> None:
    tiny = dataclasses.replace(BLOCK, moved=0.0, moved_split=0.0, single=0.0, attention=None, parameters=1)
    found = step(Axes(), model=dataclasses.replace(MODEL, blocks=(tiny,)), software=EAGER)
    assert found.parts["launches"] == pytest.approx(4 * 2 * 3 * 5 * DEVICE.launch_s)
    assert step(Axes(), model=dataclasses.replace(MODEL, blocks=(tiny,))).parts["launches"] == 0


def test_the_optimizer_reads_and_writes_what_a_worker_has() -> None:
    assert step(Axes(replicas=8, zero=0)).parts["optimizer"] == pytest.approx(4e9 * ADAM_STEP / 1e12)
    assert step(Axes(shard=8)).parts["optimizer"] == pytest.approx(4e9 / 8 * ADAM_STEP / 1e12)
    assert step(Axes(replicas=2, shard=4, zero=1)).parts["optimizer"] == pytest.approx(1e9 * ADAM_STEP / 1e12)


def test_gradients_are_summed_once_a_step() -> None:
    """With an overlap exponent of 1, nothing is hidden."""
    ring = 2 * 4e9 * 2 * 7 / 8 / 100e9
    assert step(Axes(replicas=8, zero=0)).parts["data"] == pytest.approx(ring, rel=1e-3)
    assert step(Axes(shard=8, zero=1)).parts["data"] == pytest.approx(ring, rel=1e-3)
    assert step(Axes(replicas=8, zero=0), wire_bytes=4.0).parts["data"] == pytest.approx(2 * ring, rel=1e-3)


def test_fully_sharded_gathers_in_each_pass_of_each_micro_batch() -> None:
    gather = 4e9 * 2 * 7 / 8 / 100e9
    assert step(Axes(shard=8)).parts["data"] == pytest.approx(2 * 3 * gather, rel=1e-3)


def test_zero_2_sums_gradients_after_each_micro_batch_and_gathers_once() -> None:
    gather = 4e9 * 2 * 7 / 8 / 100e9
    assert step(Axes(shard=8, zero=2)).parts["data"] == pytest.approx(3 * gather, rel=1e-3)
    assert step(Axes(shard=8, zero=2), micro_batches=5).parts["data"] == pytest.approx(6 * gather, rel=1e-3)


@pytest.mark.parametrize(("zero", "gathers", "sums"), [(1, 1, 1), (2, 1, 2), (3, 4, 2)])
def test_what_shards_add_as_measured_is_paid_as_often_as_they_are_gathered_and_summed(
    zero: Literal[1, 2, 3], gathers: int, sums: int
) -> None:
    measured = Sharding(gather_s=0.01, gather=20e9, sum_s=0.02, sum=10e9)
    where = Cluster(
        device=dataclasses.replace(DEVICE, sharding=measured, is_synchronous=True),
        hosts=1,
        devices_per_host=8,
        network=10e9,
    )
    found = step(Axes(shard=8, zero=zero), cluster=where).parts
    units = 4  # blocks: this model has nothing else
    wanted = gathers * (units * 0.01 + 4e9 * 2 / 20e9) + sums * (units * 0.02 + 4e9 * 2 / 10e9)
    assert found["data"] + found["packing"] == pytest.approx(wanted, rel=1e-3)
    assert step(Axes(replicas=8, zero=0), cluster=where).parts["packing"] == 0.0


def test_hybrid_replicas_sum_the_shards_that_they_have() -> None:
    # Two hosts of 8: within a host as before; between them each worker sums an eighth, and all eight share the network.
    within = 2 * 3 * 4e9 * 2 * 7 / 8 / 100e9
    between = 2 * (4e9 * 2 / 8) * 1 / 2 * 8 / 10e9
    assert step(Axes(replicas=2, shard=8)).parts["data"] == pytest.approx(within + between, rel=1e-3)


def test_context_parallel_passes_keys_and_values_around() -> None:
    # A worker has 25 of 100 tokens; all 100 are gathered, half of it behind attention, and twice as much in backward.
    gather = (100 * 2000 * 2 * 3 / 4 / 100e9 + 3 * IDEAL.latency) / 2
    assert step(Axes(context=4, replicas=2, zero=0)).parts["context"] == pytest.approx(4 * 2 * 3 * gather)


def test_stages_of_unequal_size_wait_for_the_largest() -> None:
    def idle(blocks: int) -> float:
        model = dataclasses.replace(MODEL, blocks=(dataclasses.replace(BLOCK, count=blocks),))
        return step(Axes(stages=4, zero=0), micro_batches=8, model=model).parts["idle"]

    # 9 blocks: three stages have 2, one has 3. Three slots of 2.25 on average, and 0.75 more in 8 micro-batches.
    assert idle(9) / idle(8) == pytest.approx((3 * 2.25 + 8 * 0.75) / (3 * 2), rel=0.02)


def test_experts_are_divided_once() -> None:
    routed = dataclasses.replace(BLOCK, experts=8, routed=2, expert_parameters=9 * 10**8)
    model = dataclasses.replace(MODEL, blocks=(routed,))
    found = step(Axes(experts=8), model=model)
    assert found.parts["optimizer"] == pytest.approx((4e8 / 8 + 36e8 / 8) * ADAM_STEP / 1e12)
