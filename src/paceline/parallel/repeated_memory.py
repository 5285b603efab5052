"""A long tensor that repeats a short one, in the memory of the short one: the same pages are mapped again and again.

Writing to one place writes to all that are a whole number of periods away.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os

import torch
from torch import Tensor

__all__ = ["repeated"]

NO_ADDRESS = (None, 2**64 - 1)
PROT_NONE, MAP_FIXED = 0, 0x10
MOST_MAPPINGS = 10_000  # a process may have 65,530


def repeated(one: Tensor, count: int) -> Tensor:
    """Return `count` numbers, those of `one`, a flat tensor on the CPU, from the first again after the last.

    Where the system cannot map a period (it is no whole number of pages, say), each number has memory of its own.
    """
    num_maps = -(-count // max(1, len(one)))
    whole_pages = one.nbytes > 0 and one.nbytes % mmap.PAGESIZE == 0
    if 1 < num_maps <= MOST_MAPPINGS and whole_pages and hasattr(os, "memfd_create"):
        try:
            return _mapped(one, num_maps)[:count]
        except OSError:
            pass
    return one.repeat(num_maps)[:count]


class _RepeatedMapping:
    """Addresses that are free again when nobody holds this."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.address = _mmap(None, num_bytes, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)

    def __del__(self) -> None:
        if hasattr(self, "address"):
            _libc().munmap(self.address, self.num_bytes)


def _mapped(one: Tensor, num_maps: int) -> Tensor:
    fd = os.memfd_create("paceline-numbers", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(memoryview((ctypes.c_ubyte * one.nbytes).from_address(one.data_ptr())))
        mapping = _RepeatedMapping(num_maps * one.nbytes)
        rights = mmap.PROT_READ | mmap.PROT_WRITE
        for number in range(num_maps):
            _mmap(mapping.address + number * one.nbytes, one.nbytes, rights, mmap.MAP_SHARED | MAP_FIXED, fd)
    finally:
        os.close(fd)
    block = (ctypes.c_ubyte * mapping.num_bytes).from_address(mapping.address)
    vars(block)["mapping"] = mapping  # it is there as long as the block
    return torch.frombuffer(block, dtype=one.dtype)


def _mmap(address: int | None, num_bytes: int, rights: int, flags: int, fd: int) -> int:
    found = _libc().mmap(address, num_bytes, rights, flags, fd, 0)
    if found in NO_ADDRESS:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc
