"""Who writes what of a checkpoint: one worker all of it, or each worker of the first replica the rows that it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from paceline.checkpoint.dcp_parts import Rows
from paceline.checkpoint.parts import Parts, PartWriter
from paceline.checkpoint.writer import Writer
from paceline.comm.split import box_of, local_part
from paceline.errors import CheckpointError
from paceline.events import Event
from paceline.worker.axes import Axes

__all__ = ["Keeper"]


class Keeper:
    """One worker's part of the checkpoints of a run; nothing is opened before the first save."""

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        on_event: Callable[[Event], None],
        axes: Axes,
        index: int,
        store: dist.Store,
        attempt: int,
        timeout_s: float,
        tidies: bool,
    ) -> None:
        self._directory, self._keep, self._on_event, self._index = directory, keep, on_event, index
        self._tidies = tidies
        self._parts: Parts | None = None
        if axes.is_split:
            mail = StoreMail(store, f"paceline/save_{attempt}")
            self._parts = Parts(index=index, count=axes.each, mail=mail, timeout_s=timeout_s)
        self._writer: Writer | PartWriter | None = None

    @property
    def is_warm(self) -> bool:
        """Whether there is nothing to do ahead of a save, or it has been done."""
        return self._writer is not None

    def warm(self, tensors: Mapping[str, Tensor]) -> None:
        """Get memory for saves in the background."""
        self._opened().warm(self._mine(tensors)[0])

    def save(
        self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], about: Mapping[str, Any]
    ) -> None:
        """Copy what this worker writes, and return; `state` and `about` are the first one's word."""
        writer = self._opened()
        mine, rows = self._mine(tensors)
        if isinstance(writer, Writer):
            writer.save(step, mine, state, about, rows=rows)
        else:
            writer.save(mine, rows)

    def wait(self) -> None:
        """Wait for the save under way; raises CheckpointError when it failed."""
        if self._writer is not None:
            self._writer.wait()

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for the last save; raises CheckpointError when it failed, or takes longer."""
        if self._writer is not None:
            self._writer.close(timeout_s)

    def _opened(self) -> Writer | PartWriter:
        if self._writer is None:
            if self._parts is not None and self._index > 0:
                self._writer = PartWriter(self._parts)
            else:
                self._writer = Writer(
                    self._directory,
                    keep=self._keep,
                    on_event=self._on_event,
                    parts=self._parts,
                    tidies=self._tidies,
                )
        return self._writer

    def _mine(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Rows]]:
        """What this worker writes: its rows of split tensors; the first one also what everybody has."""
        if self._parts is None:
            return dict(tensors), {}
        mine: dict[str, Tensor] = {}
        rows: dict[str, Rows] = {}
        for name, tensor in tensors.items():
            try:
                box = box_of(tensor)
            except ValueError as error:
                raise CheckpointError(f"cannot store {name}: {error}") from None
            if box is not None:
                mine[name], rows[name] = local_part(tensor), Rows(box.shape, box.first)
            elif self._index == 0:
                mine[name] = local_part(tensor)
        return mine, rows


class StoreMail:
    """Short texts between workers, through the store that they met by."""

    def __init__(self, store: dist.Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def put(self, name: str, text: str) -> None:
        self._store.set(f"{self._prefix}/{name}", text)

    def look(self, name: str) -> str | None:
        key = f"{self._prefix}/{name}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def forget(self, name: str) -> None:
        self._store.delete_key(f"{self._prefix}/{name}")
