"""Handles: numbers that stand for operations under way, as Horovod gives them to programs."""

from __future__ import annotations

import itertools
from typing import Any

from paceline.compat.horovod.pending_op import PendingOp

__all__ = ["forget_handles", "handle_of", "op_of", "poll", "synchronize"]

_numbers = itertools.count()
_ops: dict[int, PendingOp] = {}
_flushes: list[Any] = []  # of the open session: none or one


def handle_of(op: PendingOp, flush: Any) -> int:
    """Return the handle of an operation; `flush()` has the session send what was submitted."""
    _flushes[:] = [flush]
    number = next(_numbers)
    _ops[number] = op
    return number


def op_of(handle: int) -> PendingOp:
    """Return the operation of a handle that was not waited for."""
    return _ops[handle]


def poll(handle: int) -> bool:
    """Return whether an operation is done; then `synchronize` does not block. Raises ValueError for no handle."""
    op = _ops.get(handle)
    if op is None:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    if not op.is_done:
        for flush in _flushes:
            flush()
    return op.is_done


def synchronize(handle: int) -> Any:
    """Wait for an operation and return its result; None for a handle that was waited for already.

    Raises HorovodInternalError where the operation fails, on all members.
    """
    op = _ops.pop(handle, None)
    if op is None:
        return None
    if not op.is_done:
        for flush in _flushes:
            flush()
    return op.wait()


def forget_handles() -> None:
    """Forget what nobody has waited for: a new session begins."""
    _ops.clear()
    _flushes.clear()
