"""A copy of a folder in object storage of which only the pieces come that somebody looks at.

What is small, and what weights are made from, comes at once: configuration, tokenizer, index, and the headers of the
files of weights. These make up a folder of their own, whose files of weights end behind their headers: nobody who opens
one by its name finds holes in it, for it is refused as cut short. The weights themselves lie in the folder that
`host_copy` fills, with holes (`copied_pieces.py`), and are mapped in such a way that no hole can be read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.hub.copied_pieces import PIECE_BYTES, CopiedPieces, pieces_of
from paceline.hub.host_copy import PREFIX
from paceline.hub.host_lock import STILL_S, alone
from paceline.hub.mapped_files import DTYPES
from paceline.hub.stored_folder import FolderChanged, StoredFolder, look_at
from paceline.hub.stored_weights import MOST_HEADER_BYTES, StoredWeights, stored_weights
from paceline.parallel.absent_files import map_absent
from paceline.parallel.absent_tensors import as_absent
from paceline.storage.object_store import ObjectStore

__all__ = ["PartCopy", "part_copy"]


def part_copy(address: str, cache: Path, *, still_s: float = STILL_S) -> PartCopy:
    """Return this host's copy of a folder, with all that is small in it.

    Raises CheckpointError where the folder has no weights or the disk no room, and StorageError.
    """
    stored = look_at(ObjectStore(address))
    return PartCopy(stored, cache / f"{PREFIX}{stored.identity}", still_s=still_s)


class PartCopy:
    """The copy, as the source of pieces that its mapped files ask."""

    def __init__(self, stored: StoredFolder, whole: Path, *, still_s: float) -> None:
        self.stored, self.identity, self.piece_bytes = stored, stored.identity, PIECE_BYTES
        self._whole, self._partial, self._still_s = whole, whole.with_suffix(".partial"), still_s
        self.folder = whole.with_suffix(".headers")
        self._stores: dict[int, ObjectStore] = {}  # by process: a forked one has none of its parent's connections
        whole.parent.mkdir(parents=True, exist_ok=True)
        with self._alone():
            self._begin()
            self._inodes = {name: os.stat(self._place() / name).st_ino for name in stored.weights}

    def weights(self) -> StoredWeights | None:
        """Return the tensors of the files, none of whose bytes can be read before somebody asks for them. None: some
        are of a type that can be read by safetensors' own package alone."""
        found = stored_weights(self.folder, {name: one.num_bytes for name, one in self.stored.objects.items()})
        if any(one.type not in DTYPES for one in found.tensors.values()):
            return None
        with self._alone():
            opened = {name: dict(self._mapped(name, found)) for name in found.files}
        return dataclasses.replace(found, opened=opened)

    def bring(self, pieces: Mapping[str, Collection[int]]) -> None:
        """Have pieces on this host's disk. One process of the host brings some; the others wait."""
        size = self.piece_bytes
        with self._alone():
            place = self._place()
            for name in pieces:
                if not (place / name).exists() or os.stat(place / name).st_ino != self._inodes[name]:
                    raise CheckpointError(
                        f"{place} is not what it was when this process began to read {self.stored.address}: it was "
                        "removed, or the weights were changed while they were read: start again"
                    )
            if place == self._partial:
                wanted = [(name, number * size) for name, numbers in pieces.items() for number in numbers]
                self._bring(wanted)

    def _begin(self) -> None:
        """Have the small files, the headers, and files of the right size for the rest."""
        if not self._whole.is_dir():
            self._partial.mkdir(exist_ok=True)
            weights = set(self.stored.weights)
            small: list[tuple[str, int]] = []
            for name, one in self.stored.objects.items():
                if not one.num_bytes:
                    (self._partial / name).touch(0o600)  # nothing comes of it
                small += pieces_of(name, 0, min(1, one.num_bytes) if name in weights else one.num_bytes)
            self._bring(small)
            lengths = {name: self._header_bytes(name) for name in weights}
            self._bring([piece for name, length in lengths.items() for piece in pieces_of(name, 0, length)])
        if not self.folder.is_dir():
            self._make_headers()

    def _make_headers(self) -> None:
        made = self.folder.with_suffix(".unfinished")
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
        weights = set(self.stored.weights)
        for name, one in self.stored.objects.items():
            length = self._header_bytes(name) if name in weights else one.num_bytes
            with open(self._place() / name, "rb") as file:
                (made / name).write_bytes(file.read(length))
        made.rename(self.folder)

    def _header_bytes(self, name: str) -> int:
        """How many bytes of a file are its header; of what is no safetensors file, not more than it has."""
        with open(self._place() / name, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
        return min(self.stored.objects[name].num_bytes, 8 + min(length, MOST_HEADER_BYTES))

    def _mapped(self, file: str, found: StoredWeights) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a file."""
        try:
            mapped = map_absent(self._place() / file, self.stored.objects[file].num_bytes, name=file, source=self)
        except OSError as error:
            raise CheckpointError(f"{self._place() / file} cannot be mapped: {error.strerror}") from error
        for name, one in found.tensors.items():
            if one.file == file:
                dtype, count = DTYPES[one.type], math.prod(one.shape)
                if count * dtype.itemsize != one.num_bytes:
                    raise CheckpointError(
                        f"{name} in {self.stored.address}/{file} has {one.num_bytes} bytes, and its shape "
                        f"{list(one.shape)} in {one.type} takes {count * dtype.itemsize}: write the file again"
                    )
                if count:
                    numbers = torch.frombuffer(mapped, dtype=dtype, count=count, offset=one.offset)
                    yield name, as_absent(numbers.view(one.shape))
                else:
                    yield name, torch.empty(one.shape, dtype=dtype)

    def _bring(self, wanted: list[tuple[str, int]]) -> None:
        try:
            CopiedPieces(self.stored, self._partial).bring(self._store(), wanted)
        except FolderChanged:
            shutil.rmtree(self._partial)  # nobody will ask for this version again
            raise

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        return alone(self._whole, self._still_s)

    def _place(self) -> Path:
        """Where the files are: another process may have brought the rest of them."""
        return self._whole if self._whole.is_dir() else self._partial

    def _store(self) -> ObjectStore:
        if os.getpid() not in self._stores:
            self._stores[os.getpid()] = ObjectStore(self.stored.address)
        return self._stores[os.getpid()]
