"""Sums in shared memory between real processes: against gloo's sums, and when one of them is killed or stopped."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from forked import World
from paceline.comm import arena
from paceline.comm.arena import DONE
from paceline.comm.group import Transfer
from paceline.comm.shared import SharedGroup
from paceline.comm.sums import SUMMED
from paceline.errors import SyncError
from paceline.plan import Batch, Plan
from paceline.sync.server_process import is_stopped
from sharing import CPU, LIMIT_S, Workers

pytestmark = pytest.mark.skipif(arena.refusal() is not None, reason=str(arena.refusal()))


def held() -> list[str]:
    """What of shared memory this process still has: mappings and open files."""
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [text for text in (*links, *maps) if f"/memfd:{arena.NAME}" in text]


def wait_for(group: SharedGroup, index: int, num_sums: int) -> None:
    """Return when a member has joined so many sums."""
    while group.arrivals()[index] < num_sums:
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
        while 2 not in dict(group._arena.gone()):
            os.sched_yield()
        return lost(group.all_reduce(placed, what="gradients"))

    for text, took_s in filter(None, Workers(tmp_path, 4, work).values(killed=[2])):
        assert text == "lost contact with a peer during gradients: worker 2 has ended"
        assert took_s < LIMIT_S / 2  # not the limit itself; an idle machine takes 0.05 s


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
        while not is_stopped(pids[1]):  # it has arrived, and as the first: it cannot have done its part
            os.sched_yield()
        flight = group.all_reduce(placed, what="the first")
        wait_for(group, 2 - rank, 1)
        group.progress()
        while group._control[group._arena.word(2 - rank, DONE)] < 1:
            os.sched_yield()
        group._waiting._timeout_s = 0.3  # now there is nobody to wait for but worker 1
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
    monkeypatch.setattr(arena, "refusal", lambda: "this is a test")
    (tmp_path / "other").mkdir()
    other = World(tmp_path / "other")
    over_torch = other(train, 2, plan)
    assert [is_held for _, is_held in over_torch] == [False, False]
    assert shared[0][0] == over_torch[0][0] == over_torch[1][0]  # the same bits, with two
    events = [json.loads(line) for line in (other.worker_dir(0) / "events.jsonl").read_text().splitlines()]
    [note] = [event["text"] for event in events if event["event"] == "Note"]
    assert note.endswith("which is slower: worker 0: this is a test; worker 1: this is a test")


def _rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
