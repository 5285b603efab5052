"""Where others are lost in the user's function, the worker that left it too early is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.comm.messages.json_channel import ChannelClosed
from paceline.errors import SyncError
from paceline.worker.session import LEFT, JoinedWorker, _call_function
from paceline.worker.worker import Worker


class Store:
    """Worker 2 left after step 7."""

    def check(self, keys: list[str]) -> bool:
        return keys == [LEFT.format(2)]

    def get(self, key: str) -> bytes:
        return b"7"


class ClosedStore:
    def check(self, keys: list[str]) -> bool:
        raise ChannelClosed("the supervisor has gone")


def call(store: Any) -> None:
    def function(worker: Any) -> None:
        raise SyncError("a connection was closed")

    consensus = SimpleNamespace(ranks=(0, 2), present=(), await_end=lambda: None)  # worker 1 was lost before
    lifecycle = SimpleNamespace(blames_server=lambda error: False)
    place = SimpleNamespace(consensus=consensus, shared=store)
    joined = JoinedWorker(worker=SimpleNamespace(workers=2), lifecycle=lifecycle, place=place)  # type: ignore[arg-type]  # what it asks of them
    _call_function(function, joined)


def test_who_left_early_is_found_by_its_rank_where_others_were_lost_before() -> None:
    with pytest.raises(SyncError, match="worker 2 left the training function after step 7, others are in it"):
        call(Store())


def test_where_nobody_can_be_asked_the_error_stays_as_it_is() -> None:
    with pytest.raises(SyncError, match="a connection was closed"):
        call(ClosedStore())


def test_an_editor_completes_what_users_call_and_nothing_else() -> None:
    class Parts:
        """Any part: a worker is made of them, and touches none."""

        def __getattr__(self, name: str) -> Any:
            return Parts()

    worker: Any = Worker(Parts(), Parts())  # type: ignore[arg-type]
    assert [name for name in dir(worker) if not name.startswith("_")] == [
        "average",
        "backward",
        "batches",
        "clip_gradients",
        "device",
        "evaluate",
        "gather",
        "is_first",
        "plan",
        "prepare",
        "rank",
        "report",
        "restore",
        "save",
        "save_model",
        "state_dict",
        "step",
        "stepper",
        "wait",
        "workers",
    ]
