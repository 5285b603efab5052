"""Files of weights of which only some pieces have come: what has not come cannot be read.

A file on the disk has its full size, and holes where pieces are missing; a hole reads as zeros. So a file is mapped
without the right to read it, by `mprotect`, before anybody else knows the address. A piece is opened when its source
has brought it. Whatever touches another one, in whatever way, ends by a fault and never gets a zero; system calls
return EFAULT. Tensors in such memory ask for their pieces themselves (`absent_tensors.py`).
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from paceline.parallel.torch_functions import on_parts

__all__ = [
    "AbsentFile",
    "PieceSource",
    "bring_pieces",
    "file_of",
    "is_absent",
    "keeping_parts",
    "map_absent",
    "parts_are_kept",
]

READ_WRITE, NOTHING = mmap.PROT_READ | mmap.PROT_WRITE, 0


class PieceSource(Protocol):
    """Where the pieces of several files come from."""

    @property
    def identity(self) -> str:
        """What is the same on every host exactly where the bytes are."""
        ...

    @property
    def piece_bytes(self) -> int: ...

    def bring(self, pieces: Mapping[str, Collection[int]]) -> None:
        """Have pieces on the disk, given by the files' names and the pieces' numbers."""
        ...


class AbsentFile:
    """One mapped file: which of its pieces this process may read."""

    def __init__(self, begin: int, num_bytes: int, *, name: str, source: PieceSource) -> None:
        self.begin, self.end = begin, begin + num_bytes  # addresses
        self.name, self.source = name, source
        self._open: set[int] = set()

    def missing(self, begin: int, end: int) -> list[int]:
        """Return the numbers of the pieces between two addresses that cannot be read."""
        size = self.source.piece_bytes
        first, last = (begin - self.begin) // size, -(-(end - self.begin) // size)
        return [number for number in range(first, last) if number not in self._open]

    def open(self, pieces: Iterable[int]) -> None:
        """Let these pieces be read: they are on the disk. Raises OSError."""
        size = self.source.piece_bytes
        numbers = sorted(pieces)
        for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
            same = [number for _, number in run]
            begin = self.begin + same[0] * size
            _protect(begin, min(self.end, begin + len(same) * size) - begin, READ_WRITE)
        self._open.update(numbers)


_files: tuple[AbsentFile, ...] = ()  # by address; never changed in place, since a finalizer may come at any time
_changing, _bringing = threading.RLock(), threading.RLock()
_kept = 0  # how often `keeping_parts` is entered


class _AbsentMapping(mmap.mmap):
    """Forgets its file before its addresses may become those of other memory."""

    def __del__(self) -> None:
        global _files
        with _changing:
            _files = tuple(one for one in _files if one is not vars(self).get("about"))


def map_absent(path: Path, num_bytes: int, *, name: str, source: PieceSource) -> mmap.mmap:
    """Map a file of whose bytes none can be read before `bring_pieces`, for `torch.frombuffer`; it stays mapped as long
    as such tensors live. Raises OSError."""
    global _files
    with open(path, "rb") as file:
        mapped = _AbsentMapping(file.fileno(), num_bytes, flags=mmap.MAP_PRIVATE, prot=READ_WRITE)
    begin = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
    about = AbsentFile(begin, num_bytes, name=name, source=source)
    _protect(about.begin, num_bytes, NOTHING)
    with _changing:
        vars(mapped)["about"] = about
        _files = tuple(sorted((*_files, about), key=_begin))
    return mapped


def file_of(tensor: Tensor) -> AbsentFile | None:
    """Return the file in whose mapping a tensor lies, whether its pieces have come or not."""
    files = _files
    if not files or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return None
    with on_parts():
        begin = tensor.data_ptr()
    place = bisect.bisect_right(files, begin, key=_begin) - 1
    found = files[place] if place >= 0 else None
    return found if found is not None and begin < found.end else None


def is_absent(tensor: Tensor) -> bool:
    """Whether some of a tensor's bytes cannot be read yet."""
    found = file_of(tensor)
    return found is not None and bool(found.missing(*_extent(tensor)))


def bring_pieces(tensors: Iterable[Tensor]) -> None:
    """Have all bytes of these tensors here, with as few requests as possible; of a view only those that it spans.

    Raises what their sources raise, and OSError where memory cannot be opened.
    """
    held = list(tensors)  # their memory must not become that of others meanwhile
    with _bringing:
        wanted: dict[int, tuple[PieceSource, dict[AbsentFile, set[int]]]] = {}
        for one in held:
            about = file_of(one)
            if about is not None and (missing := about.missing(*_extent(one))):
                _, files = wanted.setdefault(id(about.source), (about.source, {}))
                files.setdefault(about, set()).update(missing)
        for source, files in wanted.values():
            pieces: dict[str, set[int]] = {}
            for about, numbers in files.items():
                pieces.setdefault(about.name, set()).update(numbers)
            source.bring(pieces)
            for about, numbers in files.items():
                about.open(numbers)


@contextlib.contextmanager
def keeping_parts(is_on: bool) -> Iterator[None]:
    """Within it, models are prepared of which this process keeps parts alone: files need not come as a whole."""
    global _kept
    _kept += is_on
    try:
        yield
    finally:
        _kept -= is_on


def parts_are_kept() -> bool:
    """Whether `keeping_parts` is in force."""
    return _kept > 0


def _begin(about: AbsentFile) -> int:
    return about.begin


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The addresses from the first to behind the last byte of a tensor."""
    with on_parts():
        begin = tensor.data_ptr()
        if not tensor.numel():
            return begin, begin
        steps = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
        return begin, begin + (steps + 1) * tensor.element_size()


def _protect(begin: int, length: int, rights: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(begin), ctypes.c_size_t(length), ctypes.c_int(rights)):
        number = ctypes.get_errno()
        remedy = "; raise the limit vm.max_map_count" if number == errno.ENOMEM else ""
        raise OSError(number, f"memory of weights cannot be opened: {os.strerror(number)}{remedy}")
