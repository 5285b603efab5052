"""Finds the line of the user's code that made a call, as opposed to library code. Imports no torch: monitors use it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import FrameType

__all__ = ["caller_line", "is_user_code", "place_text"]

PACKAGE = f"{Path(__file__).resolve().parent.parent}{os.sep}"
LIBRARIES = re.compile(r"[\\/](site|dist)-packages[\\/]|[\\/]lib(64)?[\\/]python3(\.\d+t?)?[\\/]")
DEPTH = 64  # frames that are searched

# Caches by file and line, because every collective looks them up. (Code objects would be slow keys.)
_users: dict[str, bool] = {}
_texts: dict[tuple[str, int, str], str] = {}


def is_user_code(path: str) -> bool:
    """Whether a file is the user's own: neither Paceline's nor Python's nor an installed package's."""
    if path.startswith((PACKAGE, "<frozen ", "<string>")):
        return False
    return LIBRARIES.search(path) is None


def caller_line() -> str:
    """Return the user's innermost line on this thread's stack, "train.py:88 in load_image"; "" where there is none."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # documented, and named so for what it costs in other Pythons
    for _ in range(DEPTH):
        if frame is None:
            break
        code = frame.f_code
        path = code.co_filename
        known = _users.get(path)
        if known is None:
            known = _users[path] = is_user_code(path)
        if known:
            key = (path, frame.f_lineno, code.co_name)
            text = _texts.get(key)
            if text is None:
                text = _texts[key] = place_text(*key)
            return text
        frame = frame.f_back
    return ""


def place_text(path: str, line: int, function: str) -> str:
    """Return a place in the code for messages: the file's name is enough, its folders are in the stack trace."""
    where = f"{os.path.basename(path)}:{line}"
    return where if function == "<module>" else f"{where} in {function}"
