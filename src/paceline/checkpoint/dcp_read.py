"""Reads tensors in torch's distributed-checkpoint format without a process group, and without running code from files.

The format's index, `.metadata`, is a pickle. It is read with an unpickler that knows a dozen names, each of which
stands for a small record of ours or a plain value of torch; any other name is an error. Tensors are read one at a time
with `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from paceline.checkpoint.staging import bytes_of
from paceline.errors import CheckpointError
from paceline.regular_files import open_regular

__all__ = ["INDEX", "Chunk", "Entry", "read_entry", "read_index"]

INDEX = ".metadata"
_DCP = "torch.distributed.checkpoint"
# What the readers of pickles, zip files and tensors raise on invalid bytes.
_DAMAGE = (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """A box of a tensor, and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int  # byte in the file
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor of the checkpoint; tied names have equal entries."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def read_index(data: bytes, *, tensors_only: bool = False) -> dict[str, Entry]:
    """Return what `.metadata` lists, by name; raises CheckpointError when it holds anything but torch's records.

    `tensors_only`: pass over what is no tensor; otherwise that is an error, too, since Paceline writes nothing else.
    """
    try:
        metadata = _Records(io.BytesIO(data)).load()
        stored = {
            (index.fqn, tuple(getattr(index, "offset", None) or ())): where  # of what is no tensor there is none
            for index, where in metadata.storage_data.items()
        }
        return {
            str(name): _entry(name, about, stored)
            for name, about in metadata.state_dict_metadata.items()
            if isinstance(about, _TensorRecord) or not tensors_only
        }
    except _DAMAGE as error:
        raise CheckpointError(f"the file {INDEX} is not an index of tensors: {error}") from error


def read_entry(directory: Path, entry: Entry, crc32: int | None) -> Tensor:
    """Read one tensor to the CPU; raises CheckpointError naming the file that is missing, short or damaged."""
    if len(entry.chunks) == 1 and entry.chunks[0].sizes == entry.shape:
        [chunk] = entry.chunks
        tensor = _read_chunk(directory / chunk.file, chunk, entry.dtype).contiguous()
    else:  # written by several workers: one chunk at a time is in memory beside the whole
        if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.shape):
            raise CheckpointError(f"the file {INDEX} lists chunks that do not cover a tensor of {list(entry.shape)}")
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        for chunk in entry.chunks:
            box = tuple(slice(first, first + size) for first, size in zip(chunk.offsets, chunk.sizes, strict=True))
            tensor[box] = _read_chunk(directory / chunk.file, chunk, entry.dtype)
    if crc32 is not None and zlib.crc32(bytes_of(tensor)) != crc32:
        raise CheckpointError(f"the file {entry.chunks[0].file} is damaged: a checksum does not match")
    return tensor


def _read_chunk(path: Path, chunk: Chunk, dtype: torch.dtype) -> Tensor:
    try:
        with open_regular(path) as file:
            view = cast("BinaryIO", _FileRange(file, chunk.start, chunk.num_bytes))
            part = torch.load(view, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"the file {path.name} cannot be read: {error.strerror or error}") from error
    except _DAMAGE as error:
        first = str(error).partition("\n")[0]
        raise CheckpointError(f"the file {path.name} is damaged at byte {chunk.start}: {first}") from error
    if not isinstance(part, Tensor) or part.dtype != dtype or tuple(part.shape) != chunk.sizes:
        raise CheckpointError(
            f"the file {path.name} is damaged at byte {chunk.start}: not the tensor that {INDEX} lists"
        )
    return part


class _FileRange(io.RawIOBase):
    """A range of an open file, as a file of its own."""

    def __init__(self, file: BinaryIO, start: int, num_bytes: int) -> None:
        super().__init__()
        self._file, self._start, self._num_bytes, self._at = file, start, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._num_bytes}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        wanted = memoryview(buffer).cast("B")[: max(0, self._num_bytes - self._at)]
        count = self._file.readinto(wanted)  # type: ignore[attr-defined]  # every binary file has it
        self._at += count
        return count


def _entry(name: str, about: Any, stored: Mapping[tuple[str, tuple[int, ...]], Any]) -> Entry:
    if not isinstance(about, _TensorRecord):
        raise ValueError(f"{name} is not a tensor")
    chunks = []
    for chunk in about.chunks:
        where = stored[name, tuple(chunk.offsets)]
        if transforms := getattr(where, "transform_descriptors", None):
            raise ValueError(f"{name} is stored transformed, by {transforms}")
        if not isinstance(where.relative_path, str) or Path(where.relative_path).name != where.relative_path:
            raise ValueError(f"{name} is said to be in {where.relative_path!r}, outside the checkpoint")
        numbers = {"offsets": tuple(chunk.offsets), "sizes": tuple(chunk.sizes)}
        chunks.append(Chunk(**numbers, file=where.relative_path, start=int(where.offset), num_bytes=int(where.length)))
    if not isinstance(about.properties.dtype, torch.dtype):
        raise ValueError(f"{name} has the dtype {about.properties.dtype!r}")
    return Entry(dtype=about.properties.dtype, shape=tuple(about.size), chunks=tuple(chunks))


class _Record:
    """Stands for one of torch's dataclasses: has its fields, none of its code."""


class _TensorRecord(_Record):
    """torch's TensorStorageMetadata."""

    properties: Any
    size: Any
    chunks: Any


class _PropertiesRecord(_Record):
    """torch's TensorProperties, which is pickled as a tuple."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = state[0]


def _nothing(*_: Any) -> None:
    """Stands for values that are not needed: layouts, memory formats, paths."""


_KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    (f"{_DCP}.metadata", "Metadata"): _Record,
    (f"{_DCP}.metadata", "MetadataIndex"): _Record,
    (f"{_DCP}.metadata", "ChunkStorageMetadata"): _Record,
    (f"{_DCP}.metadata", "BytesStorageMetadata"): _Record,
    (f"{_DCP}.metadata", "StorageMeta"): _Record,
    (f"{_DCP}.metadata", "TensorStorageMetadata"): _TensorRecord,
    (f"{_DCP}.metadata", "TensorProperties"): _PropertiesRecord,
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): _nothing,
    ("builtins", "getattr"): _nothing,  # how Python 3.11.0 to 3.11.3 pickle that enum's members
    (f"{_DCP}.filesystem", "_StorageInfo"): _Record,
    ("torch.serialization", "_get_layout"): _nothing,
    ("torch", "Size"): lambda sizes: tuple(int(size) for size in sizes),
    ("pathlib", "PosixPath"): _nothing,
    ("pathlib._local", "PosixPath"): _nothing,  # Python 3.13
}


class _Records(pickle.Unpickler):
    """Builds the records above and nothing else."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (known := _KNOWN.get((module_name, global_name))) is not None:
            return known
        if module_name == "torch" and isinstance(dtype := getattr(torch, global_name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}, which no index of tensors needs")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside of it")
