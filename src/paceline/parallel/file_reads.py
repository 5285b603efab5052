"""Reads bytes of a file straight into a tensor's memory.

A copy out of a mapping takes three steps for each page of 4 KiB: the file's page is mapped, an empty one is made, and
one is copied to the other. `pread` needs no mapping, and asks for its memory in pages of 2 MiB, where the kernel has
them: copies by two workers at once take a half to a third of the time.
"""

from __future__ import annotations

import ctypes
import os

import torch
from torch import Tensor

__all__ = ["read_at"]

LARGE_PAGE = 2 << 20
MADV_HUGEPAGE = 14  # asm-generic/mman-common.h
MOST_AT_ONCE = 64 << 20  # bytes of a call, which cannot be interrupted
LIBC = ctypes.CDLL(None, use_errno=True)


def read_at(fd: int, offset: int, like: Tensor) -> Tensor | None:
    """Return a tensor of `like`'s type and shape, contiguous, with a file's bytes from `offset`; None where the file
    ends before. Raises OSError."""
    found = torch.empty(like.shape, dtype=like.dtype, device="cpu")
    begin, size, done = found.data_ptr(), found.nbytes, 0
    _in_large_pages(begin, begin + size)
    memory = memoryview((ctypes.c_ubyte * size).from_address(begin)).cast("B")
    while done < size:
        count = os.preadv(fd, [memory[done : done + MOST_AT_ONCE]], offset + done)
        if not count:
            return None
        done += count
    return found


def _in_large_pages(begin: int, end: int) -> None:
    """Have whole large pages between two addresses, if the kernel has some; none before or behind."""
    first, last = -(-begin // LARGE_PAGE) * LARGE_PAGE, end // LARGE_PAGE * LARGE_PAGE
    if last > first:
        LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_HUGEPAGE)
