"""All-reduce between hosts: every algorithm beside gloo's own, and beside what the cost model says.

    python benchmarks/allreduce_network.py [--workers 4] [--link gigabit|far] [--rounds 3] [--largest MIB]

The hosts are network namespaces, with one worker of one thread on each: on cables of 1 Gbit/s ("gigabit"), or with
20 ms from one to the other ("far", where sizes beyond 64 KB measure the pretended switch). First the link is measured:
its latency by single messages of gloo's, its rate by a plain TCP stream. The ways take turns within every round, and
the table gives medians; "told" is the model's number for the measured link. Below the table two aims: on "gigabit" how
near the ring comes to 2 (n-1)/n of the bytes at the stream's rate; on "far" by how much trees and halving beat the ring
at 4 KB, beside what the model says. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from driving.forks import enter, measured_by
from driving.options import options_of
from paceline.comm.allreduce.scheduled_group import BACKEND, ScheduledGroup, SelectedAlgorithm
from paceline.comm.group import Group
from paceline.schedule.allreduce.build import FLAT
from paceline.schedule.allreduce.cost_model import LinkCost, NetworkCost, predict
from paceline.testing.network_namespaces import NamespaceHost
from paceline.testing.sites import DEVICE, refusal, sites
from paceline.units import bytes_text

LINKS = {"gigabit": (1e9, 0.0), "far": (None, 0.02)}  # bits per second, seconds one way
SIZES = {"gigabit": (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20), "far": (4 << 10, 64 << 10)}
CPU = torch.device("cpu")
PING = 9
STREAM_BYTES, STREAM_PORT = 256 << 20, 29600
IN_A_ROW = 3
NEAR, AS_TOLD = 1.10, 0.20  # the ring's time by the link's; how far a measured ratio may be from the model's

Row = tuple[int, str, float, float]  # bytes, way, seconds, and what the model says; 0: it says nothing
Found = tuple[tuple[float, float], list[Row]]  # latency and bytes a second of the link, and what was timed


def measure(
    rank: int, hosts: Sequence[NamespaceHost], store: dist.Store, link: str, rounds: int, largest: int
) -> Found:
    """As one worker: what it found."""
    torch.set_num_threads(1)
    workers = len(hosts)
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers)
    world = dist.group.WORLD
    if world is None:
        raise SystemExit("torch made no group")
    group = ScheduledGroup(
        Group(world, device=CPU),
        choose=lambda _: SelectedAlgorithm(BACKEND),
        hosts=range(workers),
        ranks=range(workers),
        timeout_s=300,
        check=lambda: None,
    )
    between = _link(rank, hosts[1].address, link)
    network = NetworkCost(hosts=tuple(range(workers)), between=between, begin_s=between.latency_s)  # gloo's handshake
    rows: list[Row] = []
    for size in (size for size in SIZES[link] if size <= largest):
        tensor, took = torch.zeros(size // 4), {name: list[float]() for name in (BACKEND, *FLAT)}
        for turn in range(rounds + 1):  # the first one warms up
            for name in took if turn % 2 else reversed(took):
                group.barrier()
                began = time.perf_counter()
                for _ in range(IN_A_ROW):  # workers leave a barrier at different times
                    group.begin(name, tensor, what=name).wait()
                took[name].append((time.perf_counter() - began) / IN_A_ROW)
        for name, times in took.items():
            told = 0.0 if name == BACKEND else predict(name, num_bytes=size, network=network)
            rows.append((size, name, statistics.median(times[1:]), told))
    group.barrier()
    group.close()
    return (between.latency_s, between.bytes_per_s), rows


def _link(rank: int, address: str, link: str) -> LinkCost:
    """Latency and rate from worker 0 to worker 1, as worker 0 measures them; the same on all."""
    found = torch.zeros(2, dtype=torch.float64)
    if rank < 2:
        latency_s = _round_trip(rank, torch.zeros(1)) / 2
        # What is tried where frames are delayed is latency alone; its rate is that of a process that passes them on.
        rate = _stream(rank, address) if link == "gigabit" else 12.5e6
        found = torch.tensor([latency_s, rate], dtype=torch.float64)
    dist.broadcast(found, src=0)
    return LinkCost(latency_s=float(found[0]), bytes_per_s=float(found[1]))


def _stream(rank: int, address: str) -> float:
    """Bytes a second of one plain TCP connection from worker 0 to worker 1, as worker 0 sees it."""
    if rank == 1:
        with socket.create_server((address, STREAM_PORT)) as server:
            dist.send(torch.zeros(1), dst=0)  # now it may connect
            connection, _ = server.accept()
        with connection:
            buffer, left = bytearray(1 << 20), STREAM_BYTES
            while left:
                left -= connection.recv_into(buffer)
            connection.sendall(b".")
        return 0.0
    dist.recv(torch.zeros(1), src=1)
    with socket.create_connection((address, STREAM_PORT)) as connection:
        piece, began = bytes(1 << 20), time.perf_counter()
        for _ in range(STREAM_BYTES // len(piece)):
            connection.sendall(piece)
        connection.recv(1)
        return STREAM_BYTES / (time.perf_counter() - began)


def _round_trip(rank: int, tensor: torch.Tensor) -> float:
    """Seconds there and back, with the other side's receive posted before: the median of some."""
    times: list[float] = []
    for _ in range(PING):
        coming = dist.irecv(torch.empty_like(tensor), src=1 - rank)
        if coming is None:
            raise SystemExit("this worker is not in the group")
        began = time.perf_counter()
        if rank == 0:
            dist.send(tensor, dst=1)
        coming.wait()
        if rank == 1:
            dist.send(tensor, dst=0)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def run(hosts: Sequence[NamespaceHost], link: str, rounds: int, largest: int) -> Found:
    """Fork a worker on each host; what worker 0 found."""

    def work(rank: int, store: dist.Store) -> Found:
        enter(hosts[rank].namespace)
        return measure(rank, hosts, store, link, rounds, largest)

    return measured_by(len(hosts), work)


