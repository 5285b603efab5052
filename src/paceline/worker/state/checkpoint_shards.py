"""Which worker writes what of a checkpoint: one worker all of it, or each worker of the first replica what it holds.

The writers of one checkpoint exchange short messages over the key-value store. Where the supervisor is lost, they use
files. The store is preferred because it works on a full disk. But it belongs to the supervisor, and workers whose
supervisor was killed save before they leave. A worker that finds the store lost writes its newest messages to files,
since others may not have read them. It goes on with files in the run's directory, which the writers share anyway. All
workers lose the store together, so all come to the files. A worker with nothing left to send still has to look now and
then.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from paceline.checkpoint.async_writer import AsyncWriter
from paceline.checkpoint.dcp_shards import TensorRegion, piece_key
from paceline.checkpoint.sharded_writer import ShardWriter, WriterGroup
from paceline.comm.messages.json_channel import ChannelClosed
from paceline.comm.sharded_tensors import TensorSlice, boxes, local_part
from paceline.errors import CheckpointError
from paceline.events import Event
from paceline.regular_files import read_regular
from paceline.run_lock import newer_start
from paceline.worker.topology.parallel_groups import ParallelGroups, StateOwner

__all__ = ["CheckpointShardWriter", "WriterMessages", "written_pieces"]


class CheckpointShardWriter:
    """One worker's part of the checkpoints of a run; nothing is opened before the first save."""

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        on_event: Callable[[Event], None],
        axes: ParallelGroups,
        index: int,
        store: dist.Store,
        attempt: int,
        timeout_s: float,
        tidies: bool,
        staging: Path | None = None,
    ) -> None:
        self._staging = staging
        self._directory, self._keep, self._on_event, self._index = directory, keep, on_event, index
        self._tidies, self._attempt = tidies, attempt
        self._axes = axes
        self._parts: WriterGroup | None = None
        if _writes_in_parts(axes):
            place = directory.parent / f"attempt_{attempt}" / f"mail{axes.life}"
            mail = WriterMessages(store, prefix=f"paceline/save_{attempt}{axes.life}", folder=place)
            self._parts = WriterGroup(index=index, count=axes.writers, mail=mail, timeout_s=timeout_s)
        self._writer: AsyncWriter | ShardWriter | None = None

    @property
    def is_warm(self) -> bool:
        """Whether there is nothing to do ahead of a save, or it has been done."""
        return self._writer is not None

    def warm(
        self, tensors: Mapping[str, Tensor], slices: Mapping[str, TensorSlice], owners: Mapping[str, StateOwner]
    ) -> None:
        """Get memory for saves in the background."""
        self._opened().warm(written_pieces(self._axes, tensors, slices, owners)[0])

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        slices: Mapping[str, TensorSlice],
        owners: Mapping[str, StateOwner],
        state: Mapping[str, Any],
        about: Mapping[str, Any],
    ) -> None:
        """Copy what this worker writes, and return. `slices` are of tensors that are smaller than the whole. `owners`
        name the workers that write whole ones (else the first does); `state` and `about` are those of the first."""
        writer = self._opened()
        mine, where = written_pieces(self._axes, tensors, slices, owners)
        if isinstance(writer, AsyncWriter):
            writer.save(step, mine, state, about, where=where)
        else:
            writer.save(mine, where)

    def is_written(self, timeout_s: float) -> bool:
        """Wait so long at most for what is being written here; returns whether nothing is any more."""
        return self._writer is None or self._writer.is_written(timeout_s)

    def wait(self) -> None:
        """Wait for the save under way; raises CheckpointError when it failed."""
        if self._writer is not None:
            self._writer.wait()

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for the last save; raises CheckpointError when it failed, or takes longer."""
        if self._writer is not None:
            self._writer.close(timeout_s)

    def _opened(self) -> AsyncWriter | ShardWriter:
        if self._writer is None:
            if self._parts is not None and self._index > 0:
                self._writer = ShardWriter(self._parts, staging=self._staging)
            else:
                self._writer = AsyncWriter(
                    self._directory,
                    keep=self._keep,
                    on_event=self._on_event,
                    parts=self._parts,
                    tidies=self._tidies,
                    staging=self._staging,
                    newer_start=functools.partial(newer_start, self._directory.parent, self._attempt),
                )
        return self._writer


def written_pieces(
    axes: ParallelGroups,
    tensors: Mapping[str, Tensor],
    slices: Mapping[str, TensorSlice],
    owners: Mapping[str, StateOwner],
) -> tuple[dict[str, Tensor], dict[str, TensorRegion]]:
    """What this worker writes: its pieces of split tensors, with their places, and whole ones that it owns.

    Workers along an axis on which a tensor is not split hold the same of it: its owner writes it.
    """
    if not _writes_in_parts(axes):
        return dict(tensors), {}
    mine: dict[str, Tensor] = {}
    where: dict[str, TensorRegion] = {}
    for name, tensor in tensors.items():
        owner = owners.get(name) or StateOwner(tensor=None if name in slices else 0)
        if not axes.is_at(owner):
            continue
        try:
            found = boxes(tensor, slices.get(name))
        except ValueError as error:
            raise CheckpointError(f"cannot store {name}: {error}") from None
        if found is None and _is_first(axes, owner):
            mine[name] = local_part(tensor)
        has_part = owner.tensor in (None, axes.tensor.index)
        for number, box in enumerate(found or () if has_part else ()):
            key = piece_key(name, number)
            mine[key], where[key] = box.part, TensorRegion(name, box.shape, box.offsets)
    return mine, where


def _writes_in_parts(axes: ParallelGroups) -> bool:
    return axes.writers > 1 or axes.rows is not None


def _is_first(axes: ParallelGroups, owner: StateOwner) -> bool:
    """Whether this worker writes what is whole."""
    if owner.is_here is not None:
        return owner.is_here
    same = axes.shard_group if axes.expert_rows is None else axes.expert_rows.group  # their rows are of one tensor
    at = (owner.expert or 0, owner.tensor or 0)
    return same.index == 0 and at == (axes.experts.index, axes.tensor.index)


T = TypeVar("T")

KEPT = 2  # newest messages: of the save under way, and of the one before


class WriterMessages:
    """The messages of one writer. `prefix` is that of its keys in the store; `folder` is for files, and need not exist
    yet."""

    def __init__(self, store: dist.Store, *, prefix: str, folder: Path) -> None:
        self._store, self._prefix, self._folder = store, prefix, folder
        self._has_store = True
        self._sent: dict[str, str] = {}  # the newest

    def put(self, name: str, text: str) -> None:
        """Leave a text under a name, in place of an earlier one; OSError where there are only files, and no room."""
        self._sent[name] = text
        for old in list(self._sent)[:-KEPT]:
            del self._sent[old]
        self._on_store(lambda: self._store.set(self._key(name), text))
        if not self._has_store:
            self._write(name, text)

    def look(self, name: str) -> str | None:
        """Return what was put under a name; None: nothing yet."""
        key = self._key(name)
        found = self._on_store(lambda: self._store.get(key).decode() if self._store.check([key]) else None)
        if self._has_store:
            return found
        with contextlib.suppress(FileNotFoundError):
            return read_regular(self._file(name)).decode()
        return None

    def forget(self, name: str) -> None:
        """Drop what was put under a name, if anything was."""
        self._sent.pop(name, None)
        self._on_store(lambda: self._store.delete_key(self._key(name)))
        if not self._has_store:
            self._file(name).unlink(missing_ok=True)

    def _on_store(self, ask: Callable[[], T]) -> T | None:
        """What the key-value store answers, while it is there."""
        if self._has_store:
            try:
                return ask()
            except ChannelClosed:
                for name, text in self._sent.items():
                    self._write(name, text)  # where there is no room, this is tried again
                self._has_store = False
        return None

    def _write(self, name: str, text: str) -> None:
        path = self._file(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)  # a reader finds all of it or nothing

    def _file(self, name: str) -> Path:
        return self._folder / name.replace("/", "_")

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"
