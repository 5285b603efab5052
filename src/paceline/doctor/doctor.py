"""The program that `paceline doctor` has a run's workers execute: all measure at once, and worker 0 reports.

It is a script like any other, so it runs wherever scripts do: on one machine, over SSH, on Slurm, Kubernetes and Ray.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import secrets
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

import paceline
from paceline import clock
from paceline.doctor.cluster_file import cluster_toml
from paceline.doctor.findings import ClusterFinding, findings
from paceline.doctor.host_pairs import HostEnd, interface_of, rounds
from paceline.doctor.measured import CollectiveTime, Examination, HostPair, WorkerRates
from paceline.doctor.rates import attention_rate, launch_s, matmul_rates, memory_bandwidth, train_once
from paceline.doctor.storage import disk_rates
from paceline.host_memory import memory_limit_bytes
from paceline.units import bytes_text, duration_text, gigabytes_text
from paceline.worker.run_member import parts_of
from paceline.worker.topology.device import peak_memory_bytes

__all__ = ["CLUSTER_FILE", "examine", "report_lines"]

CLUSTER_FILE = "cluster.toml"
SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26)  # bytes of an all-reduce
REPEATS = 7


def main() -> None:
    """Be one worker of the examination; the arguments are those that `paceline doctor` gives."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--name", default="")
    given = parser.parse_args()
    paceline.run(lambda worker: report(worker, seconds=given.seconds, name=given.name), save_every_s=0)


def report(worker: paceline.Worker, *, seconds: float, name: str) -> None:
    """Measure; worker 0 prints what was found, and writes the cluster file into the run's directory."""
    seen = examine(worker, seconds=seconds)
    if not worker.is_first:
        return
    when = datetime.datetime.fromtimestamp(clock.now(), tz=datetime.UTC).date().isoformat()
    text = cluster_toml(seen, name=name or seen.workers[0].host, when=when)
    path = parts_of(worker).files.run_dir / CLUSTER_FILE
    path.write_text(text, encoding="utf-8")
    print(*report_lines(seen, findings(seen)), sep="\n", flush=True)


def examine(worker: paceline.Worker, *, seconds: float) -> Examination:
    """Measure with all workers of a run; `seconds` is the length of each single test. All return the same."""
    began = time.monotonic()
    assignment = parts_of(worker).files.assignment
    device = worker.device
    train_once(device)
    runtime = float(peak_memory_bytes(device))
    worker.wait()
    matmul = matmul_rates(device, seconds=seconds)
    worker.wait()
    bandwidth = memory_bandwidth(device, seconds=seconds)
    worker.wait()
    attention = attention_rate(device, seconds=seconds)
    worker.wait()
    launch = launch_s(device, seconds=seconds / 2)
    collectives = _all_reduces(worker)
    disk = (0.0, 0.0)
    if assignment.local_rank == 0:
        disk = disk_rates(Path(assignment.worker_dir), name="doctor.disk", seconds=seconds)
    interface, rate, faster = interface_of(assignment.address)
    own = WorkerRates(
        rank=worker.rank,
        host=assignment.host,
        device=device.type if device.type == "cpu" else torch.cuda.get_device_name(device),
        threads=torch.get_num_threads(),
        memory=_memory(device, assignment.local_workers),
        runtime=runtime,
        matmul=matmul,
        memory_bandwidth=bandwidth,
        attention=attention,
        launch_s=launch,
        disk_write=disk[0],
        disk_read=disk[1],
        interface=interface,
        interface_rate=rate,
        faster_interface=faster,
    )
    gathered = worker.gather((assignment.host_index, assignment.local_rank, own))
    disks = {host: (one.disk_write, one.disk_read) for host, local, one in gathered if local == 0}
    workers = [
        dataclasses.replace(one, disk_write=disks[host][0], disk_read=disks[host][1]) for host, _, one in gathered
    ]
    pairs = _host_pairs(worker, seconds=seconds) if assignment.hosts > 1 else []
    return Examination(
        workers=workers,
        hosts=assignment.hosts,
        pairs=pairs,
        all_reduce=collectives,
        took_s=time.monotonic() - began,
        torch=torch.__version__,
    )


