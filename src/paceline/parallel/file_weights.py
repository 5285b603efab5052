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
import contextlib
import ctypes
import dataclasses
import itertools
import mmap
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy
import numpy.typing
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from paceline.comm.group import WorkerGroup
from paceline.host_memory import give_back_freed

__all__ = [
    "ORIGIN",
    "FileMappings",
    "FilePlace",
    "WeightFiles",
    "forget_origins",
    "giving_back",
    "is_code",
    "keep_in_memory",
    "without_same_files",
]

ORIGIN = "paceline_converted_from"  # an attribute of parameters: the place whose bytes were given another type

PAGE = mmap.PAGESIZE
PRESENT, SWAPPED, OF_FILE = (numpy.uint64(1 << bit) for bit in (63, 62, 61))  # of a page's entry
MADV_DONTNEED = 4  # asm-generic/mman-common.h
SHARE, LEAST_BYTES = 16, 4 << 20  # of the files' bytes are read before pages are given back: that looks at all of them
CODES = ("Params4bit", "Int8Params")
LINE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ...p ([0-9a-f]+) \S+ ([1-9]\d*) +(/.*)", re.MULTILINE)


@dataclasses.dataclass(frozen=True, slots=True)
class FilePlace:
    """The bytes of a file that a tensor is: for comparisons between workers."""

    file: tuple[int, ...]  # on this host: which file, of what size, changed last when
    offset: int
    num_bytes: int


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
                    self._mappings.append(_Mapping(int(begin, 16), int(end, 16), int(offset, 16), path, int(inode)))
            self._pages = os.open("/proc/self/pagemap", os.O_RDONLY)
        except OSError:  # not Linux, or a sandbox that does not show it
            self._mappings, self._pages = [], -1

    def close(self) -> None:
        if self._pages >= 0:
            os.close(self._pages)
            self._pages = -1

    def __enter__(self) -> FileMappings:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def place_of(self, tensor: Tensor) -> FilePlace | None:
        """Return what a tensor is of a file; None where it is not, or was changed, or the file was."""
        found = self.mapping_of(tensor)
        if found is None or not self.is_unchanged(tensor):
            return None
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

    def release(self, mapping: _Mapping) -> None:
        """Give back the memory of a mapping's pages that are those of the file, if it is still there as it was. No
        other thread may write to it or unmap it meanwhile."""
        own = self._own_pages(mapping.begin, mapping.end) if mapping in self._mappings else None
        if own is None:
            return
        bounds = [-1, *own.nonzero()[0].tolist(), len(own)]  # of runs of the file's pages
        for before, behind in itertools.pairwise(bounds):
            if behind - before > 1:
                _forget(mapping.begin + (before + 1) * PAGE, (behind - before - 1) * PAGE)

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
            data = os.pread(self._pages, 8 * (last - first), 8 * first)
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
        self._storages: dict[_Mapping, torch.UntypedStorage] = {}
        with FileMappings() as mappings:
            for one in tensors:
                if (mapping := mappings.mapping_of(one)) is not None:
                    self._storages[mapping] = one.untyped_storage()
        #: Bytes that may be read before they are worth giving back.
        self.enough_bytes = max(LEAST_BYTES, sum(one.end - one.begin for one in self._storages) // SHARE)

    def __bool__(self) -> bool:
        return bool(self._storages)

    def release(self) -> None:
        """Give back the memory of all pages that were read and not changed: they are read again where somebody
        looks."""
        if not self._storages:
            return
        with FileMappings() as now:
            for one in self._storages:
                now.release(one)


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
    with FileMappings() as mappings:
        places = [mappings.place_of(one) or origin for one, origin in zip(given, origins, strict=True)]
    told = [
        None if place is None else (place.file if is_one_host else _checksum(one), place.offset, place.num_bytes)
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


@contextlib.contextmanager
def giving_back(model: nn.Module) -> Iterator[None]:
    """While a model runs, give back the memory of weights that it has read, if they are mapped."""
    with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]  # a mode may watch who looks at weights
        files = WeightFiles(model.parameters())
        sizes = {module: sum(one.nbytes for one in module.parameters(recurse=False)) for module in model.modules()}
    if not files:
        yield
        return
    num_bytes = 0

    def ran(module: nn.Module, _: Any, __: Any) -> None:
        nonlocal num_bytes
        num_bytes += sizes.get(module, 0)
        if num_bytes >= files.enough_bytes:
            files.release()
            num_bytes = 0

    handle = register_module_forward_hook(ran)
    try:
        yield
    finally:
        handle.remove()
        files.release()


@torch.no_grad()
def keep_in_memory(model: nn.Module) -> None:
    """Copy what of a model's trained weights is still mapped, one tensor at a time: a file may be written again, and
    the first step would copy it in any case. Frozen weights stay mapped, and workers of a host share their memory."""
    files, num_bytes = WeightFiles(model.parameters()), 0
    copies: dict[tuple[object, ...], Tensor] = {}  # by place and type: parameters that share memory go on sharing it
    with FileMappings() as mappings:
        for parameter in model.parameters():
            if parameter.requires_grad and mappings.mapping_of(parameter) is not None:
                place = parameter.data_ptr(), parameter.nbytes, parameter.dtype
                if place not in copies:
                    copies[place] = parameter.data.clone()
                    num_bytes += parameter.nbytes
                parameter.data = copies[place].view_as(parameter)
            if num_bytes >= files.enough_bytes:
                files.release()
                num_bytes = 0
    files.release()
    if files:
        give_back_freed()


def _begin(mapping: _Mapping) -> int:
    return mapping.begin


def _is_dense(tensor: Tensor) -> bool:
    return (
        (type(tensor) in (Tensor, nn.Parameter) or is_code(tensor))
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
    )


def _checksum(tensor: Tensor) -> int:
    """Of the first, the middle and the last bytes of a tensor, at most a page each."""
    length, found = min(PAGE, tensor.nbytes), 0
    for start in (0, (tensor.nbytes - length) // 2, tensor.nbytes - length):
        found = zlib.crc32(ctypes.string_at(tensor.data_ptr() + start, length), found)
    return found


def _forget(begin: int, length: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), MADV_DONTNEED)
