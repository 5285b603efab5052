"""CPU tensors stand for those of a device: they go the way that a plan's workers with GPUs would take.

"staged": every tensor is copied to the host and back, as where workers share a GPU. "device": floating-point tensors of
more than one number travel on a communicator, the stand-in for NCCL; votes and objects stay on the host. After a wait
the host reads, so it waits for the device, and is released by an abort with anything as numbers. A file in FAULT_DIR
tells of each communicator that was connected, and of each that was aborted inside a collective. OPTIONS["refuses"]: the
member whose abort inside a collective fails.
"""

from __future__ import annotations

import os
import uuid
from typing import Any

from torch import Tensor

from fake_nccl import FakeNccl, read_after_waits
from paceline.comm.devices.abortable_group import AbortableGroup
from paceline.worker.membership import join_context
from paceline.worker.membership.generation_builder import GenerationBuilder
from scheduled_kills import OPTIONS, left

__all__ = ["have_workers_pretend", "pretend"]


class _Told(FakeNccl):
    """A communicator that leaves word."""

    def connect(self) -> None:
        super().connect()
        _leave("connected")

    def abort(self) -> None:
        if self.is_busy:
            _leave("aborted")
            self.abort_fails = OPTIONS.get("refuses") == self._index
        super().abort()


def have_workers_pretend(train: Any, way: str) -> None:
    """Have the workers of `paceline.run(train)` take that way: each gets the function by pickle, before it joins."""
    train.way = _Pretended(way)


class _Pretended:
    def __init__(self, way: str) -> None:
        self._way = way

    def __reduce__(self) -> tuple[Any, ...]:
        return pretend, (self._way,)


def pretend(way: str) -> None:
    """Have this process, which is a worker, take that way; before it joins a run."""
    patched: list[tuple[Any, str, Any]] = [
        (join_context, "tensor_way", lambda device, wanted: way),
        (GenerationBuilder, "make_communicator", _Told),
        (AbortableGroup, "_is_on_device", _is_large),
        read_after_waits(),
    ]
    for owner, name, value in patched:
        setattr(owner, name, value)


def _leave(word: str) -> None:
    left(f"{word}_{os.getpid()}_{uuid.uuid4().hex}").touch()


def _is_large(group: AbortableGroup, tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 1