def _all_reduces(worker: paceline.Worker) -> list[CollectiveTime]:
    """All-reduces of the run's own group, as its gradients take them."""
    if worker.workers == 1:
        return []
    found: list[CollectiveTime] = []
    for num_bytes in SIZES:
        tensor = torch.ones(num_bytes // 4, device=worker.device)
        times: list[float] = []
        for _ in range(REPEATS):
            worker.wait()
            started = time.perf_counter()
            parts_of(worker).place.group.all_reduce(tensor, what="doctor").wait()
            if worker.device.type != "cpu":
                torch.cuda.synchronize(worker.device)
            times.append(time.perf_counter() - started)
            tensor.fill_(1.0)
        slowest = max(worker.gather(statistics.median(times[1:])))
        found.append(CollectiveTime(num_bytes=num_bytes, seconds=slowest))
    return found


def _host_pairs(worker: paceline.Worker, *, seconds: float) -> list[HostPair]:
    """Each pair of hosts once, by the first worker of each host; the others wait."""
    assignment = parts_of(worker).files.assignment
    secret = worker.gather(secrets.token_bytes(32) if worker.is_first else b"")[0]
    speaks = assignment.local_rank == 0
    end = HostEnd(assignment.host, assignment.address, secret) if speaks else None
    try:
        told = (assignment.host_index, assignment.host, assignment.address, end.port) if end is not None else None
        ends = {one[0]: one[1:] for one in worker.gather(told) if one is not None}
        order = sorted(ends)
        found: list[HostPair] = []
        for pairs in rounds(len(order)):
            for first, second in ((order[a], order[b]) for a, b in pairs):
                if end is not None and assignment.host_index == first:
                    found.append(end.measure(*ends[second], seconds=seconds))
                elif end is not None and assignment.host_index == second:
                    end.answer()
            worker.wait()
    finally:
        if end is not None:
            end.close()
    return [pair for part in worker.gather(found) for pair in part]


def _memory(device: torch.device, local_workers: int) -> float:
    if device.type != "cpu":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(memory_limit_bytes() or 0) / local_workers


def report_lines(seen: Examination, found: Sequence[ClusterFinding]) -> Iterator[str]:
    """The examination in words, what is wrong at the end."""
    hosts = dict.fromkeys(one.host for one in seen.workers)
    yield (
        f"examined {len(seen.workers)} {'worker' if len(seen.workers) == 1 else 'workers'} on "
        f"{', '.join(list(hosts)[:8])}{' ...' if len(hosts) > 8 else ''}, all at once, in {duration_text(seen.took_s)}"
    )
    kinds = ", ".join(dict.fromkeys(one.device for one in seen.workers))
    yield f"devices  {kinds}, {gigabytes_text(min(one.memory for one in seen.workers))} GB for each worker"
    for name in seen.workers[0].matmul:
        rates = [one.matmul[name] for one in seen.workers]
        yield f"compute  {_span(rates, 1e9, 'GFLOP/s')} of {name} matrix products"
    yield f"compute  {_span([one.attention for one in seen.workers], 1e9, 'GFLOP/s')} of fused attention"
    yield f"memory   {_span([one.memory_bandwidth for one in seen.workers], 1e9, 'GB/s')} read and written"
    yield f"launch   {_span([one.launch_s for one in seen.workers], 1e-6, 'us')} for a small operation"
    for one in seen.all_reduce:
        yield f"network  {duration_text(one.seconds)} for an all-reduce of {bytes_text(one.num_bytes)}"
    if seen.bus_bandwidth is not None:
        yield f"network  {seen.bus_bandwidth / 1e9:.3g} GB/s of each worker's link in the largest (busbw)"
    rates = [pair.bandwidth for pair in seen.pairs if pair.bandwidth is not None]
    if rates:
        delays = [pair.latency_s or 0.0 for pair in seen.pairs if pair.error is None]
        yield (
            f"hosts    {_span(rates, 1e9, 'GB/s')}, {_span(delays, 1e-6, 'us')} one way over TCP, {len(rates)} "
            f"{'pair' if len(rates) == 1 else 'pairs'}"
        )
    disks = [one for one in seen.workers if one.disk_write]
    if disks:
        yield (
            f"disk     {_span([one.disk_write for one in disks], 1e6, 'MB/s')} written, "
            f"{_span([one.disk_read for one in disks], 1e6, 'MB/s')} read"
        )
    if not found:
        yield "findings none: nothing is slower than it should be"
    for one in found:
        yield f"finding  {one.where}: {one.what}"
        yield f"         {one.remedy}"


def _span(values: Sequence[float], unit: float, name: str) -> str:
    low, high = (
        f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}" for value in (min(values) / unit, max(values) / unit)
    )
    return f"{low} {name}" if max(values) < 1.05 * min(values) else f"{low} to {high} {name}"


if __name__ == "__main__":
    main()
