"""Who writes what of a checkpoint: one worker all of it, or each worker of the first replica what it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from paceline.checkpoint.dcp_parts import Where, piece_key
from paceline.checkpoint.parts import Parts, PartWriter
from paceline.checkpoint.writer import Writer
from paceline.comm.split import Slice, boxes, local_part
from paceline.errors import CheckpointError
from paceline.events import Event
from paceline.worker.axes import Axes
from paceline.worker.home import Home
from paceline.worker.mail import WritersMail

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
        staging: Path | None = None,
    ) -> None:
        self._staging = staging
        self._directory, self._keep, self._on_event, self._index = directory, keep, on_event, index
        self._tidies = tidies
        self._axes = axes
        self._parts: Parts | None = None
        if axes.writers > 1 or axes.rows is not None:
            place = directory.parent / f"attempt_{attempt}" / f"mail{axes.life}"
            mail = WritersMail(store, prefix=f"paceline/save_{attempt}{axes.life}", folder=place)
            self._parts = Parts(index=index, count=axes.writers, mail=mail, timeout_s=timeout_s)
        self._writer: Writer | PartWriter | None = None

    @property
    def is_warm(self) -> bool:
        """Whether there is nothing to do ahead of a save, or it has been done."""
        return self._writer is not None

    def warm(self, tensors: Mapping[str, Tensor], cuts: Mapping[str, Slice], homes: Mapping[str, Home]) -> None:
        """Get memory for saves in the background."""
        self._opened().warm(self._mine(tensors, cuts, homes)[0])

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        cuts: Mapping[str, Slice],
        homes: Mapping[str, Home],
        state: Mapping[str, Any],
        about: Mapping[str, Any],
    ) -> None:
        """Copy what this worker writes, and return; `cuts` are of tensors that are smaller than the whole, `homes` say
        who writes whole ones (else the first does), `state` and `about` are the first one's word."""
        writer = self._opened()
        mine, where = self._mine(tensors, cuts, homes)
        if isinstance(writer, Writer):
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

    def _opened(self) -> Writer | PartWriter:
        if self._writer is None:
            if self._parts is not None and self._index > 0:
                self._writer = PartWriter(self._parts, staging=self._staging)
            else:
                self._writer = Writer(
                    self._directory,
                    keep=self._keep,
                    on_event=self._on_event,
                    parts=self._parts,
                    tidies=self._tidies,
                    staging=self._staging,
                )
        return self._writer

    def _mine(
        self, tensors: Mapping[str, Tensor], cuts: Mapping[str, Slice], homes: Mapping[str, Home]
    ) -> tuple[dict[str, Tensor], dict[str, Where]]:
        """What this worker writes: its pieces of split tensors, and whole ones of which it is the home.

        Workers along an axis on which a tensor is not split hold the same of it: the home has the word.
        """
        if self._parts is None:
            return dict(tensors), {}
        mine: dict[str, Tensor] = {}
        where: dict[str, Where] = {}
        for name, tensor in tensors.items():
            home = homes.get(name) or Home(tensor=None if name in cuts else 0)
            if not self._axes.is_at(home):
                continue
            try:
                found = boxes(tensor, cuts.get(name))
            except ValueError as error:
                raise CheckpointError(f"cannot store {name}: {error}") from None
            if found is None and self._is_first(home):
                mine[name] = local_part(tensor)
            has_part = home.tensor in (None, self._axes.tensor.index)
            for number, box in enumerate(found or () if has_part else ()):
                key = piece_key(name, number)
                mine[key], where[key] = box.part, Where(name, box.shape, box.offsets)
        return mine, where

    def _is_first(self, home: Home) -> bool:
        """Whether this worker has the word on what is whole."""
        axes = self._axes
        same = axes.inside if axes.expert_rows is None else axes.expert_rows.group  # their rows are of one tensor
        at = (home.expert or 0, home.tensor or 0)
        return same.index == 0 and at == (axes.experts.index, axes.tensor.index)
