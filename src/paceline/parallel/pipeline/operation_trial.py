"""Try one operation of a recorded forward, to see what it returns: on the meta device, else on invented numbers.

On the meta device tensors have shapes but no contents. An operation whose result depends on contents is refused between
units, because only the stage with the unit before it has them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from paceline.errors import Reason
from paceline.parallel.meta.meta_device import USER_ERRORS, on_invented_values, on_meta
from paceline.parallel.meta.tensor_tree import tensors_in

__all__ = ["RecordingRefused", "first_line", "try_operation"]


class RecordingRefused(Exception):
    """The recording cannot go on."""

    def __init__(self, *, module: str, what: str, remedy: str) -> None:
        super().__init__(what)
        self.reason = Reason(module=module, what=what, remedy=remedy)


def try_operation(
    func: Callable[..., Any], args: Any, kwargs: Any, *, name: str, place: str, after: str, device: torch.device
) -> tuple[Any, dict[int, Tensor]]:
    """Run an operation between units; return its result, and the arguments that it changed, by their place.

    `place` says for messages where the code is, and `after` which unit was called last. Raises RecordingRefused where
    the operation cannot be run without the contents of its arguments.
    """
    if name == "__set__" and isinstance(args[1], Tensor):
        raise RecordingRefused(
            module=after,
            what=f"an attribute of a tensor (such as .data) is set {place} which other stages would not see.",
            remedy="Use an operation in place, such as copy_(), or do it inside a unit.",
        )
    reason: BaseException | None = None
    if not torch.is_autocast_enabled(device.type):
        try:
            return on_meta(func, args, kwargs)
        except USER_ERRORS as error:
            reason = error
    try:
        out, changed = on_invented_values(func, args, kwargs, device=device)
    except USER_ERRORS as error:
        raise RecordingRefused(
            module=after,
            what=f"{name}() {place} cannot be run to see what it returns: {first_line(error)}.",
            remedy="Do this inside a module that is a unit.",
        ) from error
    if reason is not None and (not (tensors_in(out) or changed) or _depends_on_contents(func, args, kwargs, device)):
        raise RecordingRefused(
            module=after,
            what=f"{name}() {place} asks for the contents of what a unit made, which only the stage that has the "
            "unit has.",
            remedy="Do this inside a module that is a unit, or leave it out of the forward.",
        )
    return out, changed


def _depends_on_contents(func: Callable[..., Any], args: Any, kwargs: Any, device: torch.device) -> bool:
    """Return whether the shapes of the result depend on the numbers."""
    shapes = set()
    for fill in (None, -1.0, 0.0, 1.0):
        with suppress(*USER_ERRORS):  # the operation may not accept these numbers
            out, _ = on_invented_values(func, args, kwargs, device=device, fill=fill)
            shapes.add(tuple(tuple(tensor.shape) for tensor in tensors_in(out)))
    return len(shapes) > 1


def first_line(error: BaseException | None) -> str:
    """Return the class of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
