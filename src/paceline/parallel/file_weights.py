"""Weights that are still the bytes of their files: mapped into memory, and read only where somebody looks at them.

`from_pretrained` of transformers, `safetensors.torch.load_file` and `torch.load(mmap=True)` on the CPU copy nothing.
They map files privately: a page of a file takes memory when it is read, and memory of its own when it is written. So
workers that map the same file have the same weights, and need not send them to each other, which would read and write
all of them; and each worker reads as much of a file as it keeps.

What was changed since is known page by page: the kernel says in /proc/self/pagemap which pages are the file's (bit 61;
Documentation/admin-guide/mm/pagemap.rst). Where it does not say so, a tensor counts as changed.
"""

from __future__ import annotations

import bisect
import collections
import ctypes
import dataclasses
import itertools
import mmap
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy
import numpy.typing
import torch
from torch import Tensor, nn

from paceline.comm.group import WorkerGroup
from paceline.host_memory import give_back_freed
from paceline.parallel.absent_files import file_of
from paceline.parallel.absent_tensors import AbsentParameter, AbsentTensor, come

__all__ = [
    "ORIGIN",
    "FileMappings",
    "FilePlace",
    "WeightFiles",
    "forget_origins",
    "is_code",
    "keep_in_memory",
    "without_same_files",
]

T = TypeVar("T", bound=Tensor)

ORIGIN = "paceline_converted_from"  # an attribute of parameters: the place whose bytes were given another type

PAGE = mmap.PAGESIZE
PRESENT, SWAPPED, OF_FILE = (numpy.uint64(1 << bit) for bit in (63, 62, 61))  # of a page's entry
MADV_WILLNEED, MADV_DONTNEED = 3, 4  # asm-generic/mman-common.h
ENOUGH_BYTES = 4 << 20  # are read before pages are given back
AROUND = 2 << 20  # what the kernel maps at most beside a page that is looked at
AHEAD_BYTES = 64 << 20  # are asked from the disk before they are read
CODES = ("Params4bit", "Int8Params")
LIBC = ctypes.CDLL(None, use_errno=True)
# Of thousands of mappings: those that are private, and to be written, or of which nothing can be read yet.
LINE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) (?:rw.|---)p ([0-9a-f]+) \S+ ([1-9]\d*) +(/.*)", re.MULTILINE)


@dataclasses.dataclass(frozen=True, slots=True)
class FilePlace:
    """The bytes of a file that a tensor is: for comparisons between workers."""

    file: tuple[int | str, ...]  # on this host: which file, of what size, changed last when
    offset: int
    num_bytes: int
    is_same_everywhere: bool = False  # `file` is what a store calls its version, on any host


@dataclasses.dataclass(frozen=True, slots=True)
class _Mapping:
    begin: int  # addresses
    end: int
    offset: int  # of the file, at `begin`
    path: bytes
    inode: int


