"""The numbers that a program writes for TensorBoard, as rows of a run: a step, its loss, and the others by name.

TensorBoard's own rules say which numbers belong together: `tf.summary.scalar("loss", value, step=140)` is of step 140,
and the `TensorBoard` callback of Keras writes `epoch_loss` with the number of the epoch, from 0, and `batch_loss` with
that of the step. Where a program writes both, numbers of an epoch belong to the last step before them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

from paceline.compat.tensorflow.event_file import EventFile, Scalar

__all__ = ["ProgramRow", "ProgramScalars"]

OF_EPOCH = "epoch_"  # Keras' callback: the step is the epoch
LOSSES = frozenset({"loss", "batch_loss", "train_loss", "training_loss", "total_loss", "train/loss", "loss/train"})
EPOCH_LOSS = "epoch_loss"  # the loss where none of each step is written
HELD_OUT = re.compile(r"(val|valid|validation|test|eval|evaluation|dev)([^a-z].*)?", re.IGNORECASE)
MOST_NAMES = 100  # tags that are taken


@dataclasses.dataclass(kw_only=True, slots=True)
class ProgramRow:
    """What a program has said of a step; `epoch` counts from 0."""

    step: int
    time: float
    epoch: int | None = None
    loss: float | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict[str, float])


class ProgramScalars:
    """Reads a program's event files, and makes rows of them."""

    def __init__(self) -> None:
        self._files: dict[Path, EventFile] = {}
        self._names: dict[tuple[Path, str], str] = {}  # what a folder's tag is called
        self._last_step: int | None = None  # of those that are no epochs
        self._steps: dict[int, int] = {}  # an epoch -> the last step before its numbers

    def take(self, paths: Iterable[Path], *, is_last: bool = False) -> list[ProgramRow]:
        """Return what has come since the last call, by time. `paths`: the files that are open now; those that were open
        before are read, too. `is_last`: the files are read to their ends, however long they are."""
        for path in paths:
            if path not in self._files:
                self._files[path] = EventFile(path)
        rows: dict[tuple[int, int | None], ProgramRow] = {}
        for file in sorted(self._files.values(), key=lambda one: _is_held_out(one.path.parent)):
            for scalar in file.read(is_last=is_last):
                self._add(scalar, file.path.parent, rows)
        return sorted(rows.values(), key=lambda row: (row.time, row.step))

    def _add(self, scalar: Scalar, folder: Path, rows: dict[tuple[int, int | None], ProgramRow]) -> None:
        name = self._name(folder, scalar.tag)
        if name is None or scalar.step < 0:
            return
        epoch = scalar.step if scalar.tag.startswith(OF_EPOCH) else None
        step = scalar.step if epoch is None else self._step_of(epoch)
        row = rows.setdefault((step, epoch), ProgramRow(step=step, time=scalar.time, epoch=epoch))
        row.time = max(row.time, scalar.time)
        if epoch is None and not _is_held_out(folder):
            self._last_step = step
        is_loss = name.lower() in LOSSES or (name == EPOCH_LOSS and self._last_step is None)
        if is_loss and row.loss is None:
            row.loss = scalar.value
        else:
            row.metrics[name] = scalar.value

    def _step_of(self, epoch: int) -> int:
        """The step after which an epoch had ended; the number of epochs where no steps are written."""
        if self._last_step is None:
            return epoch + 1
        return self._steps.setdefault(epoch, self._last_step)

    def _name(self, folder: Path, tag: str) -> str | None:
        """A tag's own name in the first folder that has it, and elsewhere the folder's before it; None: too many."""
        name = self._names.get((folder, tag))
        if name is None and len(self._names) < MOST_NAMES:
            is_taken = _is_held_out(folder) or tag in self._names.values()
            name = self._names[folder, tag] = f"{folder.name}/{tag}" if is_taken else tag
        return name


def _is_held_out(folder: Path) -> bool:
    """Whether a folder's name says that its numbers are of data that is not trained on."""
    return HELD_OUT.fullmatch(folder.name) is not None
