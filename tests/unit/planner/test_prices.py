"""Matrix products and collectives, by numbers that one can follow."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.planner.cluster import Cluster, catalogue
from paceline.planner.collectives import exchange_s, gather_s
from paceline.planner.constants import Constants
from paceline.planner.matmul import fill, products
from paceline.planner.model_costs import Matmul

IDEAL = Constants(link=1.0, network=1.0, latency=1e-6)


def test_a_result_of_whole_waves_fills_the_device() -> None:
    assert fill(256 * 4, 128 * 33, 132) == 1.0


def test_one_column_of_tiles_more_costs_a_wave_or_smaller_tiles() -> None:
    # 4 x 34 tiles of 256 x 128 would need two waves of 132; 8 x 68 of 128 x 64 need five, and fill them better.
    assert fill(256 * 4, 128 * 34, 132) == pytest.approx(0.85 * 544 / (5 * 132))
    assert fill(1.0, 1.0, 108) < 0.001


def test_backward_is_twice_forward_where_everything_is_full() -> None:
    forward, backward = products(1 << 20, (Matmul(inputs=1 << 14, outputs=1 << 14),), 1, 1)
    assert forward.whole == pytest.approx(2.0 * (1 << 48))
    assert backward.whole == pytest.approx(2 * forward.whole)
    assert forward.flops(100.0) == pytest.approx(forward.whole * (1 + 100 / (1 << 14)))


def test_tensor_parallel_divides_what_is_split() -> None:
    layers = (Matmul(inputs=4096, outputs=16384, split="outputs"), Matmul(inputs=16384, outputs=4096, split="inputs"))
    whole, _ = products(1 << 16, layers, 1, 1)
    part, _ = products(1 << 16, layers, 4, 1)
    assert part.whole == pytest.approx(whole.whole / 4)


def cluster(hosts: int, per_host: int = 8) -> Cluster:
    device = dataclasses.replace(catalogue().device("h100"), link=400e9)
    return Cluster(device=device, hosts=hosts, devices_per_host=per_host, network=100e9)


def test_a_gather_within_a_host_moves_what_each_lacks() -> None:
    assert gather_s(8e9, 8, 8, cluster(1), IDEAL) == pytest.approx(7e9 / 400e9, rel=1e-3)
    assert gather_s(8e9, 1, 1, cluster(1), IDEAL) == 0.0


def test_gathers_may_have_rates_of_their_own() -> None:
    here = cluster(1)
    device = dataclasses.replace(here.device, gather=10e9, scatter=5e9, gather_latency=0.5)
    own = dataclasses.replace(here, device=device)
    assert gather_s(8e9, 8, 8, own, IDEAL, of="gather") == pytest.approx(7e9 / 10e9 + 0.5, rel=1e-3)
    assert gather_s(8e9, 8, 8, own, IDEAL, of="scatter") == pytest.approx(7e9 / 5e9 + 0.5, rel=1e-3)
    assert gather_s(8e9, 8, 8, own, IDEAL) == gather_s(8e9, 8, 8, here, IDEAL), "an all-reduce has not"
    assert gather_s(8e9, 8, 8, here, IDEAL, of="gather") == gather_s(8e9, 8, 8, here, IDEAL)


def test_between_hosts_the_network_sets_the_pace() -> None:
    # 32 workers on 4 hosts, 8 together: each host lacks 3/4, once.
    assert gather_s(8e9, 32, 8, cluster(4), IDEAL) == pytest.approx(6e9 / 100e9, rel=1e-3)
    # Groups of one worker of each host: eight of them share a host's network.
    assert gather_s(8e9, 4, 1, cluster(4), IDEAL) == pytest.approx(8 * 6e9 / 100e9, rel=1e-3)


def test_an_exchange_sends_what_belongs_to_others() -> None:
    assert exchange_s(1e9, 8, 8, cluster(1), IDEAL) == pytest.approx(1e9 * 7 / 8 / 400e9, rel=1e-2)
    assert exchange_s(1e9, 16, 8, cluster(2), IDEAL) == pytest.approx(1e9 / 2 * 8 / 100e9, rel=1e-2)
    assert exchange_s(1e9, 1, 1, cluster(1), IDEAL) == 0.0
