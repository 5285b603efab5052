"""Writes safetensors files tensor by tensor, so that one tensor at a time is in memory.

The format (huggingface/safetensors): 8 bytes with the header's length, a JSON header with the type, shape and place of
every tensor, then their bytes, without gaps. Everything but the bytes is known beforehand, so the header is written
first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoint.checkpoint_dir import whole_file
from paceline.checkpoint.staging import bytes_of
from paceline.errors import CheckpointError

__all__ = ["TensorInfo", "num_bytes_of", "write_safetensors"]

TensorInfo = tuple[torch.dtype, tuple[int, ...]]  # of a tensor: its type and shape

TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def num_bytes_of(about: TensorInfo) -> int:
    """Return the bytes of a tensor."""
    dtype, shape = about
    return math.prod(shape) * dtype.itemsize


def write_safetensors(
    path: Path, tensors: Mapping[str, TensorInfo], read: Callable[[str], Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a file, atomically: `read` is called for each tensor in turn.

    Raises CheckpointError if it cannot be written, and for a type that the format does not have, with the tensor's
    name.
    """
    # larger element sizes first, so that each tensor is aligned
    order = sorted(tensors, key=lambda name: -tensors[name][0].itemsize)
    with whole_file(path) as file:
        file.write(_header(tensors, order, metadata))
        for name in order:
            tensor = read(name)
            if (tensor.dtype, tuple(tensor.shape)) != tensors[name]:
                raise CheckpointError(f"{name} is not what it was said to be: {tensor.dtype} {list(tensor.shape)}")
            tensor = tensor.detach().cpu().contiguous()
            file.write(bytes_of(tensor))
            del tensor  # before the next one is read


def _header(tensors: Mapping[str, TensorInfo], order: Iterable[str], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name in order:
        dtype, shape = tensors[name]
        if dtype not in TYPES:
            raise CheckpointError(
                f"{name} is of {dtype}, which safetensors does not have: convert it before it is saved"
            )
        end = at + num_bytes_of(tensors[name])
        header[name] = {"dtype": TYPES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