class FileMappings:
    """The files that this process has mapped privately, as they are now."""

    def __init__(self) -> None:
        self._mappings: list[_Mapping] = []  # by address, as the kernel lists them
        try:
            with open("/proc/self/maps", "rb") as lines:  # as a whole: a process has thousands
                for begin, end, offset, inode, path in LINE.findall(lines.read()):
                    self._add(_Mapping(int(begin, 16), int(end, 16), int(offset, 16), path, int(inode)))
        except OSError:  # not Linux, or a sandbox that does not show it
            self._mappings = []

    def _add(self, found: _Mapping) -> None:
        """Note a mapping, or what of one has other rights than what is before it."""
        last = self._mappings[-1] if self._mappings else None
        same = last is not None and (last.end, last.inode, last.path) == (found.begin, found.inode, found.path)
        if last is not None and same and found.offset - last.offset == found.begin - last.begin:
            self._mappings[-1] = dataclasses.replace(last, end=found.end)
        else:
            self._mappings.append(found)

    def place_of(self, tensor: Tensor) -> FilePlace | None:
        """Return what a tensor is of a file; None where it is not, or was changed, or the file was."""
        found = self.mapping_of(tensor)
        if found is None or not self.is_unchanged(tensor):
            return None
        if (absent := file_of(tensor)) is not None:
            name, offset = (absent.source.identity, absent.name), tensor.data_ptr() - absent.begin
            return FilePlace(file=name, offset=offset, num_bytes=tensor.nbytes, is_same_everywhere=True)
        try:
            now = os.stat(found.path)
        except OSError:  # it was removed; the mapping still has it, but workers cannot compare
            return None
        if now.st_ino != found.inode:
            return None
        begin, num_bytes = tensor.data_ptr(), tensor.nbytes
        return FilePlace(
            file=(now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns),
            offset=begin - found.begin + found.offset,
            num_bytes=num_bytes,
        )

    def is_unchanged(self, tensor: Tensor) -> bool:
        """Whether all pages of a mapped tensor are those of the file."""
        own = self._own_pages(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        return own is not None and not bool(own.any())

    def release(self, begin: int, end: int) -> None:
        """Give back the memory of the pages from `begin` to `end`, whole ones, that are those of the file. No other
        thread may write to them or unmap them meanwhile."""
        own = self._own_pages(begin, end)
        if own is None:
            return
        bounds = [-1, *own.nonzero()[0].tolist(), len(own)]  # of runs of the file's pages
        for before, behind in itertools.pairwise(bounds):
            if behind - before > 1:
                _advise(begin + (before + 1) * PAGE, begin + behind * PAGE, MADV_DONTNEED)

    def mapping_of(self, tensor: Tensor) -> _Mapping | None:
        if tensor.device.type != "cpu" or not tensor.nbytes or not _is_dense(tensor):
            return None
        begin = tensor.data_ptr()
        place = bisect.bisect_right(self._mappings, begin, key=_begin) - 1
        found = self._mappings[place] if place >= 0 else None
        return found if found is not None and begin + tensor.nbytes <= found.end else None

    def _own_pages(self, begin: int, end: int) -> numpy.typing.NDArray[numpy.bool_] | None:
        """Of each page that has bytes from `begin` to `end`: whether it is not the file's any more. None: not known.

        Not by torch, whose operations are seen by a mode that watches a model run.
        """
        first, last = begin // PAGE, -(-end // PAGE)
        try:
            with open("/proc/self/pagemap", "rb", buffering=0) as pages:
                data = os.pread(pages.fileno(), 8 * (last - first), 8 * first)
        except OSError:
            return None
        if len(data) != 8 * (last - first):
            return None
        entries = numpy.frombuffer(data, dtype=numpy.uint64)
        return ((entries & PRESENT != 0) & (entries & OF_FILE == 0)) | (entries & SWAPPED != 0)


class WeightFiles:
    """The files that a model's weights are mapped from, while its parts are copied out of them.

    They stay mapped as long as this object lives: in the place of a mapping that has gone another thread may have put
    memory of its own.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]  # a mode may watch who looks at weights
            self._mappings = FileMappings()
            self._all = [one.detach() for one in tensors if self.has(one)]
            self._waiting, self._num_waiting = list[Tensor](), 0  # those that were read, and their bytes
            self._coming, self._num_ahead = collections.deque[Tensor](), 0  # what is not fetched yet; bytes that are

    def __bool__(self) -> bool:
        return bool(self._all)

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is mapped."""
        return self._pages_of(tensor) is not None

    def coming(self, tensors: Iterable[Tensor]) -> None:
        """Say in which order tensors will be read, or parts of them. The kernel fetches some of them ahead from the
        disk: a page that is fetched when it is looked at costs a wait of its own."""
        self._coming, self._num_ahead = collections.deque(tensors if self else ()), 0
        self._fetch()

    def was_read(self, tensor: Tensor) -> None:
        """Note what was read. Its memory is given back as soon as there is some: it is read again where somebody
        looks."""
        if self and self.has(tensor):
            self._waiting.append(tensor)
            self._num_waiting += tensor.nbytes
            if self._num_waiting >= ENOUGH_BYTES:
                self.release()
            self._num_ahead -= tensor.nbytes
            self._fetch()

    def in_order(self, tensors: Iterable[T], what: Callable[[T], Tensor] = lambda tensor: tensor) -> Iterator[T]:
        """Yield tensors of which one after the other is read, or `what` of them."""
        given = list(tensors)
        self.coming(map(what, given))
        for tensor in given:
            before = what(tensor).detach()
            yield tensor
            self.was_read(before)
        self.release()

    def release(self) -> None:
        """Give back the memory of what was read now."""
        for begin, end in _merged(pages for one in self._waiting if (pages := self._pages_of(one, AROUND)) is not None):
            self._mappings.release(begin, end)
        self._waiting, self._num_waiting = [], 0

    def _fetch(self) -> None:
        while self._coming and self._num_ahead < AHEAD_BYTES:
            tensor = self._coming.popleft()
            if (pages := self._pages_of(tensor)) is not None:
                _advise(*pages, MADV_WILLNEED)
                self._num_ahead += tensor.nbytes

    def _pages_of(self, tensor: Tensor, around: int = 0) -> tuple[int, int] | None:
        """The addresses of the pages that have a tensor's bytes, or those `around` them; None where it is not mapped
        any more."""
        mapping = self._mappings.mapping_of(tensor)
        if mapping is None:
            return None
        begin, end = tensor.data_ptr() - around, tensor.data_ptr() + tensor.nbytes + around
        return max(begin // PAGE * PAGE, mapping.begin), min(-(-end // PAGE) * PAGE, mapping.end)


def without_same_files(tensors: Iterable[Tensor], group: WorkerGroup) -> list[Tensor]:
    """Return the tensors that may differ between workers: all but those that are the same bytes of the same file,
    unchanged, on every worker. All workers must call it, with as many tensors. On one host files are compared, on
    several what is in them at some places.
    """
    given = list(tensors)
    origins = [getattr(one, ORIGIN, None) for one in given]
    forget_origins(given)  # later they may have been changed: one answer is all
    if group.size == 1:
        return given
    is_one_host = len(set(group.hosts)) == 1
    mappings = FileMappings()
    places = [mappings.place_of(one) or origin for one, origin in zip(given, origins, strict=True)]
    told = [
        None
        if place is None
        else (
            place.file if is_one_host or place.is_same_everywhere else _checksum(one),
            place.offset,
            place.num_bytes,
        )
        for one, place in zip(given, places, strict=True)
    ]
    if not any(group.gather_objects(any(one is not None for one in told))):
        return given
    rows = group.gather_objects(told)
    if len({len(row) for row in rows}) > 1:
        return given  # what follows says how they differ
    return [
        tensor
        for tensor, found in zip(given, zip(*rows, strict=True), strict=True)
        if found[0] is None or any(one != found[0] for one in found)
    ]


def forget_origins(tensors: Iterable[Tensor]) -> None:
    """Take back what tensors were converted from: they have other numbers now, or may get some."""
    for one in tensors:
        if hasattr(one, ORIGIN):
            delattr(one, ORIGIN)


def is_code(tensor: Tensor) -> bool:
    """Whether a tensor is a weight of bitsandbytes: codes in whatever type, and attributes that say what they mean."""
    return type(tensor).__name__ in CODES and isinstance(tensor, nn.Parameter)


@torch.no_grad()
def keep_in_memory(model: nn.Module) -> None:
    """Copy what of a model's trained weights is still mapped, one tensor at a time: a file may be written again, and
    the first step would copy it in any case. Frozen weights stay mapped, and workers of a host share their memory."""
    come(model.parameters())  # what is kept of files that come in pieces
    trained = [one for one in model.parameters() if one.requires_grad]
    files = WeightFiles(trained)
    copies: dict[tuple[object, ...], Tensor] = {}  # by place and type: parameters that share memory go on sharing it
    for parameter in files.in_order(one for one in trained if files.has(one)):
        place = parameter.data_ptr(), parameter.nbytes, parameter.dtype
        if place not in copies:
            copies[place] = parameter.data.clone()
        parameter.data = copies[place].view_as(parameter)
    if files:
        give_back_freed()


def _begin(mapping: _Mapping) -> int:
    return mapping.begin


def _is_dense(tensor: Tensor) -> bool:
    return (
        (type(tensor) in (Tensor, nn.Parameter, AbsentTensor, AbsentParameter) or is_code(tensor))
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
    )


def _checksum(tensor: Tensor) -> int:
    """Of the first, the middle and the last bytes of a tensor, at most a page each."""
    length, found = min(PAGE, tensor.nbytes), 0
    for start in (0, (tensor.nbytes - length) // 2, tensor.nbytes - length):
        found = zlib.crc32(ctypes.string_at(tensor.data_ptr() + start, length), found)
    return found


def _merged(places: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Ranges without those that overlap or touch."""
    last: tuple[int, int] | None = None
    for begin, end in sorted(places):
        if last is None:
            last = begin, end
        elif begin <= last[1]:
            last = last[0], max(last[1], end)
        else:
            yield last
            last = begin, end
    if last is not None:
        yield last


def _advise(begin: int, end: int, advice: int) -> None:
    LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)
