"""All-reduce between workers of one host: the memory that Paceline's workers share, against gloo over loopback, MPI,
and what plain copies of memory would take.

    python benchmarks/allreduce.py [--rounds 7] [--workers 2,4] [--sizes "4 KB,64 MB"]

Workers of one thread each; the ways take turns within every round, in one run, and the table gives medians as algorithm
bandwidth (the tensor's bytes by the time) and ratios of medians. "in place": the tensor lies in shared memory, as
gradient buckets do; "copied": it lies elsewhere, as any other tensor. The limit: in place each worker reads as many
bytes as the tensor has, and writes as many, which is one copy of it by all of them at once; copied it is three, and two
and a half for two workers. Below a megabyte it is not told: there what counts is how long one waits for the other.

MPI is Open MPI's all-reduce in place (mpi4py), over its shared memory; without mpi4py and mpirun its column is empty.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from driving.forks import measured_by
from driving.options import options_of
from paceline.comm.group import Group, WorkerGroup
from paceline.comm.shared_memory.setup import with_shared_memory

SIZES = {  # bytes, repetitions in a round
    "4 KB": (4 << 10, 40),
    "64 KB": (64 << 10, 40),
    "1 MB": (1 << 20, 15),
    "16 MB": (16 << 20, 4),
    "64 MB": (64 << 20, 2),
    "256 MB": (256 << 20, 1),
}
CPU = torch.device("cpu")
COPIES = {"in place": 1.0, "copied": 3.0}  # of the tensor, by each worker, which an all-reduce cannot do without
COPIES_OF_TWO = {
    **COPIES,
    "copied": 2.5,
}  # each adds the other's to its own: one copy, and a sum of two reads and a write
Found = dict[str, dict[str, float]]  # by size and way: median microseconds


def timed(call: Callable[[], Any], group: WorkerGroup, repetitions: int) -> float:
    """Microseconds of one call, on the mean of some; all workers begin together, and are done together."""
    group.barrier()
    began = time.perf_counter()
    for _ in range(repetitions):
        call()
    group.barrier()
    return (time.perf_counter() - began) / repetitions * 1e6


def measure(rank: int, workers: int, store: dist.Store, *, rounds: int, sizes: list[str], mpi: Any) -> Found:
    """As one worker of a group: what each way takes."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.filterwarnings("ignore", module="torch.distributed")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers)
    world = dist.group.WORLD
    if world is None:
        raise SystemExit("torch made no group")
    gloo = Group(world, device=CPU)
    shared, reason = with_shared_memory(gloo, timeout_s=60)
    if reason is not None:
        raise SystemExit(f"memory cannot be shared here: {reason}")
    found: Found = {}
    for size in sizes:
        num_bytes, repetitions = SIZES[size]
        ways = ways_of(num_bytes // 4, gloo=gloo, shared=shared, mpi=mpi)
        took: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(rounds + 1):
            for name in ways if turn % 2 else reversed(ways):
                took[name].append(timed(ways[name], shared, repetitions))
        found[size] = {name: statistics.median(times[1:]) for name, times in took.items()}  # the first one warms up
    shared.barrier()
    shared.close()
    return found


def ways_of(numel: int, *, gloo: Group, shared: WorkerGroup, mpi: Any) -> dict[str, Callable[[], Any]]:
    """The ways to sum so many numbers, and the plain copy of them."""
    plain, other = torch.zeros(numel), torch.zeros(numel)
    placed = shared.allocate(numel, dtype=torch.float32, device=CPU)
    ways: dict[str, Callable[[], Any]] = {
        "gloo": lambda: gloo.all_reduce(plain, what="gloo").wait(),
        "in place": lambda: shared.all_reduce(placed, what="in place").wait(),
        "copied": lambda: shared.all_reduce(plain, what="copied").wait(),
        "a copy": lambda: other.copy_(plain),
    }
    if mpi is not None:
        numbers = plain.numpy()
        ways["MPI"] = lambda: mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, numbers)
    return ways


def run(workers: int, *, rounds: int, sizes: list[str]) -> Found:
    """Start the workers, under mpirun where there is one; what worker 0 measured."""
    if not has_mpi():
        return measured_by(
            workers, lambda rank, store: measure(rank, workers, store, rounds=rounds, sizes=sizes, mpi=None)
        )
    with tempfile.TemporaryDirectory() as scratch:
        own = [sys.executable, __file__, "--rounds", str(rounds), "--sizes", ",".join(sizes), "--in", scratch]
        command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(workers), *own]
        as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        done = subprocess.run(command, env={**os.environ, **as_root}, capture_output=True, text=True, timeout=1800)
        out = Path(scratch) / "found.json"
        if done.returncode or not out.exists():
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return json.loads(out.read_text())


def work_under_mpi(scratch: Path, *, rounds: int, sizes: list[str]) -> None:
    """As one of mpirun's processes."""
    mpi = importlib.import_module("mpi4py.MPI")
    rank, workers = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
    store = dist.FileStore(str(scratch / "store"), workers)
    found = measure(rank, workers, store, rounds=rounds, sizes=sizes, mpi=mpi)
    if rank == 0:
        (scratch / "found.json").write_text(json.dumps(found))


def has_mpi() -> bool:
    return shutil.which("mpirun") is not None and importlib.util.find_spec("mpi4py") is not None


def row_of(workers: int, size: str, took: dict[str, float]) -> str:
    """A line of the table."""
    num_bytes = SIZES[size][0]

    def told(way: str) -> str:
        if way not in took:
            return ""
        microseconds = took[way]
        time_text = f"{microseconds:.0f} us" if microseconds < 1000 else f"{microseconds / 1000:.2f} ms"
        return f"{time_text} ({num_bytes / microseconds / 1000:.2g} GB/s)"

    def ratio(way: str, other: str) -> str:
        return f"{took[other] / took[way]:.2g}x" if other in took else ""

    cells = [str(workers), size, told("gloo"), told("MPI")]
    for way, num_copies in (COPIES_OF_TWO if workers == 2 else COPIES).items():
        of_limit = f"{num_copies * took['a copy'] / took[way]:.2f}" if num_bytes >= 1 << 20 else ""
        cells += [told(way), f"**{ratio(way, 'gloo')}**", ratio(way, "MPI"), of_limit]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--sizes", default=",".join(SIZES), help=f"of {', '.join(SIZES)}")
    parser.add_argument("--in", dest="scratch", type=Path, help=argparse.SUPPRESS)
    options = options_of(parser, takes="about 4 minutes", quick={"rounds": 1, "workers": "2", "sizes": "4 KB,64 MB"})
    sizes = options.sizes.split(",")
    if unknown := [size for size in sizes if size not in SIZES]:
        parser.error(f"--sizes: {unknown} are none of {list(SIZES)}")
    if options.scratch is not None:
        work_under_mpi(options.scratch, rounds=options.rounds, sizes=sizes)
        return
    head = ["workers", "size", "gloo", "MPI"]
    for way in COPIES:
        head += [f"memory, {way}", "/ gloo", "/ MPI", "of the limit"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    for workers in map(int, options.workers.split(",")):
        found = run(workers, rounds=options.rounds, sizes=sizes)
        for size in sizes:
            print(row_of(workers, size, found[size]), flush=True)


if __name__ == "__main__":
    main()
