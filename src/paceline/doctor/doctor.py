"""The program that `paceline doctor` has a run's workers execute: all measure at once, and worker 0 reports.

It is a script like any other, so it runs wherever scripts do: on one machine, over SSH, on Slurm, Kubernetes and Ray.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import secrets
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import paceline
from paceline import clock
from paceline.doctor.cluster_file import cluster_toml
from paceline.doctor.findings import ClusterFinding, findings
from paceline.doctor.host_pairs import HostEnd, interface_of, rounds
from paceline.doctor.measured import CollectiveTime, Examination, HostPair, ScriptReading, WorkerRates
from paceline.doctor.rates import attention_rate, launch_s, matmul_rates, memory_bandwidth, train_once
from paceline.doctor.report import reading_lines, report_lines
from paceline.doctor.script_findings import reading_findings
from paceline.doctor.script_reading import AskedScript, read_script
from paceline.doctor.storage import disk_rates
from paceline.host_memory import memory_limit_bytes
from paceline.plan import CommandPlan
from paceline.worker.run_member import parts_of
from paceline.worker.topology.device import peak_memory_bytes

__all__ = ["CLUSTER_FILE", "examine"]

CLUSTER_FILE, RECORD_FILE = "cluster.toml", "examination.json"
ENGINE_FILE = "engine.json"  # of a run's directory, where an engine's job was submitted
ENDS = "# end of the cluster file"  # on the console
SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26)  # bytes of an all-reduce
REPEATS = 7


def main() -> None:
    """Be one worker of the examination; the arguments are those that `paceline doctor` gives."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--name", default="")
    parser.add_argument("--tell", action="store_true")
    parser.add_argument("--script", type=Path)
    parser.add_argument("--plan", type=json.loads)
    words, args = _split(sys.argv[1:])
    given = parser.parse_args(words)
    asked = None
    if given.script is not None:
        asked = AskedScript(path=given.script, plan=CommandPlan.from_table(given.plan), args=args)
    paceline.run(
        lambda worker: report(worker, seconds=given.seconds, name=given.name, tells=given.tell, asked=asked),
        save_every_s=0,
    )


def _split(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Our own words, and those of the script, behind "--"."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def report(
    worker: paceline.Worker, *, seconds: float, name: str, tells: bool = False, asked: AskedScript | None = None
) -> None:
    """Measure; worker 0 prints what was found, and writes the cluster file and all numbers into the run's directory.

    `tells`: print the cluster file, too, where this directory is not the one of the submitting machine. `asked`: then
    measure how fast this script's data comes.
    """
    seen = examine(worker, seconds=seconds)
    run_dir = parts_of(worker).files.run_dir
    path = run_dir / CLUSTER_FILE
    found = findings(seen)
    if worker.is_first:
        when = datetime.datetime.fromtimestamp(clock.now(), tz=datetime.UTC).date().isoformat()
        text = cluster_toml(seen, name=name or seen.workers[0].host, when=when)
        path.write_text(text, encoding="utf-8")
        _record(run_dir, seen, found, None)
        print(*report_lines(seen, found), sep="\n", flush=True)
        if tells and not (run_dir / ENGINE_FILE).exists():
            print(f"{text}{ENDS}", flush=True)
    if asked is None:
        return
    reading = read_script(worker, asked, cluster=path, seconds=seconds)
    if worker.is_first:
        more = reading_findings(reading, seen)
        _record(run_dir, seen, [*found, *more], reading)
        print(*reading_lines(reading, more), sep="\n", flush=True)


def _record(run_dir: Path, seen: Examination, found: Sequence[ClusterFinding], reading: ScriptReading | None) -> None:
    """Keep all that was measured as JSON."""
    record = {
        "examination": dataclasses.asdict(seen),
        "script": None if reading is None else dataclasses.asdict(reading),
        "findings": [dataclasses.asdict(one) for one in found],
    }
    (run_dir / RECORD_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


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
        cores=len(os.sched_getaffinity(0)),
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


if __name__ == "__main__":
    main()
