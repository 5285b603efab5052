"""`torch.distributed.monitored_barrier` on groups in shared memory: over a key-value store.

torch has it for gloo alone. Each member says that it has come, and waits for the word of the first one, which waits for
all, names those that are missing, and lets nobody through then.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.errors import SyncError

__all__ = ["monitored_barrier_by_store"]

GOES_ON = "all"
ANSWER, NUM_READ = "answer", "read"  # keys: what the first one says, and how many have read it


def monitored_barrier_by_store(
    group: Any, store: dist.Store, *, timeout: timedelta, wait_all_ranks: bool = False
) -> None:
    """Return when all members have called it; RuntimeError, with the ranks that are missing, after the timeout.

    `store`: of this one call. It is empty again when all have gone on. `wait_all_ranks`: name all of them, and not
    only the first.
    """
    names = [f"{index}" for index in range(group.size())]
    if group.rank() != 0:
        store.set(names[group.rank()], "here")
        limit_s = 2 * timeout.total_seconds()  # the first one may have come last, and waits as long for others
        if not _comes(store, ANSWER, limit_s):
            raise RuntimeError(f"monitored_barrier: rank 0 has not answered within {limit_s:g} s")
        said = store.get(ANSWER).decode()
        if store.add(NUM_READ, 1) == group.size() - 1:
            store.delete_key(ANSWER)
            store.delete_key(NUM_READ)
        if said != GOES_ON:
            raise RuntimeError(said)
        return
    ends = time.monotonic() + timeout.total_seconds()
    ranks = dist.get_process_group_ranks(group)
    missing: list[int] = []
    for rank, name in zip(ranks[1:], names[1:], strict=True):
        if (wait_all_ranks or not missing) and not _comes(store, name, ends - time.monotonic()):
            missing.append(rank)
    text = GOES_ON
    if missing:
        listed = ", ".join(map(str, missing))
        text = f"monitored_barrier: rank{'s' * (len(missing) > 1)} {listed} did not come within {timeout}"
    if len(names) > 1:
        store.set(ANSWER, text)
    for name in names[1:]:
        store.delete_key(name)
    if missing:
        raise RuntimeError(text)


def _comes(store: dist.Store, name: str, limit_s: float) -> bool:
    """Whether a name is there within a time; at once where it is there already."""
    if store.check([name]):
        return True
    try:
        store.wait([name], timedelta(seconds=max(0.001, limit_s)))
    except (SyncError, dist.DistStoreError, RuntimeError):  # pythonic stores raise what C++ passes on as RuntimeError
        return store.check([name])
    return True
