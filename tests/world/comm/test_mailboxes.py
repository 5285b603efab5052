"""Tensors through shared memory between neighbours: what arrives, who waits for nobody, and who is named when lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.comm.shared_memory import arena
from paceline.comm.shared_memory.mailboxes import MAX_PLACES, Mailboxes
from paceline.errors import SyncError
from shared_memory_workers import LIMIT_S, Workers

pytestmark = pytest.mark.skipif(arena.why_unsupported() is not None, reason=str(arena.why_unsupported()))

NUM = 3 * MAX_PLACES  # tensors: more than a mailbox has places
WAY = "stage 0 to 1"


def numbers(source: int, target: int, place: int, size: int) -> Tensor:
    """What one worker sends to another: of another kind each time."""
    dtype = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64)[place % 5]
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(100 * source + 10 * target + place)).to(dtype)


def exchanged(boxes: Mailboxes, rank: int, peers: list[int], sizes: list[int]) -> list[str]:
    """Send to all peers, then look at what has come from them; what is wrong."""
    sent = [
        boxes.send(numbers(rank, peer, place, size), to=peer, what=f"value {place}", way=WAY)
        for place, size in enumerate(sizes)
        for peer in peers
    ]
    wrong = []
    for peer in peers:
        came = []
        for place, size in enumerate(sizes):
            into = torch.empty_like(numbers(peer, rank, place, size))
            came.append((into, boxes.receive(into, source=peer, what=f"value {place}", way=WAY)))
        for _, passage in reversed(came):  # the last one brings all of them
            passage.wait()
        wrong += [
            f"{peer} to {rank}: {place}"
            for place, (into, _) in enumerate(came)
            if not torch.equal(into, numbers(peer, rank, place, sizes[place]))
        ]
    for passage in sent:
        passage.wait()
    return wrong


@pytest.mark.parametrize("num_workers", [2, 4])
def test_what_is_sent_arrives_in_its_order_though_all_send_first(tmp_path: Path, num_workers: int) -> None:
    def work(workers: Workers, rank: int) -> list[str]:
        group = workers.join(rank, num_workers)
        boxes = group.mailboxes()
        peers = sorted({(rank + 1) % num_workers, (rank - 1) % num_workers})
        assert not boxes.takes(torch.empty(1), source=rank, target=peers[0])  # there is no room yet
        wrong = []
        for most in (700, 500, 70_000):  # the room grows once, with others' tensors on their way perhaps
            boxes.make_room(most * 3 * 8)
            wrong += exchanged(boxes, rank, peers, [1 + (most * place) // NUM for place in range(NUM)])
        assert not boxes.takes(torch.empty(10**6), source=rank, target=peers[0])
        if num_workers == 4:
            assert not boxes.takes(torch.empty(1), source=rank, target=(rank + 2) % 4)
        group.barrier()
        group.close()
        return wrong

    assert Workers(tmp_path, num_workers, work).values() == [[]] * num_workers


def lost(boxes: Mailboxes, numel: int) -> tuple[str, float]:
    """The error of a tensor that does not come, and how long it took."""
    began = time.monotonic()
    with pytest.raises(SyncError) as error:
        boxes.receive(torch.empty(numel), source=0, what="what blocks.1 returns", way=WAY).wait()
    return str(error.value), time.monotonic() - began


def test_who_does_not_send_is_named(tmp_path: Path) -> None:
    """Killed, silent beyond the limit, or elsewhere in the schedule."""

    def work(workers: Workers, rank: int) -> Any:
        found = []
        for case in range(3):
            group = workers.join(rank, 2, generation=case, ranks=(4, 5))
            boxes = group.mailboxes()
            boxes.make_room(400)
            group.barrier()
            if case == 1:
                group._waiter._timeout_s = 0.5  # from here on: who is slow in what comes before is not meant
            if rank == 1:
                found.append(lost(boxes, 100))
            elif case == 0:
                boxes.send(torch.empty(7), to=1, what="something else", way=WAY)
            if case == 2 and rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if case == 1:
                torch.distributed.barrier()  # who is silent has not left
            group.close()
            torch.distributed.destroy_process_group()
        return found

    _, found = Workers(tmp_path, 2, work).values(killed=[0])
    (elsewhere, _), (silent, silent_s), (killed, killed_s) = found
    waiting = f"{WAY}: waiting for what blocks.1 returns"
    assert elsewhere.startswith(f"{waiting}: 28 bytes came, and 400 were expected")
    assert silent.startswith(f"{waiting} failed: worker 4 has not come to it in ")
    assert 0.5 <= silent_s < LIMIT_S / 2
    assert killed == f"lost contact with a peer during {waiting}: worker 4 has ended"
    assert killed_s < LIMIT_S / 2  # not the limit itself
