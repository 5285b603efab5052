"""Whether this process runs a script, and which: a notebook and an interpreter have none."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["is_option", "is_program", "own_script"]

STDIN = "<stdin>"  # the file of a script that is read from there


def own_script() -> Path | None:
    """The script's file; None in a notebook or an interpreter, or where the script is read from a pipe or an option."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    is_script = path is not None and path != STDIN and "ipykernel" not in Path(path).parts
    return Path(path) if is_script and path is not None else None


def is_program() -> bool:
    """Whether this process runs a script from its beginning to its end, so that an exit status may end it: also one
    from a pipe, or of `python -c`; not a notebook or an interpreter."""
    is_from_pipe = getattr(sys.modules["__main__"], "__file__", None) == STDIN
    return own_script() is not None or (not hasattr(sys, "ps1") and (is_from_pipe or is_option()))


def is_option() -> bool:
    """Whether the script is the text that `python -c` was given."""
    return sys.argv[:1] == ["-c"]
