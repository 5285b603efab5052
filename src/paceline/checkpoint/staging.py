"""Copies of a model's tensors in reused memory, so that training stands still only for the copying.

Fresh memory is slow the first time each page is written: several times a plain copy, and far more in a virtual machine.
So the copies live in one block that stays from save to save, on huge pages where the system grants them, and pinned
where tensors come from a CUDA device. Each copy is a tensor with its own storage within the block, so that only its
elements are written to disk. Tied tensors are copied once.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import mmap
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.units import bytes_text

__all__ = ["NoRoom", "Staged", "Staging", "bytes_of"]

_ALIGNMENT = 64  # bytes; a cache line, and a multiple of every element size
_HUGE_PAGE = 2 << 20


class NoRoom(CheckpointError):
    """There is no room for the copies at present; the next `stage` tries again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Staged:
    """The copies, valid until the next `Staging.stage`."""

    tensors: Mapping[str, Tensor]  # on the CPU, contiguous
    ties: Mapping[str, str]  # name that is not stored -> name that has the same elements
    num_bytes: int


class Staging:
    """One reusable block of memory; with `directory`, that of an unnamed file there."""

    def __init__(self, directory: Path | None = None) -> None:
        self._block: Tensor | None = None  # uint8
        self._is_pinned = False
        self._directory = directory
        self._file: mmap.mmap | None = None  # below the block

    def warm(self, tensors: Mapping[str, Tensor]) -> None:
        """Get memory for these tensors and touch every page of it, so that the first `stage` is as fast as later ones.

        Without enough room nothing is done; `stage` reports it if that is still so.
        """
        needed, pinned = _needed_bytes(tensors.values()), self._is_to_be_pinned(tensors)
        if not self._fits(needed, pinned):
            with contextlib.suppress(NoRoom):
                self._grow(needed, pinned)
            if self._block is not None and self._file is None:
                ctypes.memset(self._block.data_ptr(), 0, self._block.numel())  # releases the interpreter lock

    def stage(self, tensors: Mapping[str, Tensor]) -> Staged:
        """Copy the tensors; the originals may change afterwards.

        Raises CheckpointError for tensors that are not dense, and NoRoom.
        """
        unique, ties = _without_ties(tensors)
        needed, pinned = _needed_bytes(unique.values()), self._is_to_be_pinned(unique)
        if not self._fits(needed, pinned):
            self._grow(needed, pinned)
        storage = self._block.untyped_storage() if self._block is not None else torch.UntypedStorage(0)
        copies, offset = {}, 0
        for name, tensor in unique.items():
            part = storage[offset : offset + tensor.nbytes]  # a storage of its own size over the same memory
            copies[name] = torch.empty(0, dtype=tensor.dtype).set_(part).view(tensor.shape)
            offset += _aligned(tensor.nbytes)
        _copy(unique, copies)
        if self._file is not None:
            self._file.madvise(mmap.MADV_DONTNEED)  # the system's page cache has it, not this process
        return Staged(tensors=copies, ties=ties, num_bytes=sum(copy.nbytes for copy in copies.values()))

    def _is_to_be_pinned(self, tensors: Mapping[str, Tensor]) -> bool:
        return self._directory is None and any(tensor.is_cuda for tensor in tensors.values())

    def _fits(self, num_bytes: int, pinned: bool) -> bool:
        return num_bytes == 0 or (
            self._block is not None and self._block.numel() >= num_bytes and (self._is_pinned or not pinned)
        )

    def _grow(self, num_bytes: int, pinned: bool) -> None:
        self._block = self._file = None  # free the old block first: both may not fit
        try:
            if self._directory is not None:
                self._file = _mapped_file(self._directory, num_bytes)
                self._block = torch.frombuffer(self._file, dtype=torch.uint8)
            elif pinned:
                self._block = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            else:
                self._block = _mapped(num_bytes)
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError when it cannot pin
            where, remedy = "memory", "This host needs that much beside the model"
            if self._directory is not None:
                where, remedy = f"room in {self._directory}", "Free that much there, or use another offload_path"
            why = str(error).partition("\n")[0]
            raise NoRoom(
                f"no {where} for the copy of {bytes_text(num_bytes)} that a checkpoint is written from: {why}. {remedy}"
            ) from error
        self._is_pinned = pinned


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the elements of a contiguous CPU tensor as bytes, without copying; valid while the tensor is."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr() if tensor.nbytes else 0)).cast("B")


def _without_ties(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    unique: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        tensor = _plain(name, tensor)
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        first = seen.setdefault(view, name) if tensor.nbytes else name
        if first == name:
            unique[name] = tensor
        else:
            ties[name] = first
    return unique, ties


def _plain(name: str, tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        found = (
            "a meta tensor" if tensor.is_meta else "a quantized tensor" if tensor.is_quantized else f"{tensor.layout}"
        )
        raise CheckpointError(f"cannot store {name}: it is {found}; a checkpoint holds dense tensors with data.")
    # A subclass with its own dispatch (DTensor, for example) has no elements of its own to copy.
    if getattr(type(tensor), "__torch_dispatch__", None) is not getattr(Tensor, "__torch_dispatch__", None):
        raise CheckpointError(
            f"cannot store {name}: it is a {type(tensor).__name__}; pass its plain tensor (to_local, for example)."
        )
    return tensor.detach().resolve_conj().resolve_neg()


def _copy(sources: Mapping[str, Tensor], copies: Mapping[str, Tensor]) -> None:
    """Copy all tensors, and wait for the devices."""
    devices = set()
    for name, source in sources.items():
        if source.device.type == "cpu" and source.is_contiguous():
            # Plain memory: memmove uses this thread alone. Tensor.copy_ would wake the intra-op threads, whose
            # hand-over costs many times the copy where cores are shared with other workers.
            ctypes.memmove(copies[name].data_ptr(), source.data_ptr(), source.nbytes)
        else:
            copies[name].copy_(source, non_blocking=source.is_cuda)
            if source.is_cuda:
                devices.add(source.device)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


def _mapped(num_bytes: int) -> Tensor:
    memory = mmap.mmap(-1, -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: small ones are only a little slower
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _mapped_file(directory: Path, num_bytes: int) -> mmap.mmap:
    """Return an unnamed file with all blocks allocated, so that writing to it cannot fail."""
    with tempfile.TemporaryFile(dir=directory, prefix="paceline_") as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        return mmap.mmap(file.fileno(), num_bytes)


def _needed_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
