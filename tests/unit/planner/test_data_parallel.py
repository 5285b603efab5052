"""What replicas exchange, as each sync and wire does it: who wins on which network, and what is paid how often."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.plan import (
    AllReduce,
    Batch,
    Cast,
    Compute,
    Gossip,
    Int8,
    Layout,
    LocalSGD,
    Nesterov,
    OneBit,
    ParameterServer,
    Plan,
    PowerSGD,
    Raw,
    Sync,
    TopK,
    Wire,
)
from paceline.planner.cluster import Cluster, catalogue
from paceline.planner.collectives import sum_s
from paceline.planner.constants import Constants
from paceline.planner.data_parallel import sent_bytes
from paceline.planner.memory import predict_memory
from paceline.planner.model_costs import transformer
from paceline.planner.plan_case import case_of
from paceline.planner.predict import Prediction, Workload

GPT = transformer(layers=24, hidden=2048, heads=16, sequence=1024, vocabulary=32000)
H100 = catalogue().device("h100")
CPU = dataclasses.replace(H100, name="cpu", is_synchronous=True, latency=1e-9)


def cluster(network: float = 400e9, *, hosts: int = 16, per_host: int = 1, on_cpu: bool = False) -> Cluster:
    return Cluster(device=CPU if on_cpu else H100, hosts=hosts, devices_per_host=per_host, network=network)


def plan(sync: Sync | None = None, wire: Wire | None = None, layout: Layout | None = None) -> Plan:
    return Plan(
        layout=layout or Layout(replicas=16),
        batch=Batch(size=256, micro=4),
        compute=Compute(precision="bf16"),
        sync=sync or AllReduce(),
        wire=wire or Raw(),
    )


def predicted(one: Plan, where: Cluster, workers: int = 16) -> Prediction:
    return Workload(case_of(one, GPT, where, workers=workers)).predict(Constants())


@pytest.mark.parametrize("wire", [Cast(dtype="bf16"), Int8(), PowerSGD(rank=4), TopK(ratio=0.01), OneBit()], ids=str)
def test_wires_win_on_a_slow_network_and_cost_their_coding_on_a_fast_one(wire: Wire) -> None:
    slow, fast = cluster(1e9), cluster(400e9, hosts=2, per_host=8)
    assert predicted(plan(wire=wire), slow).step_s < predicted(plan(), slow).step_s
    found = predicted(plan(wire=wire), fast)
    assert found.parts["coding"] > 0 == predicted(plan(), fast).parts["coding"]
    if wire.feedback:
        assert found.step_s > predicted(plan(), fast).step_s


def test_half_of_the_bytes_take_half_of_the_time_where_nothing_is_hidden() -> None:
    where = cluster(1e9, on_cpu=True)
    raw, cast = (predicted(plan(wire=wire), where).parts["data"] for wire in (Raw(), Cast(dtype="bf16")))
    assert cast == pytest.approx(raw / 2, rel=1e-3)


def test_a_wire_is_for_what_travels_between_replicas_and_not_within() -> None:
    where, inside = cluster(hosts=1, per_host=16), Layout(shard=16)
    raw, cast = (predicted(plan(wire=wire, layout=inside), where) for wire in (Raw(), Cast(dtype="bf16")))
    assert cast == raw
    assert sent_bytes(case_of(plan(layout=inside), GPT, where, workers=16)) == 0


@pytest.mark.parametrize("every", [2, 8, 64])
@pytest.mark.parametrize("wire", [Raw(), Int8()], ids=str)
def test_local_sgd_pays_the_exchange_once_in_so_many_steps(every: int, wire: Wire) -> None:
    where = cluster(1e9, on_cpu=True)
    each, rare = (predicted(plan(sync=sync, wire=wire), where) for sync in (AllReduce(), LocalSGD(every=every)))
    assert rare.parts["data"] == pytest.approx(each.parts["data"] / every)
    cases = [
        case_of(plan(sync=sync, wire=wire), GPT, where, workers=16) for sync in (AllReduce(), LocalSGD(every=every))
    ]
    assert sent_bytes(cases[1]) == pytest.approx(sent_bytes(cases[0]) / every)


def test_shards_of_a_replica_are_summed_in_each_step_of_local_sgd() -> None:
    layout = Layout(replicas=2, shard=8, zero=1)
    where = cluster(1e9, hosts=2, per_host=8, on_cpu=True)
    rare = predicted(plan(sync=LocalSGD(every=10**6), layout=layout), where)
    alone = predicted(plan(layout=Layout(shard=8, zero=1)), cluster(1e9, hosts=1, per_host=8, on_cpu=True), workers=8)
    assert rare.parts["data"] == pytest.approx(alone.parts["data"], rel=0.05)


def test_what_travels_behind_steps_is_hidden_behind_them() -> None:
    where = cluster(5e9)
    at_once = predicted(plan(sync=LocalSGD(every=8)), where).parts["data"]
    behind = predicted(plan(sync=LocalSGD(every=8, fragments=4, overlap=2)), where).parts["data"]
    assert 0 < behind < 0.7 * at_once


def test_gossip_sends_weights_to_as_many_whatever_the_number_of_replicas() -> None:
    sizes = [
        sent_bytes(case_of(plan(Gossip(average_every=1 << 20), layout=Layout(replicas=n)), GPT, cluster(), workers=n))
        for n in (4, 8, 16)
    ]
    assert sizes == pytest.approx([2 * 4 * GPT.parameters] * 3, rel=1e-4)
    ring, drawn = (predicted(plan(Gossip(peers=peers)), cluster(1e9)).step_s for peers in ("ring", "random"))
    assert drawn < ring < predicted(plan(), cluster(1e9)).step_s * 1.1


# Parameter servers.


def test_more_servers_share_the_bytes() -> None:
    where = cluster(1e9, on_cpu=True)
    times = [predicted(plan(ParameterServer(servers=n)), where).parts["data"] for n in (1, 2, 4, 16)]
    assert times == sorted(times, reverse=True)
    # One server's link gets the gradients of 15 other hosts, and sends them as many weights.
    assert times[0] == pytest.approx(2 * 15 * 4 * GPT.parameters / (1e9 * Constants().network), rel=0.01)
    mirrored = predicted(plan(ParameterServer(mirrored=True)), where).parts["data"]
    assert times[0] < mirrored < 1.1 * times[0]


def test_replicas_that_do_not_wait_give_as_many_updates_as_they_are_until_servers_are_full() -> None:
    layout = Layout(replicas=4)
    where = cluster(1e12, hosts=4, on_cpu=True)
    alone = predicted(plan(layout=Layout(replicas=1)), cluster(1e12, hosts=1, on_cpu=True), workers=1)
    apart = predicted(plan(ParameterServer(staleness=None), layout=layout), where, workers=4)
    assert apart.step_s == pytest.approx(alone.step_s / 4, rel=0.05)
    assert apart.tokens_per_s == pytest.approx(256 * 1024 / apart.step_s)
    assert sum(apart.parts.values()) == pytest.approx(apart.step_s)
    slow = dataclasses.replace(where, network=1e8)
    full = predicted(plan(ParameterServer(staleness=None), layout=layout), slow, workers=4)
    each = 3 / 4 * 2 * 4 * GPT.parameters / (1e8 * Constants().network)  # of the four, one is on the server's host
    assert full.step_s == pytest.approx(each, rel=0.1)


# Algorithms.


def test_algorithms_differ_by_rounds_and_by_what_crosses_hosts() -> None:
    where, constants = cluster(10e9, hosts=4, per_host=8), Constants()

    def taken(algorithm: str, num_bytes: float) -> float:
        return sum_s(num_bytes, 32, 8, where, constants, algorithm=algorithm)

    small = {name: taken(name, 1e3) for name in ("ring", "tree", "halving", "hierarchical")}
    assert small["ring"] / constants.latency == pytest.approx(2 * 31, rel=1e-3)
    assert small["halving"] / constants.latency == pytest.approx(2 * 5, rel=1e-2)
    large = {name: taken(name, 1e10) for name in ("ring", "tree", "halving", "hierarchical", "auto")}
    # A host's network carries 2 (h - 1) / h tensors, where hosts sum first; 8 times as many where each worker crosses.
    assert large["hierarchical"] == pytest.approx(1.5 * 1e10 / (10e9 * constants.network), rel=0.01)
    assert large["halving"] == pytest.approx(8 * large["hierarchical"], rel=0.01)
    assert large["auto"] == pytest.approx(large["hierarchical"], rel=0.01) == min(large.values())
    assert sum_s(1e3, 512, 8, where, constants, algorithm="ring") == pytest.approx(
        2 * 511 * constants.latency, rel=1e-3
    )


# Memory.


@pytest.mark.parametrize(
    ("sync", "wire", "each"),
    [
        (AllReduce(), Raw(), 0),
        (AllReduce(), Cast(dtype="bf16"), 0),
        (AllReduce(), OneBit(), 8),
        (LocalSGD(every=8), Raw(), 8),
        (LocalSGD(every=8, outer=Nesterov()), Raw(), 12),
        (LocalSGD(every=8, outer=Nesterov()), Int8(), 20),
        (LocalSGD(every=8, fragments=4, overlap=1, keep_moves=True), Raw(), 9),
        (AllReduce(op="adasum"), Raw(), 4 + 4 / 16),
    ],
    ids=str,
)
def test_what_sync_and_wire_keep(sync: Sync, wire: Wire, each: float) -> None:
    case = case_of(plan(sync, wire), GPT, cluster(), workers=16)
    assert predict_memory(case).parts["agreement"] == pytest.approx(each * GPT.parameters)


def test_servers_keep_the_optimizer() -> None:
    where = cluster(on_cpu=True)
    own, served = (predict_memory(case_of(plan(sync), GPT, where, workers=16)) for sync in (None, ParameterServer()))
    assert own.parts["state"] - served.parts["state"] == pytest.approx(8 * GPT.parameters)
