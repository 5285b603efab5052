"""What is wrong with a cluster is named with its remedy, and nothing else is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.doctor.cluster_file import cluster_toml
from paceline.doctor.findings import findings
from paceline.doctor.measured import CollectiveTime, Examination, HostPair, ShardingTime, WorkerRates
from paceline.doctor.report import report_lines
from paceline.errors import PlanError
from paceline.planner.cluster import load_catalogue
from paceline.planner.constants import built_in

HOSTS = ("a", "b", "c")


def worker(rank: int, **changed: Any) -> WorkerRates:
    one = WorkerRates(
        rank=rank,
        host=HOSTS[rank % 3],
        device="cpu",
        threads=2,
        cores=4,
        memory=16e9,
        runtime=0.3e9,
        matmul={"fp32": 1e11, "bf16": 2e11},
        memory_bandwidth=2e10,
        attention=5e10,
        launch_s=3e-6,
        disk_write=5e8,
        disk_read=1e9,
        interface="eth0",
        interface_rate=1.25e9,
        faster_interface=None,
    )
    return dataclasses.replace(one, **changed)


def pair(first: str, second: str, **changed: Any) -> HostPair:
    one = HostPair(
        first=first,
        second=second,
        address="10.0.0.9",
        latency_s=5e-5,
        bandwidth=1.1e9,
        clock_ahead_s=0.001,
        error=None,
    )
    return dataclasses.replace(one, **changed)


PAIRS = (pair("a", "b"), pair("a", "c"), pair("b", "c"))


def seen(
    workers: Sequence[WorkerRates] | None = None, pairs: Sequence[HostPair] = PAIRS, hosts: int = 3
) -> Examination:
    return Examination(
        workers=workers or [worker(rank) for rank in range(6)],
        hosts=hosts,
        pairs=pairs,
        all_reduce=[CollectiveTime(num_bytes=1 << 10, seconds=1e-4), CollectiveTime(num_bytes=1 << 26, seconds=0.1)],
        took_s=5.0,
        torch="2.13.0",
    )


def test_a_sound_cluster_has_none() -> None:
    assert findings(seen()) == []
    assert list(report_lines(seen(), []))[-1].startswith("findings none")


def test_a_precision_that_the_device_emulates_is_said_to_be_slow() -> None:
    slow = [worker(rank, matmul={"fp32": 1e11, "bf16": 2e9}) for rank in range(2)]
    lines = list(report_lines(seen(slow), []))
    assert "compute  2 GFLOP/s of bf16 matrix products: 50 times slower than fp32, so compute in fp32 here" in lines
    assert not any("slower than fp32" in line for line in report_lines(seen(), []))


@pytest.mark.parametrize(
    ("changed", "where", "what", "remedy"),
    [
        ({"matmul": {"fp32": 7e10, "bf16": 2e11}}, "worker 1 (b)", "fp32 products: 70 % of the median", "--balance"),
        ({"memory_bandwidth": 1e10}, "worker 1 (b)", "memory: 50 % of the median", "other programs"),
        ({"memory": 1e9}, "worker 1 (b)", "954 MiB of memory", "fewer workers"),
        ({"disk_write": 2e7}, "b", "takes 20 MB/s", "--run-dir"),
        ({"faster_interface": "ib0"}, "b", "over eth0, and ib0 is faster", "--head"),
        ({"interface_rate": 5e9}, "b", "1.1 GB/s over eth0, which has 5", "MTU"),
    ],
)
def test_a_worker_or_host_that_is_slow_is_named(changed: dict[str, Any], where: str, what: str, remedy: str) -> None:
    workers = [worker(rank, **(changed if rank == 1 else {})) for rank in range(3)]
    (found,) = findings(seen(workers))
    assert found.where == where
    assert what in found.what
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("changed", "where", "what", "remedy"),
    [
        ({"bandwidth": 3e8}, "b - c", "0.3 GB/s, and the median pair 1.1", "cable"),
        ({"latency_s": 4e-4}, "b - c", "400 us one way, and the median pair 50.0 us", "switches"),
        ({"clock_ahead_s": 2.0}, "c", "its clock is 2.00 s ahead of b's", "chrony"),
        ({"clock_ahead_s": -2.0}, "c", "its clock is 2.00 s behind b's", "chrony"),
        (
            {"error": "TimeoutError: timed out"},
            "b -> c",
            "10.0.0.9 cannot be reached over eth0: TimeoutError",
            "from b to c",
        ),
    ],
)
def test_a_pair_that_is_odd_is_named(changed: dict[str, Any], where: str, what: str, remedy: str) -> None:
    (found,) = findings(seen(pairs=(*PAIRS[:2], pair("b", "c", **changed))))
    assert found.where == where
    assert what in found.what
    assert remedy in found.remedy
    assert any(line.startswith(f"finding  {where}: ") for line in report_lines(seen(), [found]))


def test_a_wrong_interface_is_named_also_where_no_pair_could_be_measured() -> None:
    workers = [worker(rank, faster_interface="ib0" if rank == 1 else None) for rank in range(3)]
    pairs = [dataclasses.replace(one, bandwidth=None, latency_s=None, error="timed out") for one in PAIRS]
    found = findings(seen(workers, pairs))
    assert [one.where for one in found] == ["a -> b", "a -> c", "b -> c", "b"]
    assert "ib0 is faster" in found[-1].what


def test_the_cluster_file_is_read_back_as_the_slowest_of_all(tmp_path: Path) -> None:
    workers = [worker(0), worker(1, matmul={"fp32": 9e10, "bf16": 1.9e11}, memory=12e9), worker(2), worker(3)]
    path = tmp_path / "c.toml"
    path.write_text(
        cluster_toml(
            seen(workers, pairs=(pair("a", 'b"', bandwidth=1e9), pair("a", "c", error="x")), hosts=2),
            name="lab-1",
            when="2026-01-01",
        )
    )
    found = load_catalogue(path)
    cluster, constants = found.clusters["lab-1"], built_in().constants
    assert (cluster.hosts, cluster.devices_per_host) == (2, 2)
    assert cluster.network * constants.network == pytest.approx((1 << 26) / 0.1, rel=1e-3), "less than the pair's"
    device = cluster.device
    assert device.peak_of("fp32") * constants.matmul == pytest.approx(9e10, rel=1e-3)
    assert device.memory == pytest.approx(12e9, rel=1e-3)
    assert device.is_synchronous
    assert device.runtime == pytest.approx(0.3e9)
    assert device.latency == pytest.approx(1e-4 / 2 / (2 + 1), rel=1e-3)
    assert device.launch_s == pytest.approx(3e-6)
    assert (device.peak["bf16"] / device.watts) == pytest.approx(312e12 / 400, rel=1e-3), "no throttling is added"


def test_on_one_host_the_all_reduce_is_the_link(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(cluster_toml(seen([worker(0), worker(3)], pairs=(), hosts=1), name="here", when="2026-01-01"))
    cluster = load_catalogue(path).clusters["here"]
    assert cluster.device.link * built_in().constants.link == pytest.approx((1 << 26) / 0.1, rel=1e-3)


def test_gathers_and_waits_at_work_have_rates_of_their_own(tmp_path: Path) -> None:
    def times(small_s: float, large_s: float) -> list[CollectiveTime]:
        return [CollectiveTime(num_bytes=0, seconds=small_s), CollectiveTime(num_bytes=16_000_000, seconds=large_s)]

    one = dataclasses.replace(
        seen([worker(0), worker(3)], pairs=(), hosts=1),
        sync_wait_s=2e-4,
        gathers=times(1e-3, 9e-3),
        reduce_scatters=times(1e-3, 17e-3),
    )
    path = tmp_path / "c.toml"
    path.write_text(cluster_toml(one, name="here", when="2026-01-01"))
    device = load_catalogue(path).devices["here"]
    assert (device.gather, device.scatter) == (pytest.approx(1e9), pytest.approx(0.5e9)), "half of it reaches each"
    assert (device.gather_latency, device.sync_wait) == (pytest.approx(1e-3), pytest.approx(2e-4 * 1000**0.5))
    lines = list(report_lines(one, []))
    assert "network  9.00 ms for an all-gather of 15.3 MiB" in lines
    assert "network  200 us that workers wait for each other after 1 ms of work" in lines
    plain = dataclasses.replace(one, gathers=(), reduce_scatters=(), sync_wait_s=None)
    path.write_text(cluster_toml(plain, name="here", when="2026-01-01"))
    assert load_catalogue(path).devices["here"].gather is None


def test_what_shards_add_to_a_step_is_in_the_cluster_file(tmp_path: Path) -> None:
    small = ShardingTime(num_bytes=0, gather_s=1e-4, sum_s=0.0)
    large = ShardingTime(num_bytes=4_000_000, gather_s=4.1e-3, sum_s=8e-3)
    one = dataclasses.replace(seen([worker(0), worker(3)], pairs=(), hosts=1), sharding=(small, large))
    path = tmp_path / "c.toml"
    path.write_text(cluster_toml(one, name="here", when="2026-01-01"))
    found = load_catalogue(path).devices["here"].sharding
    assert found is not None
    assert (found.gather_s, found.gather) == (pytest.approx(1e-4), pytest.approx(1e9))
    assert (found.sum_s, found.sum) == (pytest.approx(1e-6), pytest.approx(0.5e9)), "a sum that costs nothing is 1 us"
    told = "sharding 4.10 ms to gather 3.81 MiB of a model, 8.00 ms to sum its gradients, with the copies around both"
    assert told in list(report_lines(one, []))
    path.write_text(path.read_text().replace("shard_sum_us", "# "))
    with pytest.raises(PlanError, match="shard_sum_us is missing"):
        load_catalogue(path)


def test_on_several_hosts_the_link_is_that_of_an_all_reduce_within_a_host(tmp_path: Path) -> None:
    both = dataclasses.replace(seen([worker(rank) for rank in range(4)], hosts=2), host_link=7e9)
    path = tmp_path / "c.toml"
    path.write_text(cluster_toml(both, name="lab", when="2026-01-01"))
    cluster = load_catalogue(path).clusters["lab"]
    assert cluster.device.link * built_in().constants.link == pytest.approx(7e9, rel=1e-3)
    assert "network  7 GB/s of each worker's link within a host (busbw)" in list(report_lines(both, []))
