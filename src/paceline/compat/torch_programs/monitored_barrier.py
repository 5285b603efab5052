"""`torch.distributed.monitored_barrier` on groups in shared memory: over the group's key-value store.

torch has it for gloo alone. Each member says that it has come, and waits for the word of the first one, which waits for
all, names those that are missing, and lets nobody through then.
"""

from __future__ import annotations

import time
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.errors import SyncError

__all__ = ["monitored_barrier_by_store"]

GOES_ON = "all"
_counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of calls, by group


def monitored_barrier_by_store(
    group: Any, store: dist.Store, *, timeout: timedelta, wait_all_ranks: bool = False
) -> None:
    """Return when all members have called it; RuntimeError, with the ranks that are missing, after the timeout.

    `wait_all_ranks`: name all of them, and not only the first.
    """
    number = _counts[group] = _counts.get(group, -1) + 1
    names = [f"monitored_barrier/{number}/{index}" for index in range(group.size())]
    answer = f"monitored_barrier/{number}/answer"
    if group.rank() != 0:
        store.set(names[group.rank()], "here")
        limit_s = 2 * timeout.total_seconds()  # the first one may have come last, and waits as long for others
        if not _comes(store, answer, limit_s):
            raise RuntimeError(f"monitored_barrier: rank 0 has not answered within {limit_s:g} s")
        said = store.get(answer).decode()
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
    store.set(answer, text)
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
