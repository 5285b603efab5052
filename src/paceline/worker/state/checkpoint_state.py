"""A run's state in a checkpoint on disk: the first worker has it open, and all workers fill their objects together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from paceline.checkpoint.reader import Checkpoint, open_checkpoint
from paceline.comm.group import WorkerGroup
from paceline.worker.membership.consensus import RunTogether
from paceline.worker.state.checkpoint_loading import load_model, load_optimizer
from paceline.worker.state.codec_state import CodecState, is_codec_state
from paceline.worker.state.frozen_weights import FrozenWeights, left_out_names
from paceline.worker.state.run_state import OBJECTS, RunState
from paceline.worker.state.state_registry import StateRegistry

__all__ = ["CheckpointState", "SharedCheckpoint"]


class SharedCheckpoint:
    """A checkpoint that the first worker reads for all. The others know its path only."""

    def __init__(self, path: str, *, group: WorkerGroup, together: RunTogether, opened: Checkpoint | None) -> None:
        self._path, self._group, self._together, self._opened = path, group, together, opened

    def fill(self, load: Callable[[Checkpoint | None, WorkerGroup], None]) -> None:
        """Fill something on all workers, in an operation of all of them."""
        self._together(lambda: load(self.opened(), self._group))

    def opened(self) -> Checkpoint | None:
        """The checkpoint on the first worker, None on others. Where the one that opened it was lost, the next one
        opens it too."""
        if self._group.index > 0:
            return None
        if self._opened is None:
            self._opened = open_checkpoint(Path(self._path), verified=True)
        return self._opened


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointState(RunState):
    """A state on disk: its plain values are known to all workers, its tensors are read when something is filled."""

    files: SharedCheckpoint
    frozen: FrozenWeights  # of the same workers
    drops_feedback: Callable[[], None]  # is called on the first worker where error feedback is stored, and not used

    def fill_model(self, name: str, registry: StateRegistry) -> None:
        """Fill a prepared model, on all workers together."""
        model, plain = registry.models[name], self.plain[OBJECTS]
        left_out = left_out_names(plain)

        def load(source: Checkpoint | None, group: WorkerGroup) -> None:
            self.frozen.require(name, left_out, group)
            load_model(
                *(name, model, plain, source, group, registry.slices, registry.owners),
                left_out=left_out,
                device=registry.device,
            )

        self.files.fill(load)

    def fill_optimizer(self, name: str, registry: StateRegistry) -> None:
        """Fill a prepared optimizer, on all workers together."""
        optimizer, plain = registry.optimizers[name], self.plain[OBJECTS]
        self.files.fill(lambda source, group: load_optimizer(name, optimizer, registry, plain, source, group))

    def fill_codecs(self, codecs: CodecState, *, is_own: bool) -> None:
        """Have codecs go on with what all replicas remembered, in any number of replicas."""
        if codecs.is_kept:
            self.files.fill(codecs.load)
        elif (source := self.files.opened()) is not None and any(map(is_codec_state, source.names)):
            self.drops_feedback()
