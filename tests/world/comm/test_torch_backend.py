"""Shared memory as a back end of torch.distributed: torch's own DDP, fully_shard and DTensor over it and over gloo."""

from __future__ import annotations

import os
import re
import signal
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from paceline import register_backend
from paceline.comm.shared_memory import arena
from paceline.comm.shared_memory.summation import SUMMED
from paceline.comm.torch_backend import process_group
from paceline.comm.torch_backend.process_group import SharedMemoryProcessGroup
from shared_memory_workers import LIMIT_S, Workers

pytestmark = [
    pytest.mark.skipif(arena.why_unsupported() is not None, reason=str(arena.why_unsupported())),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # torch 2.13 has new names, 2.11 only the old ones
]

Op = dist.ReduceOp
WIDTH = 12
LARGE = (torch.float32, torch.bfloat16)  # in so many numbers that they go in pieces, too


def begin(workers: Workers, rank: int, size: int) -> tuple[Any, Any]:
    """Make torch's default group with memory as its back end; return it, and one over gloo."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    register_backend()
    store = dist.FileStore(str(workers.scratch / "store"), size)
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group("paceline", store=store, rank=rank, world_size=size, timeout=limit)
    world: Any = dist.group.WORLD
    return world, dist.new_group(backend="gloo")


def made(dtype: torch.dtype, *shape: int) -> Tensor:
    numbers = torch.rand(*shape) * 3
    return numbers > 1.5 if dtype == torch.bool else numbers.to(dtype)


def collectives(group: Any, rank: int, size: int, dtype: torch.dtype, numel: int) -> dict[str, list[Tensor]]:
    """What each collective gives on this worker."""
    found: dict[str, list[Tensor]] = {}
    last, sums = size - 1, [Op.SUM] if dtype == torch.bool else [Op.SUM, Op.MAX]
    if dtype.is_floating_point:
        sums += [Op.AVG, Op.PRODUCT]
    for op in [*sums, Op.MIN]:
        found[f"all_reduce {op}"] = [whole := made(dtype, numel)]
        dist.all_reduce(whole, op, group=group)
    for op in sums[:3]:
        found[f"reduce_scatter {op}"] = [part := torch.empty(numel, dtype=dtype)]
        dist.reduce_scatter(part, [made(dtype, numel) for _ in range(size)], op, group=group)
        found[f"reduce_scatter_tensor {op}"] = [part := torch.empty(numel, dtype=dtype)]
        dist.reduce_scatter_tensor(part, made(dtype, size * numel), op, group=group)
    found["broadcast"] = [whole := made(dtype, numel, 2).t()]  # with holes
    dist.broadcast(whole, last, group=group)
    found["reduce"] = [whole := made(dtype, numel)]
    dist.reduce(whole, last, group=group)
    if rank != last:
        del found["reduce"]  # what others have is not said
    found["all_gather"] = [torch.empty(numel, dtype=dtype) for _ in range(size)]
    dist.all_gather(found["all_gather"], made(dtype, numel), group=group)
    found["all_gather_into_tensor"] = [rows := torch.empty(size * numel, dtype=dtype)]
    dist.all_gather_into_tensor(rows, made(dtype, numel), group=group)
    found["gather"] = [torch.empty(numel, dtype=dtype) for _ in range(size)] if rank == last else []
    dist.gather(made(dtype, numel), found["gather"] or None, dst=last, group=group)
    found["scatter"] = [part := torch.empty(numel, dtype=dtype)]
    parts = [made(dtype, numel) for _ in range(size)]
    dist.scatter(part, parts if rank == last else None, src=last, group=group)
    found["all_to_all_single"] = [rows := torch.empty(size, numel, dtype=dtype)]
    dist.all_to_all_single(rows, made(dtype, size, numel), group=group)
    lengths = [[(3 * one + other) % 4 for other in range(size)] for one in range(size)]
    wanted = [row[rank] for row in lengths]
    found["uneven all_to_all_single"] = [rows := torch.empty(sum(wanted), 5, dtype=dtype)]
    dist.all_to_all_single(rows, made(dtype, sum(lengths[rank]), 5), wanted, lengths[rank], group=group)
    flights = [whole := made(dtype, numel), more := made(dtype, 2 * numel)]
    if dtype != torch.bool:
        found["begun beside each other"] = flights
        begun = [dist.all_reduce(one, group=group, async_op=True) for one in (whole, more)]
        for work in reversed(begun):
            if work is not None:
                work.wait()
    listed: list[Any] = [None] * size
    dist.all_gather_object(listed, {"rank": rank}, group=group)
    found["objects"] = [torch.tensor([one["rank"] for one in listed])]
    other = torch.zeros(3, dtype=torch.int64)
    if rank == 0:
        dist.send(torch.arange(3), last, group=group)
    elif rank == last:
        dist.recv(other, 0, group=group)
    found["recv"] = [other]
    dist.barrier(group=group)
    return found


def differences(ours: dict[str, list[Tensor]], theirs: dict[str, list[Tensor]], dtype: torch.dtype) -> list[str]:
    # Between gloo and memory the order of sums differs, and how often 16 bits are rounded.
    rounding = 4 * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    wrong = []
    for name, tensors in ours.items():
        for one, other in zip(tensors, theirs[name], strict=True):
            if not torch.allclose(one.double(), other.double(), rtol=rounding, atol=0.0):
                wrong.append(f"{dtype} {name}")
    return wrong


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.Tanh(), nn.Linear(3 * WIDTH, WIDTH))


def trained(model: nn.Module, rank: int, *, is_alike: bool = False) -> list[Tensor]:
    """Losses of some steps; `is_alike`: on the same samples everywhere."""
    torch.manual_seed(1 if is_alike else 1 + rank)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        x = torch.randn(8, WIDTH)
        loss = F.mse_loss(model(x), x.flip(1))
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.detach())
    return losses


def ddp(group: Any, rank: int, size: int, hook: str = "") -> list[Tensor]:
    # What torch's hook for PowerSGD sends from inside of futures it sends in any order, if there are several buckets.
    model = DistributedDataParallel(net(), process_group=group, bucket_cap_mb=25 if hook == "PowerSGD" else 0.002)
    if hook == "fp16":
        model.register_comm_hook(group, default_hooks.fp16_compress_hook)
    elif hook:
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return trained(model, rank)


def sharded(group: Any, rank: int, size: int) -> list[Tensor]:
    model = net()
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    losses = trained(model, rank)
    return [*losses, *(p.full_tensor() for p in model.parameters() if isinstance(p, DTensor))]


def cut(group: Any, rank: int, size: int) -> list[Tensor]:
    mesh = DeviceMesh.from_group(group, "cpu")
    model = parallelize_module(net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return trained(model, rank, is_alike=True)


def redistributed(group: Any, rank: int, size: int) -> list[Tensor]:
    mesh = DeviceMesh.from_group(group, "cpu")
    places: list[Placement] = [Shard(0), Shard(1), Replicate()]
    found = []
    for first in [*places, Partial(), Partial("avg"), Partial("max")]:
        for last in places:
            torch.manual_seed(7 if first.is_replicate() else 7 + rank)
            one = DTensor.from_local(torch.rand(6, 6), mesh, [first], run_check=False)
            found.append(one.redistribute(mesh, [last]).to_local())
    return found


def apart(workers: Workers, rank: int) -> list[str]:
    """What goes wrong where the first worker is on another host than the others: it is to go over gloo, and say so."""
    if rank == 0:
        process_group.BOOT = workers.scratch / "boot_id"
        process_group.BOOT.write_text("another host")
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        far = dist.new_group()
    dist.all_reduce(told := torch.ones(1), group=far)
    text = "".join(str(one.message) for one in heard if "gloo" in str(one.message))
    is_told = "goes over gloo: its workers are on several hosts" in text
    right = (
        not isinstance(far, SharedMemoryProcessGroup)
        and float(told) == dist.get_world_size()
        and is_told == (rank == 0)
    )
    return [] if right else [f"apart: {type(far).__name__}, {told}, {text!r}"]


JOBS: dict[str, Callable[[Any, int, int], list[Tensor]]] = {
    "DDP": ddp,
    "DDP, fp16 hook": lambda *place: ddp(*place, hook="fp16"),
    "DDP, PowerSGD hook": lambda *place: ddp(*place, hook="PowerSGD"),  # waits inside of futures
    "fully_shard": sharded,
    "tensor parallel": cut,
    "redistribute": redistributed,
}


@pytest.mark.parametrize("size", [2, 3])
def test_torch_gets_over_memory_what_it_gets_over_gloo(tmp_path: Path, size: int) -> None:
    def work(workers: Workers, rank: int) -> list[str]:
        memory, gloo = begin(workers, rank, size)
        wrong = [] if isinstance(memory, SharedMemoryProcessGroup) else [f"the back end is {type(memory).__name__}"]
        for dtype, numel in [*((dtype, 3) for dtype in (*SUMMED, torch.bool)), *((dtype, 300_001) for dtype in LARGE)]:
            torch.manual_seed(rank)
            ours = collectives(memory, rank, size, dtype, numel)
            torch.manual_seed(rank)
            wrong += differences(ours, collectives(gloo, rank, size, dtype, numel), dtype)
        for name, job in JOBS.items():
            for one, other in zip(job(memory, rank, size), job(gloo, rank, size), strict=True):
                if not torch.allclose(one, other, rtol=1e-5, atol=1e-6):
                    wrong.append(f"{name}: {one} instead of {other}")
        some = dist.new_group([0, size - 1])  # not all workers: a group of its own, and its own memory
        if rank in (0, size - 1):
            dist.all_reduce(told := torch.tensor([rank + 1.0]), group=some)
            if float(told) != size + 1 or not isinstance(some, SharedMemoryProcessGroup):
                wrong.append(f"{told} in a part of the workers, {type(some).__name__}")
        wrong += apart(workers, rank)
        dist.barrier()
        dist.destroy_process_group()
        return wrong

    assert Workers(tmp_path, size, work).values() == [[]] * size


def wait_for(workers: Workers, name: str) -> None:
    """Return when another worker has made this file."""
    while not (workers.scratch / name).exists():
        os.sched_yield()


def lost(begin: Callable[[], Any], kind: type[Exception] = dist.DistBackendError) -> tuple[str, float]:
    """The error of a collective that cannot end, without what torch puts around a future's; and how long it took."""
    began = time.monotonic()
    with pytest.raises(kind) as error:
        begin()
    said = str(error.value).partition("\n")[0]
    return said.removeprefix(
        "Got the following error when running the callback: DistBackendError: "
    ), time.monotonic() - began