def judged(link: str, workers: int, bytes_per_s: float, rows: Sequence[Row]) -> list[str]:
    """What the link should allow beside what was reached, a line each."""
    by_way = {(size, name): (seconds, told) for size, name, seconds, told in rows}
    lines: list[str] = []
    if link == "gigabit":
        for size in sorted({size for size, *_ in rows if size >= 16 << 20}):
            least_s = 2 * (workers - 1) / workers * size / bytes_per_s
            ratio = by_way[size, "ring"][0] / least_s
            lines.append(f"ring, {bytes_text(size)}: {ratio:.3f}x of 2(n-1)/n at the link's rate (aim: {NEAR:.2f}x)")
        return lines
    size = SIZES[link][0]
    ring_s, ring_told = by_way[size, "ring"]
    for name in ("tree", "halving"):
        seconds, told = by_way[size, name]
        off = (ring_s / seconds) / (ring_told / told) - 1
        lines.append(
            f"{name}, {bytes_text(size)}: {ring_s / seconds:.2f}x as fast as the ring; the model says "
            f"{ring_told / told:.2f}x, which is {off:+.0%} (aim: within {AS_TOLD:.0%})"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--link", choices=LINKS, default="gigabit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--largest", type=int, default=64, help="MiB")
    options = options_of(parser, takes="about 3 minutes", quick={"rounds": 1, "largest": 1, "workers": 2})
    if (why := refusal()) is not None:
        parser.error(f"far hosts cannot be made here: {why}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the hosts are removed
    warnings.filterwarnings("ignore", module="torch.distributed")
    bits_per_s, delay_s = LINKS[options.link]
    with (
        tempfile.TemporaryDirectory() as folder,
        sites(Path(folder), count=options.workers, bits_per_s=bits_per_s, delay_s=delay_s) as hosts,
    ):
        (latency_s, bytes_per_s), rows = run(hosts, options.link, options.rounds, options.largest << 20)
    rate = f", {bytes_per_s * 8 / 1e6:.0f} Mbit/s by a TCP stream" if options.link == "gigabit" else ""
    print(f"{options.workers} workers, {options.link}: {latency_s * 1e3:.2f} ms one way{rate}\n")
    print("| size | way | measured | told | measured / told | gloo / measured |\n|---|---|---|---|---|---|")
    own = {size: seconds for size, name, seconds, _ in rows if name == BACKEND}
    for size, name, seconds, told in rows:
        way = "gloo" if name == BACKEND else name
        ratio = f"{told * 1e3:.2f} ms | {seconds / told:.2f}" if told else " | "
        print(f"| {bytes_text(size)} | {way} | {seconds * 1e3:.2f} ms | {ratio} | {own[size] / seconds:.2f}x |")
    print("", *judged(options.link, options.workers, bytes_per_s, rows), sep="\n")


if __name__ == "__main__":
    main()
