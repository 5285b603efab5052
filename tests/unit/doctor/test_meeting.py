"""Workers that have not joined their run meet through its store, and hosts that cannot be reached are named."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.doctor import examine, host_pairs, storage
from paceline.doctor.cluster_file import cluster_toml
from paceline.doctor.findings import findings
from paceline.doctor.meeting import StoreMeeting, store_meeting
from paceline.doctor.report import report_lines
from paceline.plan.job import Assignment, Job
from paceline.planner.cluster import load_catalogue

HOSTS = ("a", "b", "c")


def assignment(rank: int, folder: Path, *, channel_fd: int = -1, hosts: int = 3) -> Assignment:
    return Assignment(
        rank=rank,
        workers=hosts,
        local_rank=0,
        local_workers=1,
        host=HOSTS[rank],
        host_index=rank,
        hosts=hosts,
        address=f"127.0.0.{rank + 1}",
        run_dir=str(folder),
        attempt=1,
        worker_dir=str(folder),
        channel_fd=channel_fd,
        command_started=0.0,
        job=Job(program="x.py"),
    )


def met(store: dist.Store, rank: int) -> StoreMeeting:
    return StoreMeeting(store, prefix="doctor", rank=rank, workers=len(HOSTS))


def test_values_come_in_the_order_of_ranks_and_calls_do_not_mix() -> None:
    store = dist.HashStore()

    def values(rank: int) -> list[list[Any]]:
        meeting = met(store, rank)
        first = meeting.gather({"rank": rank})
        meeting.wait()
        return [first, meeting.gather(rank * 10)]

    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(values, (2, 0, 1)):
            assert found == [[{"rank": 0}, {"rank": 1}, {"rank": 2}], [0, 10, 20]]


def test_without_a_store_or_with_one_host_there_is_no_meeting(tmp_path: Path) -> None:
    for own in (assignment(0, tmp_path), assignment(0, tmp_path, channel_fd=3, hosts=1)):
        with store_meeting(own) as meeting:
            assert meeting is None


@pytest.mark.thorough
def test_a_host_that_refuses_is_named_with_its_address_and_the_rest_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_pairs, "LIMIT_S", 0.3)
    monkeypatch.setattr(storage, "SYNCED", storage.PIECE)
    for name in ("memory_bandwidth", "attention_rate", "launch_s"):  # a device's own rates are not at issue
        monkeypatch.setattr(examine, name, lambda device, seconds: 1e10)
    monkeypatch.setattr(examine, "matmul_rates", lambda device, seconds: {"fp32": 1e11, "bf16": 1e11})

    class OneIsClosed(host_pairs.HostEnd):
        """Nobody listens on c."""

        def __init__(self, name: str, address: str, secret: bytes) -> None:
            super().__init__(name, address, secret)
            if name == "c":
                self.close()

    monkeypatch.setattr(examine, "HostEnd", OneIsClosed)
    store = dist.HashStore()

    def examined(rank: int) -> Any:
        own, meeting = assignment(rank, tmp_path / HOSTS[rank]), met(store, rank)
        Path(own.worker_dir).mkdir()
        pairs = examine.host_pairs(meeting, own, seconds=0.01)
        return examine.examine_apart(meeting, own, torch.device("cpu"), seconds=0.01, pairs=pairs)

    with ThreadPoolExecutor(3) as pool:
        seen, *others = pool.map(examined, range(3))
    assert [one.pairs for one in others] == [seen.pairs] * 2, "all have the same"
    by_hosts = {(pair.first, pair.second): pair for pair in seen.pairs}
    assert by_hosts["a", "b"].error is None
    assert (by_hosts["a", "b"].bandwidth or 0.0) > 1e6
    named = [one for one in findings(seen) if "cannot be reached" in one.what]
    assert sorted(one.where for one in named) == ["a -> c", "b -> c"]
    assert all(one.what.startswith("127.0.0.3 cannot be reached") and "Refused" in one.what for one in named)
    assert "over lo: " in next(one.what for one in named if one.where == "a -> c"), "127.0.0.1 is its address"
    assert all("Open all TCP ports from" in one.remedy for one in named)
    assert any("no all-reduce was measured" in line for line in report_lines(seen, named))
    path = tmp_path / "c.toml"
    path.write_text(cluster_toml(seen, name="lab", when="2026-01-01"))
    cluster = load_catalogue(path).clusters["lab"]
    assert (cluster.hosts, cluster.devices_per_host) == (3, 1)
    assert path.read_text().count("error = ") == 2
