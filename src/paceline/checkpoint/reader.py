"""Finds and reads checkpoints: in one process, without collectives, and without running code from the files.

Opening checks the marker, every file's size and the checksums of the small files. Tensors are read on demand, one by
one, each checked against its own checksum. Tensors stored in parts that are no rows have none, so a checkpoint that
will be used is opened with `verified=True`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.checkpoint_dir import CommitMarker, FoundCheckpoint, find, read_commit_marker, verify
from paceline.checkpoint.dcp_read import INDEX, Entry, read_entry, read_index
from paceline.checkpoint.state_tree import decode_state
from paceline.errors import CheckpointError
from paceline.regular_files import read_regular

__all__ = ["STATE", "Checkpoint", "FoundCheckpoint", "find", "open_checkpoint"]

STATE = "state.pt"
_NUM_LISTED = 10


def open_checkpoint(path: Path, *, verified: bool = False) -> Checkpoint:
    """Open a complete checkpoint; raises CheckpointError naming a file that is missing, damaged or not plain data.

    With `verified` all of its files are read first, and compared with their checksums.
    """
    try:
        mark = verify(path) if verified else read_commit_marker(path)
        return Checkpoint(
            path, mark, read_index(_checked(path, INDEX, mark)), decode_state(_checked(path, STATE, mark))
        )
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {path} cannot be used: {error}") from error


class Checkpoint:
    """An open checkpoint. Tied tensors have one entry each, but are read once and come back as one object."""

    def __init__(self, path: Path, mark: CommitMarker, entries: Mapping[str, Entry], state: Any) -> None:
        self.path = path
        self.state: Any = state
        self._mark, self._entries = mark, dict(entries)

    @property
    def step(self) -> int:
        """The global step after which it was saved."""
        return self._mark.step

    @property
    def about(self) -> Mapping[str, Any]:
        """What the saver recorded: the plan's text, versions."""
        return self._mark.about

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors."""
        return tuple(self._entries)

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a tensor, without reading it."""
        return torch.Size(self._entry(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor, without reading it."""
        return self._entry(name).dtype

    def ties(self, names: Iterable[str]) -> dict[str, str]:
        """Return names that share a tensor with an earlier one of these names, each with that earlier name."""
        first: dict[Entry, str] = {}
        found = {name: first.setdefault(self._entry(name), name) for name in names}
        return {name: earlier for name, earlier in found.items() if name != earlier}

    def tie(self, groups: Iterable[Sequence[str]]) -> None:
        """Let all names of each group stand for the stored one, where the others are missing.

        For tied names: early versions omitted those whose tensors only later writers had.
        """
        for names in groups:
            stored = [self._entries[name] for name in names if name in self._entries]
            if stored:
                self._entries.update({name: stored[0] for name in names if name not in self._entries})

    def load(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Read tensors (None: all) to the CPU; raises CheckpointError for unknown names and damaged files."""
        wanted = list(self.names if names is None else names)
        if unknown := [name for name in wanted if name not in self._entries]:
            raise CheckpointError(_listing(self.path, [f"{name}: not in the checkpoint" for name in unknown]))
        loaded: dict[str, Tensor] = {}
        read: dict[Entry, Tensor] = {}
        for name in wanted:
            entry = self._entries[name]
            if entry not in read:
                read[entry] = self._read(name, entry)
            loaded[name] = read[entry]
        return loaded

    def load_into(self, targets: Mapping[str, Tensor], *, prefix: str | None = None) -> None:
        """Overwrite tensors of any device in place, one at a time.

        Every name that the checkpoint lacks and every changed shape or dtype is found before anything is overwritten,
        and all are in one CheckpointError. With `prefix`, so are names of the checkpoint that begin with it and have no
        target.
        """
        self.require(targets, prefix=prefix)
        for name, target in targets.items():
            target.detach().copy_(self._read(name, self._entries[name]))

    def require(self, targets: Mapping[str, Tensor], *, prefix: str | None = None) -> None:
        """Raise CheckpointError where `load_into` would, without reading a tensor."""
        problems = [problem for name, target in targets.items() if (problem := self._mismatch(name, target))]
        if prefix is not None:
            extra = [name for name in self.names if name.startswith(prefix) and name not in targets]
            problems += [f"{name}: in the checkpoint, but not in the model" for name in extra]
        if problems:
            raise CheckpointError(_listing(self.path, problems))

    def _read(self, name: str, entry: Entry) -> Tensor:
        try:
            return read_entry(self.path, entry, self._crc32(name, entry))
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint {self.path}: {name} cannot be read: {error}") from error

    def _crc32(self, name: str, entry: Entry) -> int | None:
        """Return a tensor's checksum, which for a tied one stands under its stored name."""
        if name in self._mark.tensor_crc32:
            return self._mark.tensor_crc32[name]
        return next(
            (crc for stored, crc in self._mark.tensor_crc32.items() if self._entries.get(stored) == entry), None
        )

    def _mismatch(self, name: str, target: Tensor) -> str | None:
        entry = self._entries.get(name)
        if entry is None:
            return f"{name}: in the model, but not in the checkpoint"
        if entry.shape != tuple(target.shape):
            return f"{name}: checkpoint has {list(entry.shape)}, the model has {list(target.shape)}"
        if entry.dtype != target.dtype:
            return f"{name}: checkpoint has {_short(entry.dtype)}, the model has {_short(target.dtype)}"
        return None

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise CheckpointError(_listing(self.path, [f"{name}: not in the checkpoint"]))
        return self._entries[name]


def _checked(path: Path, name: str, mark: CommitMarker) -> bytes:
    """Return a small file's contents, checked."""
    if name not in mark.files:
        raise CheckpointError(f"its mark does not name {name}")
    try:
        data = read_regular(path / name)
    except OSError as error:
        raise CheckpointError(f"the file {name} cannot be read: {error.strerror}") from error
    if zlib.crc32(data) != mark.file_crc32.get(name):
        raise CheckpointError(f"the file {name} is damaged: its checksum does not match")
    return data


# Before the names, which are many.
OTHER = (
    "it is of another model, or this one has changed. A run that is to begin anew takes --fresh or another --run-dir"
)


def _listing(path: Path, problems: list[str]) -> str:
    shown = problems[:_NUM_LISTED]
    if len(problems) > _NUM_LISTED:
        shown.append(f"and {len(problems) - _NUM_LISTED} more")
    return f"checkpoint {path} does not fit: {OTHER}:\n  " + "\n  ".join(shown)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
