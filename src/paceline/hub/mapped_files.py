"""Maps the tensors of safetensors files without reading any of their bytes.

safetensors' own package looks at the first page of each tensor that it gives out. Around a page that is looked at the
kernel reads as much as the disk is set to read ahead: with the megabytes that are usual for network storage and for
virtual disks, all of each file, on each worker, before the first byte is needed.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.safetensors_file import TYPES
from paceline.hub.opened_files import can_read_opened
from paceline.hub.stored_weights import FileTensor, StoredWeights

__all__ = ["DTYPES", "mapped"]

DTYPES = {name: dtype for dtype, name in TYPES.items()}


def mapped(stored: StoredWeights) -> StoredWeights:
    """Return the same weights with their tensors, private ones, that are read where somebody looks. As they are, where
    only safetensors' package can read them."""
    if not can_read_opened() or not all(_is_plain(one) for one in stored.tensors.values()):
        return stored
    opened: dict[str, dict[str, Tensor]] = {}
    for file in stored.files:
        path = stored.folder / file
        storage = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
        opened[file] = {name: _tensor(storage, one) for name, one in stored.tensors.items() if one.file == file}
    return dataclasses.replace(stored, opened=opened)


def _is_plain(one: FileTensor) -> bool:
    """Whether a tensor is of a type of torch's, and has as many bytes as its shape takes, where the type may begin."""
    dtype = DTYPES.get(one.type)
    if dtype is None:
        return False
    return one.num_bytes == math.prod(one.shape) * dtype.itemsize and one.offset % dtype.itemsize == 0


def _tensor(storage: Any, about: FileTensor) -> Tensor:
    """It has a storage of its own, as safetensors' tensors: those that share one would count as tied."""
    found = torch.empty(0, dtype=DTYPES[about.type], device="cpu")
    if about.num_bytes:
        own: Any = storage[about.offset : about.offset + about.num_bytes]
        found = found.set_(own)
    return found.view(about.shape)
