"""`monitored_barrier` over a key-value store: members are threads here."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from paceline.compat.torch_programs.monitored_barrier import monitored_barrier_by_store

RANKS = [0, 2, 5]  # of the members, in the run


class Member:
    """A group as one of its members sees it."""

    def __init__(self, index: int) -> None:
        self._index = index

    def rank(self) -> int:
        return self._index

    def size(self) -> int:
        return len(RANKS)


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: RANKS)


def meet(store: dist.Store, index: int, *, timeout_s: float = 10.0, wait_all_ranks: bool = False) -> str:
    """What a member has to say after the barrier; "" where it went through."""
    try:
        monitored_barrier_by_store(
            Member(index), store, timeout=timedelta(seconds=timeout_s), wait_all_ranks=wait_all_ranks
        )
    except RuntimeError as error:
        return str(error)
    return ""


def test_all_wait_for_the_last_one_and_leave_nothing_in_the_store() -> None:
    store, has_come = dist.HashStore(), threading.Event()

    def come_last() -> str:
        time.sleep(0.05)
        has_come.set()
        return meet(store, 2)

    def wait(index: int) -> tuple[str, bool]:
        return meet(store, index), has_come.is_set()

    with ThreadPoolExecutor(3) as pool:
        last, early = pool.submit(come_last), [pool.submit(wait, index) for index in range(2)]
        assert [one.result(10.0) for one in early] == [("", True), ("", True)] and last.result(10.0) == ""
    assert not any(store.check([key]) for key in ("0", "1", "2", "answer", "read"))


@pytest.mark.parametrize(("wait_all_ranks", "named"), [(False, "rank 2 did"), (True, "ranks 2, 5 did")])
def test_those_that_are_missing_are_named_and_nobody_goes_through_later(wait_all_ranks: bool, named: str) -> None:
    store = dist.HashStore()
    said = meet(store, 0, timeout_s=0.02, wait_all_ranks=wait_all_ranks)
    assert said == f"monitored_barrier: {named} not come within 0:00:00.020000"
    assert meet(store, 1) == said and meet(store, 2) == said
