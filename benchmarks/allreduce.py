"""All-reduce between workers of one host: gloo over loopback against the memory that Paceline's workers share.

    python benchmarks/allreduce.py [--rounds 5]

Workers of one thread each are forked; the ways take turns within every round, and the table gives medians. "in place":
the tensor lies in shared memory, as gradient buckets do; "copied": it lies elsewhere, as any other tensor.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.comm.group import Group, WorkerGroup
from paceline.comm.shared import share

SIZES = {"4 KB": (4 << 10, 40), "1 MB": (1 << 20, 15), "64 MB": (64 << 20, 2)}  # bytes, repetitions in a round
CPU = torch.device("cpu")


def timed(call: Callable[[], None], group: WorkerGroup, repetitions: int) -> float:
    """Microseconds of one call, on the mean of some; all workers begin together."""
    group.barrier()
    began = time.perf_counter()
    for _ in range(repetitions):
        call()
    return (time.perf_counter() - began) / repetitions * 1e6


def measure(rank: int, workers: int, store: dist.Store, rounds: int) -> list[tuple[str, str, float]]:
    """As one worker of a group: (size, way, median microseconds)."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers)
    world = dist.group.WORLD
    if world is None:
        raise SystemExit("torch made no group")
    gloo = Group(world, device=CPU)
    shared, reason = share(gloo, timeout_s=60)
    if reason is not None:
        raise SystemExit(f"memory cannot be shared here: {reason}")
    rows = []
    for size, (num_bytes, repetitions) in SIZES.items():
        plain = torch.zeros(num_bytes // 4)
        placed = shared.allocate(num_bytes // 4, dtype=torch.float32, device=CPU)
        ways: dict[str, Callable[[], None]] = {
            "gloo": lambda tensor=plain: gloo.all_reduce(tensor, what="gloo").wait(),
            "in place": lambda tensor=placed: shared.all_reduce(tensor, what="in place").wait(),
            "copied": lambda tensor=plain: shared.all_reduce(tensor, what="copied").wait(),
        }
        took: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(rounds + 1):
            for name in ways if turn % 2 else reversed(ways):
                took[name].append(timed(ways[name], shared, repetitions))
        rows += [(size, name, statistics.median(times[1:])) for name, times in took.items()]  # the first one warms up
    shared.barrier()
    shared.close()
    return rows


def run(workers: int, rounds: int) -> dict[tuple[str, str], float]:
    """Fork the workers; what worker 0 measured."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "rows"
        pids = []
        for rank in range(workers):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    rows = measure(rank, workers, dist.FileStore(f"{scratch}/store", workers), rounds)
                    if rank == 0:
                        torch.save(rows, out)
                    status = 0
                finally:
                    os._exit(status)
            pids.append(pid)
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
        if any(statuses):
            raise SystemExit("a worker failed")
        return {(size, way): value for size, way, value in torch.load(out)}


def told(microseconds: float) -> str:
    return f"{microseconds:.0f} us" if microseconds < 1000 else f"{microseconds / 1000:.2f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    warnings.filterwarnings("ignore", module="torch.distributed")
    print(
        "| workers | size | gloo | shared, in place | ratio | shared, copied | ratio |\n|---|---|---|---|---|---|---|"
    )
    for workers in (2, 4):
        found = run(workers, rounds)
        for size in SIZES:
            gloo, placed, copied = (found[size, way] for way in ("gloo", "in place", "copied"))
            print(
                f"| {workers} | {size} | {told(gloo)} | {told(placed)} | **{gloo / placed:.1f}x** "
                f"| {told(copied)} | {gloo / copied:.1f}x |",
                flush=True,
            )


if __name__ == "__main__":
    main()
