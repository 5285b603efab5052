"""What workers say to the coordinator and hear from it, as lines of JSON.

A *request* is one operation that a worker has submitted. A *verdict* is what the coordinator makes of it once all
members of the process set have submitted theirs: run it now, or fail with an error.

A training loop submits the same requests in every step. So a request is made, written and read once: `request_of`
returns the one that was made before, which knows its text, and a text that came before is the request that it became.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from typing import Any, TypeVar

import torch

__all__ = ["Kind", "OpRequest", "OpVerdict", "Reduction", "decoded", "dtype_of", "encoded", "request_of"]

T = TypeVar("T")

KEPT = 1 << 14  # requests that are known again


class Kind:
    """The kinds of operations."""

    ALLREDUCE, ALLGATHER, BROADCAST = "allreduce", "allgather", "broadcast"
    ALLTOALL, REDUCESCATTER, BARRIER, JOIN = "alltoall", "reducescatter", "barrier", "join"
    ADD_SET, REMOVE_SET = "add_process_set", "remove_process_set"
    SHUTDOWN, FAILED = "shutdown", "failed"  # verdicts only: this worker has left; nothing runs any more


class Reduction:
    """The numbers of Horovod's reduction operations, which programs see as `hvd.Average` and so on."""

    AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = range(6)
    NAMES = ("average", "sum", "adasum", "min", "max", "product")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpRequest:
    """One operation of one worker. A grouped operation has several tensors, and runs as a whole."""

    name: str
    kind: str
    set_id: int = 0
    dtypes: tuple[str, ...] = ()  # of each tensor, as "float32"
    shapes: tuple[tuple[int, ...], ...] = ()
    reduction: int = Reduction.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0  # of a broadcast: a rank of the whole run
    device: str = "cpu"
    splits: tuple[int, ...] = ()  # of an all-to-all: rows for each member
    ranks: tuple[int, ...] = ()  # of a process set that is added or removed

    @functools.cached_property
    def num_bytes(self) -> int:
        return sum(
            math.prod(shape) * dtype_of(dtype).itemsize for dtype, shape in zip(self.dtypes, self.shapes, strict=True)
        )

    @functools.cached_property
    def text(self) -> str:
        """As it travels."""
        return json.dumps(_row(self), separators=(",", ":"))


request_of = functools.lru_cache(KEPT)(OpRequest)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OpVerdict:
    """What all members do next. Several names: these all-reduces travel together."""

    kind: str
    names: tuple[str, ...] = ()
    set_id: int = 0
    error: str = ""  # not empty: the operation fails with this text on all members
    reduction: int = Reduction.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    device: str = "cpu"
    dtypes: tuple[tuple[str, ...], ...] = ()  # of each name, for a member that has joined and gives zeros
    shapes: tuple[tuple[tuple[int, ...], ...], ...] = ()
    lengths: tuple[tuple[int, ...], ...] = ()  # all-gather: rows of each member, by tensor; all-to-all: by member
    ranks: tuple[int, ...] = ()  # of a process set that is added
    value: int = -1  # the number of a new process set; of a join, the last rank that joined


def encoded(kind: str, items: list[OpRequest] | list[OpVerdict]) -> bytes:
    """Return one line that holds these requests or verdicts. Fields with their default value are left out."""
    rows = [item.text if isinstance(item, OpRequest) else _row(item) for item in items]
    return json.dumps([kind, *rows], separators=(",", ":")).encode() + b"\n"


def decoded(line: bytes) -> tuple[str, list[Any]]:
    """Return the kind and the items of a line; ValueError for one that is none."""
    try:
        kind, *rows = json.loads(line)
        if kind == "requests":
            return kind, list(map(_read_request, rows))
        if kind == "verdicts":
            return kind, [_read(OpVerdict, row) for row in rows]
        return kind, rows
    except (TypeError, KeyError, UnicodeDecodeError) as error:
        raise ValueError(f"not a message of this protocol: {line[:80]!r}") from error


def dtype_of(name: str) -> torch.dtype:
    """Return torch's type of this name; ValueError where there is none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no type of a tensor")
    return found


@functools.lru_cache(KEPT)
def _read_request(text: str) -> OpRequest:
    return _read(OpRequest, json.loads(text))


def _read(form: type[T], row: list[Any]) -> T:
    names = [name for name, _ in _fields(form)]
    return form(**{name: _frozen(value) for name, value in zip(names, row, strict=True) if value is not None})


def _row(item: OpRequest | OpVerdict) -> list[Any]:
    values = ((getattr(item, name), default) for name, default in _fields(type(item)))
    return [None if value == default else value for value, default in values]


@functools.cache
def _fields(form: type[Any]) -> list[tuple[str, Any]]:
    return [(field.name, field.default) for field in dataclasses.fields(form)]


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
