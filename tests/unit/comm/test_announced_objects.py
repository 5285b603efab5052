"""An object that another worker announces larger than the host's memory is refused by name, before it takes any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.comm import group as module
from paceline.comm.group import Group, SingleWorkerGroup, room_for_object
from paceline.errors import SyncError


class Announced(SingleWorkerGroup):
    """Two members, of which the other one announces an object of some bytes."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self._num_bytes = num_bytes

    def broadcast(self, tensor: Tensor, *, source: int = 0, what: str = "broadcast") -> None:
        if what != "broadcast object" or len(tensor) != module.FIRST_BYTES:
            raise AssertionError("nothing may be received into room that there is not")
        tensor[: module.LENGTH_BYTES].view(torch.int64)[0] = self._num_bytes


@pytest.mark.parametrize(
    ("num_bytes", "said"),
    [
        (3 << 30, "3,221,225,472 bytes, and this host has 2.00 GiB of memory left"),
        (1 << 62, "2.00 GiB"),
        (-1, "-1 bytes"),
    ],
)
def test_an_object_without_room_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, num_bytes: int, said: str) -> None:
    monkeypatch.setattr(module, "free_bytes", lambda: 2 << 30)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("it took memory"))
    with pytest.raises(SyncError, match=f"an object of worker 1 is announced with .*{said}"):
        receives: Any = Group.broadcast_object  # a part of a group that needs no process group
        receives(Announced(num_bytes), None, source=1)


def test_small_objects_do_not_ask_how_much_memory_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> Any:
        raise AssertionError("that costs a look at the system for each object")

    monkeypatch.setattr(module, "free_bytes", asked)
    assert len(room_for_object(1 << 20, "an object of worker 1")) == 1 << 20
