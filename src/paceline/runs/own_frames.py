"""What Python prints of an error that `paceline.run()` raises in a script: the script's own frames, ours in one line.

The hook is set when such an error is on its way, and only where the program has none of its own. An error that is
caught has its whole traceback. Under torchrun lines begin with the worker's rank, as those of torch's own hook do.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

from paceline import environment
from paceline.monitor.records.failure import own_frames
from paceline.units import printable

__all__ = ["error_text", "folds_own_frames"]

P = ParamSpec("P")
T = TypeVar("T")


def folds_own_frames(call: Callable[P, T]) -> Callable[P, T]:
    """Have the traceback of an error that `call` raises, and that nobody catches, printed with the script's frames."""

    @functools.wraps(call)
    def calling(*args: P.args, **kwargs: P.kwargs) -> T:
        is_default = sys.excepthook is sys.__excepthook__  # torch sets its own around it when workers meet
        try:
            return call(*args, **kwargs)
        except Exception:
            if is_default and environment.assignment() is None:  # a worker's log has all frames
                world = environment.detect()
                _set_hook("" if world is None else f"[rank{world.worker_rank}]: ")
            raise

    return calling


def error_text(error: BaseException) -> str:
    """Return what is printed of an error."""
    return printable(own_frames("".join(traceback.format_exception(error))))


def _set_hook(prefix: str) -> None:
    """`prefix` begins each line."""
    is_torchs = str(getattr(sys.excepthook, "__module__", "")).startswith("torch.distributed")
    if hasattr(sys, "ps1") or not (is_torchs or sys.excepthook is sys.__excepthook__):
        return

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            lines = error_text(error.with_traceback(trace)).split("\n")
            print("\n".join(prefix + line for line in lines), file=sys.stderr, flush=True)
        except Exception:  # an error whose own words fail
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = show
