"""Offload: what leaves the device, what the link takes, and where it is of no use."""

from __future__ import annotations

import dataclasses
import math

import pytest

from paceline.errors import PlanError
from paceline.plan import Batch, Compute, Layout, Plan
from paceline.planner.cluster import Cluster, catalogue
from paceline.planner.constants import Constants
from paceline.planner.memory import predict_memory, verdict
from paceline.planner.model_costs import transformer
from paceline.planner.offloading import HOST_OPTIMIZER_BYTES, PIECES
from paceline.planner.plan_case import case_of
from paceline.planner.predict import Prediction, Workload

GPT = transformer(layers=24, hidden=2048, heads=16, sequence=1024, vocabulary=32000)
ADAM = 8 * GPT.parameters  # two numbers of 4 bytes
SLOW = dataclasses.replace(catalogue().device("a100"), host_link=25e9)


def cluster(**changes: float) -> Cluster:
    return dataclasses.replace(Cluster.of(SLOW, 1, devices_per_host=1), **changes)


def plan(offload: str = "none", path: str | None = None, *, shard: int = 1) -> Plan:
    compute = Compute(precision="bf16", offload=offload, offload_path=path)  # pyright: ignore[reportArgumentType]
    return Plan(layout=Layout(shard=shard), batch=Batch(size=32, micro=4), compute=compute)


def predicted(one: Plan, where: Cluster, workers: int = 1) -> Prediction:
    return Workload(case_of(one, GPT, where, workers=workers)).predict(Constants())


def test_the_optimizers_bytes_leave_the_device_and_cross_the_link_twice() -> None:
    where = cluster()
    before, after = (predict_memory(case_of(plan(one), GPT, where, workers=1)) for one in ("none", "optimizer"))
    assert before.parts["state"] - after.parts["state"] == pytest.approx(ADAM)
    assert after.parts["working"] - before.parts["working"] == pytest.approx(PIECES) == 2 * (16 << 20)
    assert (before.elsewhere, after.elsewhere) == (0, pytest.approx(ADAM))
    plain, moved = (predicted(plan(one), where) for one in ("none", "optimizer"))
    assert moved.parts["offload"] == pytest.approx(2 * ADAM / 25e9)
    assert moved.step_s - plain.step_s == pytest.approx(2 * ADAM / 25e9)


def test_shards_move_their_rows_and_share_the_hosts_memory() -> None:
    where = Cluster.of(SLOW, 8, devices_per_host=8)
    moved = predicted(plan("optimizer", shard=8), where, 8).parts["offload"]
    assert moved == pytest.approx(2 * ADAM / 8 / 25e9)
    narrow = dataclasses.replace(where, host_memory_bandwidth=100e9)
    assert predicted(plan("optimizer", shard=8), narrow, 8).parts["offload"] == pytest.approx(2 * moved)


def test_files_take_the_disks_time() -> None:
    moved = predicted(plan("optimizer", "/disk"), cluster(disk=2e9)).parts["offload"]
    assert moved == pytest.approx(2 * ADAM / 2e9)


def test_with_all_elsewhere_only_units_are_on_the_device_and_the_host_steps() -> None:
    where = cluster()
    case = case_of(plan("all"), GPT, where, workers=1)
    found = predict_memory(case)
    assert found.parts["state"] == 0
    assert found.elsewhere == pytest.approx(16 * GPT.parameters)
    step = predicted(plan("all"), where)
    assert step.parts["optimizer"] == pytest.approx(GPT.parameters * HOST_OPTIMIZER_BYTES / where.host_memory_bandwidth)
    crossing = 8 * 2 * 4 * GPT.parameters / 25e9  # parameters in both passes of 8 micro-batches
    assert 0 < step.parts["offload"] < crossing, "a part is behind compute"
    slow = dataclasses.replace(where, device=dataclasses.replace(SLOW, host_link=1e8))
    assert predicted(plan("all"), slow).parts["offload"] == pytest.approx(8 * 2 * 4 * GPT.parameters / 1e8, rel=0.05)


def test_the_whole_model_is_on_the_device_once() -> None:
    deep = transformer(layers=96, hidden=2048, heads=16, sequence=128, vocabulary=32000)
    one = dataclasses.replace(plan("all"), batch=Batch(size=1, micro=1))
    case = case_of(one, deep, cluster(), workers=1)
    found = predict_memory(case)
    assert found.peak == pytest.approx(4 * deep.parameters + SLOW.runtime)


def test_what_the_host_cannot_hold_does_not_fit() -> None:
    def answer(host_memory: float) -> str:
        case = case_of(plan("optimizer"), GPT, cluster(host_memory=host_memory), workers=1)
        return verdict(case, predict_memory(case), half_width=0.1)

    assert answer(ADAM * math.exp(0.21)) == "fits"
    assert answer(ADAM) == "unsure"
    assert answer(ADAM * math.exp(-0.11)) == "does not fit"


@pytest.mark.parametrize(("offload", "path"), [("optimizer", None), ("all", None), ("all", "/disk")])
def test_on_a_cpu_only_files_gain_anything(offload: str, path: str | None) -> None:
    where = dataclasses.replace(cluster(), device=dataclasses.replace(SLOW, is_synchronous=True))
    with pytest.raises(PlanError, match="nothing would be gained"):
        case_of(plan(offload, path), GPT, where, workers=1)
    moved = predicted(plan("optimizer", "/disk"), where).parts["offload"]
    assert moved == pytest.approx(2 * ADAM / where.disk)


def test_state_in_bf16_is_half_of_what_the_optimizer_keeps() -> None:
    kept = [Plan(batch=Batch(size=32, micro=4), compute=Compute(state=one)) for one in ("fp32", "bf16")]
    exact, rounded = (case_of(one, GPT, cluster(), workers=1) for one in kept)
    whole, half = (predict_memory(one).parts["state"] for one in (exact, rounded))
    assert whole - half == pytest.approx(ADAM / 2)
    assert predicted(kept[1], cluster()).parts["optimizer"] < predicted(kept[0], cluster()).parts["optimizer"]


def test_parameters_that_owners_step_cost_an_exchange_along_each_axis_that_splits_them() -> None:
    matrices = dataclasses.replace(GPT, stepped_whole=1.0)
    where = dataclasses.replace(Cluster.of(SLOW, 4, devices_per_host=4))
    for layout, is_split in ((Layout(replicas=4), False), (Layout(shard=4), True), (Layout(shard=2, tensor=2), True)):
        one = Plan(layout=layout, batch=Batch(size=32, micro=4))
        plain, whole = (
            Workload(case_of(one, costs, where, workers=4)).predict(Constants()).parts["data"]
            for costs in (GPT, matrices)
        )
        assert (whole > plain) is is_split, layout
