"""The frames of a message over ZeroMQ: a header in JSON, and tensors as they lie in memory, in pieces.

Nothing is unpickled: a header is JSON, and a tensor is a dtype, a shape and its bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import zmq
from torch import Tensor

from paceline.comm.messages.json_channel import decode

__all__ = ["FRAME_BYTES", "HEADER_BYTES", "PIECE_BYTES", "decoded_message", "encoded_frames"]

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128, torch.complex64)
KINDS = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
DTYPES = {str(one).removeprefix("torch."): one for one in KINDS}
SMALL_BYTES = 1 << 14  # up to here ZeroMQ may have received a tensor together with others, at an odd address
HEADER_BYTES = 1 << 26  # the largest header
PIECE_BYTES = 1 << 20  # of a large tensor or header
FRAME_BYTES = PIECE_BYTES + 1024  # the largest that is received, with what CURVE adds
HEADER_PIECES = "header_pieces"
NOT_FINITE, SPELLED = "not_finite", ("nan", "inf", "-inf")  # JSON has no such numbers: {"not_finite": "nan"}


def encoded_frames(header: Mapping[str, Any], tensors: Sequence[Tensor]) -> list[Any]:
    """Return the frames of a message; TypeError where a tensor is of a kind that does not travel."""
    for one in tensors:
        if one.dtype not in KINDS:
            raise TypeError(f"a tensor of {one.dtype} cannot be sent to a parameter server: only {', '.join(DTYPES)}")
    forms = [[str(one.dtype).removeprefix("torch."), [*one.shape]] for one in tensors]
    told = _pieces(memoryview(_encoded_header({**header, "tensors": forms} if forms else header)))
    if len(told) > 1:
        told.insert(0, memoryview(json.dumps({HEADER_PIECES: len(told)}).encode()))
    return [*told, *(piece for one in tensors for piece in _pieces(_bytes_of(one)))]


def _encoded_header(header: Mapping[str, Any]) -> bytes:
    """Return a header as JSON. The norm of a poisoned gradient is not finite, and travels, too."""
    try:
        return json.dumps(header, allow_nan=False).encode()
    except ValueError:
        return json.dumps(_spelled(header), allow_nan=False).encode()


def _spelled(value: Any) -> Any:
    """Return plain data whose numbers that are not finite are spelled out."""
    if isinstance(value, Mapping):
        return {key: _spelled(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(one) for one in value]
    return {NOT_FINITE: str(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _read(value: Any) -> Any:
    """Return what `_spelled` was given; ValueError where no such number is spelled."""
    if isinstance(value, list):
        return [_read(one) for one in value]
    if not isinstance(value, dict):
        return value
    if NOT_FINITE not in value:
        return {key: _read(one) for key, one in value.items()}
    if len(value) > 1 or value[NOT_FINITE] not in SPELLED:
        raise ValueError(f"{value} is no number; one that is not finite is {{{NOT_FINITE!r}: one of {SPELLED}}}")
    return float(value[NOT_FINITE])


def _pieces(whole: memoryview) -> list[memoryview]:
    """Return the frames of a tensor or a header; at least one."""
    return [whole[at : at + PIECE_BYTES] for at in range(0, max(1, len(whole)), PIECE_BYTES)]


def _bytes_of(tensor: Tensor) -> memoryview:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


def decoded_message(frames: Sequence[zmq.Frame]) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """Read the header and the tensors of a peer that has proved the secret; ValueError if they are malformed."""
    header, num_frames = _header_of(frames)
    pieces, tensors = [*frames[num_frames:]], list[Tensor]()
    for dtype, shape in header.pop("tensors", []):
        if not all(type(one) is int and one >= 0 for one in shape):
            raise ValueError(f"a tensor of the shape {shape}")
        kind = DTYPES.get(dtype)
        if kind is None:
            raise ValueError(f"a tensor of {dtype!r}, which is none of {', '.join(DTYPES)}")
        count = max(1, math.ceil(math.prod(shape) * kind.itemsize / PIECE_BYTES))
        tensors.append(_tensor(kind, shape, pieces[:count]))
        del pieces[:count]
    if pieces:
        raise ValueError(f"a message of {len(tensors)} tensors, and {len(pieces)} frames more")
    return header, tuple(tensors)


def _header_of(frames: Sequence[zmq.Frame]) -> tuple[dict[str, Any], int]:
    """Return the header of a message, and in how many frames it came."""
    header = _decoded_header(frames[0].bytes)
    count = header.get(HEADER_PIECES)
    if count is None:
        return header, 1
    if type(count) is not int or not 1 < count <= HEADER_BYTES // PIECE_BYTES:
        raise ValueError(f"a header in {count!r} pieces; at most {HEADER_BYTES:,} bytes travel in one")
    return _decoded_header(b"".join(frame.bytes for frame in frames[1 : 1 + count])), 1 + count


def _decoded_header(text: bytes) -> dict[str, Any]:
    header = decode(text)
    return _read(header) if NOT_FINITE.encode() in text else header


def _tensor(kind: torch.dtype, shape: Sequence[int], pieces: Sequence[zmq.Frame]) -> Tensor:
    count, num_bytes = math.prod(shape), sum(len(piece.buffer) for piece in pieces)
    if count * kind.itemsize != num_bytes:
        raise ValueError(f"a tensor of {count} numbers of {kind} that came in {num_bytes} bytes")
    if not count:
        return torch.empty(shape, dtype=kind)
    if len(pieces) > 1:
        whole = torch.empty(num_bytes, dtype=torch.uint8)
        for place, piece in zip(whole.split(PIECE_BYTES), pieces, strict=True):
            place.numpy().data[:] = piece.buffer
        return whole.view(kind).view(shape)
    buffer = pieces[0].buffer if num_bytes > SMALL_BYTES else bytearray(pieces[0].buffer)
    return torch.frombuffer(buffer, dtype=kind).view(shape)
