"""Writes one writer's part of a checkpoint in torch's distributed-checkpoint format, and the index of all parts.

A part is what one writer holds of each tensor, in a file of its own. The index lists every piece as a chunk of its
tensor, which torch's own loader puts together. A tensor's checksum is that of its elements in order. Where its pieces
are rows, it follows from theirs (as in zlib's crc32_combine: CRCs are polynomials over GF(2), and appending n bytes
multiplies by x^8n). Other tensors have none, but each file has a checksum as well.
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
    "StoredPiece",
    "TensorRegion",
    "combined_crc32",
    "crc32_of_tensors",
    "piece_key",
    "pieces_from_json",
    "pieces_to_json",
    "write_index",
    "write_shard",
]

NEXT = "\n"  # between a tensor's name and the number of its piece, in the written keys
POLYNOMIAL = 0xEDB88320  # of CRC-32, lowest power in the highest bit


@dataclasses.dataclass(frozen=True, slots=True)
class TensorRegion:
    """Which box a writer's tensor is: of the tensor with this name and shape, beginning at these offsets."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoredPiece:
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


def piece_key(name: str, number: int) -> str:
    """Return the key of a writer's piece number `number` of a tensor."""
    return f"{name}{NEXT}{number}" if number else name


def write_shard(
    directory: Path, part: int, tensors: Mapping[str, Tensor], where: Mapping[str, TensorRegion]
) -> list[StoredPiece]:
    """Write contiguous CPU tensors into the file of writer number `part`, flushed to the disk.

    Tensors listed in `where`, under the same key, are pieces; the others are whole, and the key is their name.
    """
    # Imported here because it imports torch.distributed.checkpoint, which must not happen on the training thread.
    from torch.distributed.checkpoint import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    from paceline.checkpoint.dcp_write import Storage

    class Planner(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Tensor:
            return placed[write_item.index.fqn, tuple(write_item.index.offset or ())][0]

    placed: dict[tuple[str, tuple[int, ...]], tuple[Tensor, TensorRegion]] = {}
    items: list[WriteItem] = []
    for key, tensor in tensors.items():
        place = where.get(key) or TensorRegion(key, tuple(tensor.shape), (0,) * tensor.dim())
        if key in where and not tensor.numel():
            continue  # other writers have all of it
        placed[place.name, place.offsets] = tensor, place
        chunk = ChunkStorageMetadata(offsets=torch.Size(place.offsets), sizes=tensor.size())
        about = TensorWriteData(
            chunk=chunk, properties=TensorProperties.create_from_tensor(tensor), size=torch.Size(place.shape)
        )
        index = MetadataIndex(place.name, torch.Size(place.offsets))
        items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=about))
    storage = Storage(directory, {})
    storage.set_up_storage_writer(part == 0)
    # files are named after the index in the plan
    plan = storage.prepare_global_plan([SavePlan(items)] * (part + 1))[part]
    pieces: list[StoredPiece] = []
    for written in storage.write_data(plan, Planner()).wait():
        stored = written.storage_data
        tensor, place = placed[written.index.fqn, tuple(written.index.offset or ())]
        pieces.append(
            StoredPiece(
                name=place.name,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=place.shape,
                offsets=place.offsets,
                sizes=tuple(tensor.shape),
                file=stored.relative_path,
                start=stored.offset,
                num_bytes=stored.length,
                crc32=zlib.crc32(bytes_of(tensor)),
                num_element_bytes=tensor.nbytes,
            )
        )
    return pieces


def write_index(directory: Path, pieces: Sequence[StoredPiece], ties: Mapping[str, str]) -> None:
    """Write the index of all pieces; tied names (or keys of pieces) point to the same ones."""
    ties = {tied: first for tied, first in ties.items() if NEXT not in tied}
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


def crc32_of_tensors(pieces: Iterable[StoredPiece]) -> dict[str, int]:
    """Return the checksum of each tensor whose pieces follow each other."""
    return {
        name: combined_crc32((piece.crc32, piece.num_element_bytes) for piece in some)
        for name, some in _by_name(pieces).items()
        if all(piece.sizes[1:] == piece.shape[1:] for piece in some)
    }


def combined_crc32(parts: Iterable[tuple[int, int]]) -> int:
    """Return the CRC-32 of concatenated parts with known CRC-32s and lengths."""
    total = 0
    for crc, num_bytes in parts:
        total = _product(_power(8 * num_bytes), total) ^ crc
    return total


def pieces_to_json(pieces: Iterable[StoredPiece]) -> list[dict[str, Any]]:
    """Return the pieces as plain values."""
    return [dataclasses.asdict(piece) for piece in pieces]


def pieces_from_json(values: Iterable[Mapping[str, Any]]) -> list[StoredPiece]:
    """Read the result of `pieces_to_json`."""
    lists = ("shape", "offsets", "sizes")
    found: list[StoredPiece] = []
    for one in values:
        fields: dict[str, Any] = {**one, **{key: tuple(one[key]) for key in lists}}
        found.append(StoredPiece(**fields))
    return found


def _by_name(pieces: Iterable[StoredPiece]) -> dict[str, list[StoredPiece]]:
    """Return the pieces of each tensor, in the order of their rows."""
    found: dict[str, list[StoredPiece]] = {}
    for piece in pieces:
        found.setdefault(piece.name, []).append(piece)
    return {name: sorted(some, key=lambda piece: piece.offsets) for name, some in found.items()}


def _product(a: int, b: int) -> int:
    """Return the product of two polynomials modulo the CRC's."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = (b >> 1) ^ POLYNOMIAL if b & 1 else b >> 1
    return product


def _power(exponent: int) -> int:
    """Return x^exponent modulo the CRC's polynomial."""
    result, square = 1 << 31, 1 << 30  # 1 and x
    while exponent:
        if exponent & 1:
            result = _product(result, square)
        square = _product(square, square)
        exponent >>= 1
    return result
