"""Sums in shared memory between real processes: against gloo's sums, and when one of them is killed or stopped."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from forked import World
from paceline.comm.group import Transfer
from paceline.comm.shared_memory import arena
from paceline.comm.shared_memory.arena import DONE
from paceline.comm.shared_memory.collectives import COPY_BYTES
from paceline.comm.shared_memory.shared_group import SharedGroup
from paceline.comm.shared_memory.summation import SUMMED
from paceline.errors import SyncError
from paceline.parallel.pipeline.stage_transfer import SharedMemoryTransport
from paceline.plan import Batch, Layout, Plan
from paceline.plan.job import Assignment, Job
from paceline.processes import process_state
from shared_memory_workers import CPU, LIMIT_S, Workers

pytestmark = pytest.mark.skipif(arena.why_unsupported() is not None, reason=str(arena.why_unsupported()))

LARGE = 2 * COPY_BYTES // 4  # numbers: more than go in one piece


def held() -> list[str]:
    """What of shared memory this process still has: mappings and open files."""
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [text for text in (*links, *maps) if f"/memfd:{arena.NAME}" in text]


def wait_for(group: SharedGroup, index: int, num_sums: int) -> None:
    """Return when a member has joined so many sums."""
    while group.joined_counts()[index] < num_sums:
        os.sched_yield()


def lost(flight: Transfer) -> tuple[str, float]:
    """The error of a sum that cannot end, and how long it took."""
    began = time.monotonic()
    with pytest.raises(SyncError) as error:
        flight.wait()
    return str(error.value), time.monotonic() - began


@pytest.mark.parametrize("num_workers", [2, 3, 5])
def test_sums_are_those_of_gloo_for_every_type_and_odd_sizes(tmp_path: Path, num_workers: int) -> None:
    def work(workers: Workers, rank: int) -> list[str]:
        group = workers.join(rank, num_workers)
        generator = torch.Generator().manual_seed(rank)
        wrong = []
        for dtype in SUMMED:
            for numel in (1, 63, 4097, 300_001):
                numbers = (torch.rand(numel, generator=generator, dtype=torch.float64) * 50).to(dtype)
                expected, copied = numbers.clone(), numbers.clone()
                placed = group.allocate(numel, dtype=dtype, device=CPU).copy_(numbers)
                flights = [group.all_reduce(copied, what="copied"), group.all_reduce(placed, what="placed")]
                dist.all_reduce(expected)
                for flight in flights:
                    flight.wait()
                is_close = torch.allclose(copied.double(), expected.double(), rtol=4 * _rounding(dtype), atol=1e-6)
                if not is_close or not torch.equal(copied, placed):
                    wrong.append(f"{dtype} {numel}")
                if num_workers == 2 and not torch.equal(copied, expected):  # a sum of two has one order only
                    wrong.append(f"{dtype} {numel}: other bits")
        group.close()
        return wrong

    assert Workers(tmp_path, num_workers, work).values() == [[]] * num_workers


def test_a_killed_peer_ends_the_wait_at_once_and_is_named(tmp_path: Path) -> None:
    def work(workers: Workers, rank: int) -> Any:
        group = workers.join(rank, 4)
        placed = group.allocate(1 << 20, dtype=torch.float32, device=CPU)
        for _ in range(3):
            group.all_reduce(placed, what="gradients").wait()
        if rank == 2:
            group.all_reduce(placed, what="gradients")  # it has arrived, and will not do its part
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for(group, 2, 4)
        while 2 not in dict(group._arena.ended_members()):
            os.sched_yield()
        return lost(group.all_reduce(placed, what="gradients"))

    for text, took_s in filter(None, Workers(tmp_path, 4, work).values(killed=[2])):
        assert text == "lost contact with a peer during gradients: worker 2 has ended"
        assert took_s < LIMIT_S / 2  # not the limit itself; an idle machine takes 0.05 s


def gathers(group: SharedGroup) -> None:
    group.all_gather(torch.ones(LARGE), list(torch.empty(group.size, LARGE)), what="gathers")


def reduces(group: SharedGroup) -> None:
    group.reduce_scatter(list(torch.ones(group.size, LARGE)), torch.empty(LARGE), what="reduces")


def exchanges(group: SharedGroup) -> None:
    group.all_to_all(list(torch.ones(group.size, LARGE)), list(torch.empty(group.size, LARGE)), what="exchanges")


def spreads(group: SharedGroup) -> None:
    group.broadcast(torch.ones(LARGE), source=2, what="spreads")


def exit_in_the_second_piece(group: Any) -> None:
    """Have a member be killed in its next collective, when all others have put down two pieces and wait for its."""
    announce, num_pieces = group._announce, 0

    def announcing(*args: Any, **more: Any) -> Any:
        nonlocal num_pieces
        num_pieces += 1
        if num_pieces == 2:
            for other in range(group.size):
                if other != group.index:
                    wait_for(group, other, 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return announce(*args, **more)

    group._announce = announcing


@pytest.mark.parametrize("collective", [gathers, reduces, exchanges, spreads])
def test_who_is_killed_in_the_middle_of_a_collective_is_named_and_leaves_nothing(
    tmp_path: Path, collective: Callable[[SharedGroup], None]
) -> None:
    def outcome(group: SharedGroup, *, is_lost: bool) -> str:
        if is_lost:
            exit_in_the_second_piece(group)
        try:
            collective(group)
        except SyncError as error:
            return str(error)
        finally:
            group.close()
        return "nobody is missed"

    def work(workers: Workers, rank: int) -> Any:
        group, began = workers.join(rank, 4), time.monotonic()
        told, took_s = outcome(group, is_lost=rank == 2), time.monotonic() - began
        dist.destroy_process_group()
        del group
        gc.collect()
        return told, took_s, held()

    said = f"lost contact with a peer during {collective.__name__}: worker 2 has ended"
    for told, took_s, left in filter(None, Workers(tmp_path, 4, work).values(killed=[2])):
        assert (told, left) == (said, [])
        assert took_s < LIMIT_S / 2  # not the limit itself
    assert not [name for name in os.listdir("/dev/shm") if arena.NAME in name]


def test_a_stopped_peer_is_named_within_the_limit_and_cannot_disturb_those_who_go_on(tmp_path: Path) -> None:
    def work(workers: Workers, rank: int) -> Any:
        group = workers.join(rank, 3)
        pids = group.gather_objects(os.getpid())
        placed = group.allocate(100_000, dtype=torch.float32, device=CPU)
        if rank == 1:
            group.all_reduce(placed, what="the first")
            os.kill(os.getpid(), signal.SIGSTOP)
            placed.fill_(99)  # some time later, in a group that nobody is in any more
            text, _ = lost(group.all_reduce(placed, what="the second"))
            return text
        while process_state(pids[1]) != "stopped":  # it has arrived, and as the first: it cannot have done its part
            os.sched_yield()
        flight = group.all_reduce(placed, what="the first")
        wait_for(group, 2 - rank, 1)
        group.progress()
        while group._control[group._arena.counter(2 - rank, DONE)] < 1:
            os.sched_yield()
        group._waiter._timeout_s = 0.3  # now there is nobody to wait for but worker 1
        told = lost(flight)
        group.close()
        dist.destroy_process_group()
        again = workers.join(rank // 2, 2, generation=1)
        others = again.allocate(100_000, dtype=torch.float32, device=CPU)
        if rank == 0:
            os.kill(pids[1], signal.SIGCONT)
        for _ in range(50):
            others.fill_(1)
            again.all_reduce(others, what="going on").wait()
            if not bool((others == 2).all()):
                raise RuntimeError("a sum went wrong")
        again.close()
        return told

    first, stopped, third = Workers(tmp_path, 3, work).values()
    for text, took_s in (first, third):
        assert "s in the first, sum number 1 of this group, for worker 1 (finished 0): stopped" in text
        assert 0.3 <= took_s < LIMIT_S / 2
    assert stopped.startswith("lost contact with a peer during the second: worker ")


def test_memory_grows_as_it_is_needed_and_goes_when_it_is_dropped(tmp_path: Path) -> None:
    def work(workers: Workers, rank: int) -> tuple[list[float], int, list[str]]:
        group = workers.join(rank, 2)
        buckets = [group.allocate(1 << (10 + n), dtype=torch.float32, device=CPU).fill_(n + rank) for n in range(10)]
        for place in range(10):
            group.all_reduce(buckets[place], what="gradients").wait()
        sums = [float(bucket[-1]) for bucket in buckets]
        num_held = len(held())
        group.barrier()
        group.close()
        dist.destroy_process_group()
        del group, buckets
        return sums, num_held, held()

    for sums, num_held, left in Workers(tmp_path, 2, work).values():
        assert sums == [2.0 * n + 1 for n in range(10)]
        assert num_held >= 10
        assert left == []


def train(worker: Any) -> tuple[list[float], bool]:
    torch.manual_seed(0)
    model = worker.prepare(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    step = worker.stepper(model, optim, F.cross_entropy)
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    losses = [float(step(batch)) for batch in worker.batches([(x, int(x[0] > 0)) for x in inputs], epochs=2)]
    return losses, bool(held())


def test_workers_of_one_host_share_memory_and_train_as_over_the_network(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(batch=Batch(size=8, micro=2))
    shared = world(train, 2, plan)
    assert [is_held for _, is_held in shared] == [True, True]
    monkeypatch.setattr(arena, "why_unsupported", lambda: "this is a test")
    (tmp_path / "other").mkdir()
    other = World(tmp_path / "other")
    over_torch = other(train, 2, plan)
    assert [is_held for _, is_held in over_torch] == [False, False]
    assert shared[0][0] == over_torch[0][0] == over_torch[1][0]  # the same bits, with two
    events = [json.loads(line) for line in (other.worker_dir(0) / "events.jsonl").read_text().splitlines()]
    [note] = [event["text"] for event in events if event["event"] == "Note"]
    assert note.endswith("which is slower: this is a test")


def told(world: World, workers: int) -> list[tuple[int, str]]:
    """What the workers of the last attempt have noted, each with who did."""
    paths = [(rank, world.worker_dir(rank) / "events.jsonl") for rank in range(workers)]
    events = [(rank, json.loads(line)) for rank, path in paths for line in path.read_text().splitlines()]
    return [(rank, event["text"]) for rank, event in events if event["event"] == "Note"]


class TwoHosts(World):
    """The first half of the workers take the others for those of another host."""

    def _assignment(self, rank: int, workers: int, job: Job) -> Assignment:
        each, one = workers // 2, super()._assignment(rank, workers, job)
        here = {"host": f"host{rank // each}", "host_index": rank // each, "hosts": 2}
        return dataclasses.replace(one, **here, local_rank=rank % each, local_workers=each)


def ways(worker: Any) -> dict[str, bool]:
    """Of each axis with several workers, and of what models use of it, whether it lies in memory."""
    axes = worker._place.axes
    groups = {
        name: getattr(axes, name) for name in ("replica_group", "shard_group", "tensor", "stages", "context", "experts")
    }
    if axes.rows is not None:
        groups["rows"] = axes.rows.group
    users = {
        "tensor_parallel_group": axes.tensor_parallel_group,
        "context_parallel_group": axes.context_parallel_group,
        "expert_parallel_group": axes.expert_parallel_group,
    }
    groups |= {name: user._group for name, user in users.items() if user is not None}
    found = {name: isinstance(group._group, SharedGroup) for name, group in groups.items() if group.size > 1}
    return found if axes.link is None else found | {"link": isinstance(axes.link._link, SharedMemoryTransport)}


LAYOUTS = {
    "shard": (Layout(shard=2), {"shard_group", "rows"}),
    "tensor": (Layout(tensor=2), {"tensor", "tensor_parallel_group"}),
    "stages": (Layout(stages=2), {"stages", "link"}),
    "context": (
        Layout(context=2),
        {"context", "replica_group", "context_parallel_group"},
    ),  # who share sequences are also those across
    "experts": (Layout(experts=2), {"experts", "replica_group", "expert_parallel_group"}),
}


@pytest.mark.parametrize("axis", LAYOUTS)
def test_workers_of_a_replica_share_the_memory_of_their_host(world: World, axis: str) -> None:
    layout, expected = LAYOUTS[axis]
    assert world(ways, 2, Plan(layout=layout)) == [dict.fromkeys(expected, True)] * 2


@pytest.mark.parametrize("axis", ["shard", "stages"])
def test_a_replica_of_one_host_meets_in_its_memory_where_the_job_has_several(tmp_path: Path, axis: str) -> None:
    layout, inside = LAYOUTS[axis]
    world = TwoHosts(tmp_path)
    found = world(ways, 4, Plan(layout=dataclasses.replace(layout, replicas=2)))
    assert found == [dict.fromkeys(inside, True) | {"replica_group": False}] * 4
    assert world(ways, 2, Plan(layout=layout)) == [dict.fromkeys(inside, False)] * 2  # each host has one of its workers
    assert told(world, 2) == []


def test_two_replicas_in_the_memory_of_two_hosts_train_as_one_worker(tmp_path: Path) -> None:
    plan = Plan(layout=Layout(replicas=2, shard=2), batch=Batch(size=8, micro=2))
    world = TwoHosts(tmp_path)
    split = world(train, 4, plan)
    (losses, _), alone = split[0], world.one_process(train, Plan(batch=plan.batch))[0]
    assert split == [(losses, True)] * 4 and losses == pytest.approx(alone, rel=1e-5)


def test_why_there_is_no_memory_is_said_of_each_axis(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "why_unsupported", lambda: "this is a test")
    tail = "over the loopback network, which is slower: this is a test"
    plan = Plan(layout=Layout(replicas=2, shard=2))
    assert world(ways, 4, plan) == [{"shard_group": False, "replica_group": False, "rows": False}] * 4
    shard, replica = (f"workers along '{axis}' exchange tensors {tail}" for axis in ("shard", "replica"))
    whole = f"workers sum gradients {tail}"
    assert sorted(told(world, 4)) == sorted([(0, whole), (0, shard), (2, shard), (0, replica), (1, replica)])
    (tmp_path / "several").mkdir()
    several = TwoHosts(tmp_path / "several")
    assert several(ways, 4, plan) == [{"shard_group": False, "replica_group": False, "rows": False}] * 4
    assert told(several, 4) == [(0, shard), (2, shard)]  # their replicas' workers are on two hosts
    assert not any(several(ways, 4, Plan(layout=Layout(replicas=4)))[0].values())
    assert told(several, 4) == [(rank, f"workers of one host sum gradients {tail}") for rank in (0, 2)]


def _rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
