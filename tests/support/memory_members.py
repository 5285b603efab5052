"""The members of a group that shares memory, as threads of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from paceline.comm.group import CompletedTransfer, Transfer
from paceline.comm.shared_memory.arena import Arena
from paceline.comm.shared_memory.shared_group import SharedGroup

__all__ = ["CPU", "LIMIT_S", "Members", "Underneath"]


CPU = torch.device("cpu")


LIMIT_S = 10.0


class Underneath:
    """Stands for torch's group: notes what comes through."""

    shares_memory = False
    hosts = (0,)

    def __init__(self, index: int, size: int) -> None:
        self.index, self.size = index, size
        self.calls: list[str] = []

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.calls.append("allocate")
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: Tensor, *, what: str) -> Transfer:
        self.calls.append(what)
        return CompletedTransfer()

    def all_gather(self, tensor: Tensor, out: Sequence[Tensor], *, what: str) -> None:
        self.calls.append(what)

    def reduce_scatter(self, parts: Sequence[Tensor], out: Tensor, *, what: str) -> None:
        self.calls.append(what)

    def begin_all_to_all(self, rows: Tensor, out: Tensor, *, what: str) -> CompletedTransfer:
        self.calls.append(what)
        return CompletedTransfer()

    def begin_all_gather(self, tensor: Tensor, out: Tensor, *, what: str) -> CompletedTransfer:
        self.calls.append(what)
        return CompletedTransfer()

    def all_to_all(self, parts: Sequence[Tensor], out: Sequence[Tensor], *, what: str) -> None:
        self.calls.append(what)

    def broadcast(self, tensor: Tensor, *, source: int = 0, what: str = "broadcast") -> None:
        self.calls.append(what)

    def gather_objects(self, value: Any) -> list[Any]:
        self.calls.append("gather_objects")
        return [value] * self.size

    def broadcast_object(self, value: Any, *, source: int = 0) -> Any:
        self.calls.append("broadcast_object")
        return value

    def barrier(self) -> None:
        self.calls.append("barrier")

    def settle(self) -> None:
        return

    def close(self) -> None:
        self.calls.append("close")


class Members:
    """The members of one group."""

    def __init__(self, size: int, **settings: Any) -> None:
        first = Arena.create(size=size)
        self.arenas = [first, *(Arena.open(first.address, index=index, size=size) for index in range(1, size))]
        for arena in self.arenas:
            arena.watch_members()
        self.under = [Underneath(index, size) for index in range(size)]
        self.groups = [
            SharedGroup(under, arena, **{"timeout_s": LIMIT_S, **settings})
            for under, arena in zip(self.under, self.arenas, strict=True)
        ]

    def each(self, function: Callable[[SharedGroup], Any], *, only: int | None = None) -> list[Any]:
        """What `function(group)` returns, or raises, for each member."""
        with ThreadPoolExecutor(len(self.groups)) as pool:
            futures = [pool.submit(function, group) for group in self.groups[:only]]
            errors = [future.exception() for future in futures]
            return [error or future.result() for error, future in zip(errors, futures, strict=True)]

    def close(self) -> None:
        for group in self.groups:
            group.close()
