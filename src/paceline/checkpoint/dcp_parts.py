"""Writes a part of a checkpoint in torch's distributed-checkpoint format, and the index of all parts.

A part is one writer's rows of each tensor, in a file of its own; the index lists every piece as a chunk of its tensor,
which torch's own loader puts together. A tensor's checksum is that of its elements in order; it follows from those of
its rows (as in zlib's crc32_combine: CRCs are polynomials over GF(2), and to append n bytes multiplies by x^8n).
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.staging import bytes_of

__all__ = [
    "Piece",
    "Rows",
    "combined_crc32",
    "crc32_of_tensors",
    "pieces_from_json",
    "pieces_to_json",
    "write_index",
    "write_part",
]

POLYNOMIAL = 0xEDB88320  # of CRC-32, lowest power in the highest bit


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """Which rows of a tensor a writer has: those from `first` on, of a whole of this shape."""

    shape: tuple[int, ...]
    first: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A box of a tensor in a file."""

    name: str
    dtype: str  # "float32"
    shape: tuple[int, ...]  # of the whole
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int  # byte in the file
    num_bytes: int
    crc32: int  # of the elements
    num_element_bytes: int


def write_part(directory: Path, part: int, tensors: Mapping[str, Tensor], rows: Mapping[str, Rows]) -> list[Piece]:
    """Write contiguous CPU tensors into the file of writer number `part`, to the disk itself; without `rows`: whole."""
    # Here, because it imports torch.distributed.checkpoint: never on the training thread.
    from torch.distributed.checkpoint import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    from paceline.checkpoint.dcp_write import Storage

    class Planner(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Tensor:
            return tensors[write_item.index.fqn]

    items: list[WriteItem] = []
    for name, tensor in tensors.items():
        if name in rows and not tensor.numel():
            continue  # others have all of it
        shape, offsets = _box(tensor, rows.get(name))
        chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=tensor.size())
        about = TensorWriteData(
            chunk=chunk, properties=TensorProperties.create_from_tensor(tensor), size=torch.Size(shape)
        )
        index = MetadataIndex(name, torch.Size(offsets))
        items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=about))
    storage = Storage(directory, {})
    storage.set_up_storage_writer(part == 0)
    plan = storage.prepare_global_plan([SavePlan(items)] * (part + 1))[part]  # files are named after the place
    pieces: list[Piece] = []
    for written in storage.write_data(plan, Planner()).wait():
        name, where = written.index.fqn, written.storage_data
        tensor = tensors[name]
        shape, offsets = _box(tensor, rows.get(name))
        pieces.append(
            Piece(
                name=name,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=shape,
                offsets=offsets,
                sizes=tuple(tensor.shape),
                file=where.relative_path,
                start=where.offset,
                num_bytes=where.length,
                crc32=zlib.crc32(bytes_of(tensor)),
                num_element_bytes=tensor.nbytes,
            )
        )
    return pieces


def write_index(directory: Path, pieces: Sequence[Piece], ties: Mapping[str, str]) -> None:
    """Write the index of all pieces; tied names point to the same ones."""
    from torch.distributed.checkpoint.filesystem import (
        _StorageInfo,  # pyright: ignore[reportPrivateUsage]: what the format's index is made of
    )
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.storage import WriteResult

    from paceline.checkpoint.dcp_write import Storage

    tensors: dict[str, Any] = {}
    results: list[WriteResult] = []
    for name, some in _by_name(pieces).items():
        chunks = [ChunkStorageMetadata(offsets=torch.Size(p.offsets), sizes=torch.Size(p.sizes)) for p in some]
        properties = TensorProperties(dtype=getattr(torch, some[0].dtype))
        tensors[name] = TensorStorageMetadata(properties=properties, size=torch.Size(some[0].shape), chunks=chunks)
        results += [
            WriteResult(
                index=MetadataIndex(name, torch.Size(piece.offsets)),
                size_in_bytes=piece.num_bytes,
                storage_data=_StorageInfo(piece.file, piece.start, piece.num_bytes),
            )
            for piece in some
        ]
    storage = Storage(directory, ties)
    storage.set_up_storage_writer(True)
    metadata = Metadata(state_dict_metadata=tensors, planner_data={name: (name,) for name in tensors})
    storage.finish(metadata, [results])


def crc32_of_tensors(pieces: Iterable[Piece]) -> dict[str, int]:
    """Return each tensor's checksum."""
    return {
        name: combined_crc32((piece.crc32, piece.num_element_bytes) for piece in some)
        for name, some in _by_name(pieces).items()
    }


def combined_crc32(parts: Iterable[tuple[int, int]]) -> int:
    """Return the CRC-32 of bytes of whose parts, in order, the CRC-32 and the number of bytes are known."""
    total = 0
    for crc, num_bytes in parts:
        total = _product(_power(8 * num_bytes), total) ^ crc
    return total


def pieces_to_json(pieces: Iterable[Piece]) -> list[dict[str, Any]]:
    """Return plain values."""
    return [dataclasses.asdict(piece) for piece in pieces]


def pieces_from_json(values: Iterable[Mapping[str, Any]]) -> list[Piece]:
    """Read what `pieces_to_json` gave."""
    lists = ("shape", "offsets", "sizes")
    found: list[Piece] = []
    for one in values:
        fields: dict[str, Any] = {**one, **{key: tuple(one[key]) for key in lists}}
        found.append(Piece(**fields))
    return found


def _by_name(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    """The pieces of each tensor, in the order of their rows."""
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.name, []).append(piece)
    return {name: sorted(some, key=lambda piece: piece.offsets) for name, some in found.items()}


def _box(tensor: Tensor, rows: Rows | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of the whole, and where `tensor` begins in it."""
    if rows is None:
        return tuple(tensor.shape), (0,) * tensor.dim()
    return rows.shape, (rows.first, *(0 for _ in rows.shape[1:]))


def _product(a: int, b: int) -> int:
    """The product of two polynomials modulo the CRC's."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = (b >> 1) ^ POLYNOMIAL if b & 1 else b >> 1
    return product


def _power(exponent: int) -> int:
    """x^exponent modulo the CRC's polynomial."""
    result, square = 1 << 31, 1 << 30  # 1 and x
    while exponent:
        if exponent & 1:
            result = _product(result, square)
        square = _product(square, square)
        exponent >>= 1
    return result
