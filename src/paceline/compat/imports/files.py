"""Reads single files of weights without running code from them: those of `torch.save`, and safetensors.

Files may come from strangers. What `torch.load(weights_only=True)` refuses is refused here, with what it asks for; a
safetensors file is checked before any of its bytes is taken for a tensor.
"""

from __future__ import annotations

import json
import math
import mmap
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from paceline.compat.imports.foreign import StoredTensor
from paceline.errors import CheckpointError

__all__ = ["read_json", "read_safetensors", "read_torch_file"]

HEADER_MOST = 100_000_000  # bytes, the format's own limit
ASKED = re.compile(r"(?:Unsupported global: GLOBAL|GLOBAL|Unsupported class|Unsupported operand)\s+([\w.]+)")
TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def read_torch_file(path: Path) -> Any:
    """Return what `torch.save` has stored, tensors mapped from the file where its format allows that.

    Raises CheckpointError for files that hold more than tensors and plain values, and for others.
    """
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            return torch.load(path, map_location="cpu", weights_only=True)  # of the format before torch 1.6
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        asked = ASKED.search(str(error))
        what = f" (it asks for {asked[1]})" if asked else ""
        raise CheckpointError(
            f"{path} holds more than tensors and plain values{what}, and reading that would run code from the file. In "
            "the program that wrote it, save weights alone: torch.save(model.state_dict(), 'weights.pt')"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        first = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} is no file of torch.save, or is damaged: {first}") from error


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name, mapped from it; CheckpointError for a damaged one."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= HEADER_MOST:
                raise ValueError("its header has no length that the format allows")
            header = json.loads(file.read(length))
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # a private copy: nothing is written back
        begins = 8 + length
        return {str(name): _stored(memory, begins, about) for name, about in header.items() if name != "__metadata__"}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no safetensors file, or is damaged: {error}") from error


def _stored(memory: mmap.mmap, begins: int, about: Mapping[str, Any]) -> StoredTensor:
    dtype = TYPES.get(about["dtype"])
    if dtype is None:
        raise ValueError(f"a tensor is of the type {about['dtype']!r}, which torch does not have")
    shape = tuple(int(size) for size in about["shape"])
    start, stop = (begins + int(offset) for offset in about["data_offsets"])
    if min(shape, default=0) < 0 or stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError("the bytes of a tensor are not those of its shape")
    if not begins <= start <= stop <= len(memory):
        raise ValueError("a tensor is beyond the end of the file")

    def read() -> Tensor:
        if start == stop:
            return torch.empty(shape, dtype=dtype)
        raw = torch.frombuffer(memory, dtype=torch.uint8, count=stop - start, offset=start)
        aligned = raw if start % dtype.itemsize == 0 else raw.clone()
        return aligned.view(dtype).reshape(shape)

    return StoredTensor(dtype=dtype, shape=shape, read=read)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file; CheckpointError where it is none."""
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is no JSON object")
    return cast("dict[str, Any]", found)
