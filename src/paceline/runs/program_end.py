"""How a program that Paceline has not started has come to its end, for the record of the run that it is a worker of.

Python keeps an error that nobody has caught, but no SystemExit: its status is noted where the program asks for it.
"""

from __future__ import annotations

import ast
import builtins
import opcode
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from paceline.plan.program_text import ProgramText
from paceline.runs.own_script import own_script

__all__ = ["has_returned", "last_error", "note_exits", "program_frame"]

_exit_codes: list[Any] = []  # what the program last asked to end with


def note_exits() -> None:
    """From now on note the status with which the main thread of this process is to end: that of `sys.exit()`, `exit()`
    and `quit()`, and that of `raise SystemExit(...)` in the program's own files. Not known is that of
    `raise SystemExit(main())` where main() opens the worker: Python has looked the name up by then."""
    owner = os.getpid()
    for place in (sys, builtins):
        for name in ("exit", "quit"):
            if hasattr(place, name):
                setattr(place, name, _noting(getattr(place, name), owner))
    script = own_script()
    if script is None:
        return
    raising = {one.path.resolve() for one in ProgramText.of(script).modules if only_raises_exit(one.tree)}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and Path(file).resolve() in raising:
            vars(module).setdefault("SystemExit", _noted_exit(owner))


def only_raises_exit(tree: ast.Module) -> bool:
    """Whether a file uses the name SystemExit, and only as in `raise SystemExit(1)`: then a function may stand in its
    place, which a class in `except SystemExit` may not."""
    used = {id(node) for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "SystemExit"}
    raised = {
        id(node.exc.func) for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    }
    return bool(used) and used <= raised


def _noted_exit(owner: int) -> Callable[..., SystemExit]:
    def make(*codes: Any) -> SystemExit:
        stop = SystemExit(*codes)
        _note(stop.code, owner)
        return stop

    return make


def _noting(leave: Callable[..., NoReturn], owner: int) -> Callable[..., NoReturn]:
    """`leave`, which also notes the status."""

    def leaving(code: Any = None, /) -> NoReturn:
        _note(code, owner)
        leave(code)

    return leaving


def _note(code: Any, owner: int) -> None:
    if os.getpid() == owner and threading.current_thread() is threading.main_thread():
        _exit_codes[:] = [code]


def last_error() -> BaseException | None:
    """What has ended the program; None: nothing that is known, or a good end."""
    error: BaseException | None = getattr(sys, "last_value", None)
    return SystemExit(_exit_codes[0]) if error is None and _exit_codes and _exit_codes[0] else error


def program_frame() -> FrameType | None:
    """The frame of the program's own lines; None in a notebook or an interpreter."""
    frame: FrameType | None = sys._getframe()  # pyright: ignore[reportPrivateUsage]  # documented
    while frame is not None and not (
        frame.f_code.co_name == "<module>" and frame.f_globals is vars(sys.modules["__main__"])
    ):
        frame = frame.f_back
    return frame


def has_returned(frame: FrameType) -> bool:
    """Whether a frame that is over has come to its end, and was not left by an exception."""
    code = frame.f_code.co_code
    return 0 <= frame.f_lasti < len(code) and opcode.opname[code[frame.f_lasti]].startswith("RETURN_")
