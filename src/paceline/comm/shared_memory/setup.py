"""Sets up shared memory for a process group whose workers are all on one host, or reports why that is impossible."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch

from paceline.comm.group import WorkerGroup
from paceline.comm.shared_memory import arena as memory
from paceline.comm.shared_memory.arena import Arena
from paceline.comm.shared_memory.shared_group import SharedGroup
from paceline.events import Note

__all__ = ["shared_memory_unavailable", "with_shared_memory"]


def with_shared_memory(
    group: WorkerGroup,
    *,
    timeout_s: float,
    check_peers: Callable[[], str | None] | None = None,
    num_local_workers: int | None = None,
    ranks: Sequence[int] = (),
) -> tuple[WorkerGroup, str | None]:
    """Return a group that uses shared memory; or `group` itself, with the reason, if one of its workers cannot.

    All workers of the group must call this; blocks. `check_peers()` is called while waiting: it returns a text that
    names a lost worker, or raises to end the wait. If the group is not all workers of this host, pass the number of all
    as `num_local_workers`, and the members' `ranks` for messages. If a member is lost meanwhile, no memory stays open.
    """
    with contextlib.ExitStack() as unless_shared:
        arena, reason = None, memory.why_unsupported()
        offer = torch.zeros(3, dtype=torch.int64)
        if group.index == 0 and reason is None:
            arena, reason = _try_arena(lambda: Arena.create(size=group.size), unless_shared)
            if arena is not None:
                offer = torch.tensor(arena.address, dtype=torch.int64)
        group.broadcast(offer, what="the place of shared memory")
        pid, number, nonce = offer.tolist()
        if group.index != 0 and reason is None and nonce:
            address = pid, number, nonce
            arena, reason = _try_arena(lambda: Arena.open(address, index=group.index, size=group.size), unless_shared)
        without = torch.tensor([arena is None], dtype=torch.int64)
        group.all_reduce(without, what="whether all share memory").wait()
        if arena is not None and not int(without):
            arena.watch_members()
            shared = SharedGroup(
                group,
                arena,
                timeout_s=timeout_s,
                check_peers=check_peers,
                num_local_workers=num_local_workers,
                ranks=ranks,
            )
            unless_shared.pop_all()
            return shared, None
    reasons = group.gather_objects(reason)
    if reasons[0] is not None and all(text == reasons[0] for text in reasons):  # the host's, not one worker's
        return group, reasons[0]
    names = ranks or range(group.size)
    named = [f"worker {names[index]}: {text}" for index, text in enumerate(reasons) if text is not None]
    return group, "; ".join(named)


def shared_memory_unavailable(what: str, reason: str) -> Note:
    """Return the note that workers of one host cannot share memory; equal notes of several workers are shown once."""
    return Note(text=f"{what} over the loopback network, which is slower: {reason}")


def _try_arena(make: Callable[[], Arena], at_end: contextlib.ExitStack) -> tuple[Arena | None, str | None]:
    """Return an arena, which `at_end` closes; or None and the reason."""
    try:
        arena = make()
        at_end.callback(arena.close)
        return arena, None
    except OSError as error:
        return None, f"no memory to share: {error.strerror}" + (f" ({error.filename})" if error.filename else "")