def test_a_killed_peer_ends_what_waits_for_it_and_is_named(tmp_path: Path) -> None:
    def work(workers: Workers, rank: int) -> Any:
        begin(workers, rank, 3)
        whole = torch.ones(1 << 20)
        dist.all_reduce(whole)
        inside: Any = dist.new_group([1, 2])  # its second member is worker 2
        if rank == 2:
            wait_for(workers, "waits")
            os.kill(os.getpid(), signal.SIGKILL)
        flight: Any = dist.all_reduce(whole, async_op=True)
        future = flight.get_future()
        if rank == 0:
            (workers.scratch / "waits").touch()
        told = [lost(future.wait, RuntimeError), lost(flight.wait), lost(lambda: dist.all_reduce(whole))]
        if rank == 1:
            told.append(lost(lambda: dist.barrier(group=inside)))
        return [
            *told,
            (str(future.done()), 0.0),
            ("/dev/shm has ours" * any("paceline" in name for name in os.listdir("/dev/shm")), 0.0),
        ]

    for found in filter(None, Workers(tmp_path, 3, work).values(killed=[2])):
        *told, (is_done, _), (left, _) = found
        assert [text for text, _ in told] == ["lost contact with a peer during all_reduce: worker 2 has ended"] * 3 + [
            "lost contact with a peer during barrier: worker 2 has ended"
        ] * (len(told) - 3)
        assert max(took_s for _, took_s in told) < LIMIT_S / 2  # not the limit itself
        assert (is_done, left) == ("True", "")


def test_a_stopped_peer_is_named_when_the_time_of_the_group_is_over(tmp_path: Path) -> None:
    def work(workers: Workers, rank: int) -> Any:
        memory, _ = begin(workers, rank, 2)
        memory._memory._waiter._timeout_s = 0.5  # from here on: who is slow in what comes before is not meant
        if rank == 1:
            wait_for(workers, "told")
            return None
        text, took_s = lost(lambda: dist.broadcast(torch.ones(3), 1))
        (workers.scratch / "told").touch()
        return text, took_s

    (text, took_s), _ = Workers(tmp_path, 2, work).values()
    assert re.search(r"worker 0 waited [\d.]+ s in broadcast", text) and "for worker 1 (joined 0)" in text
    assert 0.5 <= took_s < LIMIT_S / 2
