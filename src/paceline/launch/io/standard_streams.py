"""Standard streams that this process was started without become /dev/null, before another file takes their place."""

from __future__ import annotations

import os
import sys

__all__ = ["open_missing_streams"]


def open_missing_streams() -> None:
    """Open those of descriptors 0 to 2 that are closed (`train.py >&-`), and the objects of `sys` that go with them.

    Without this a socket of ours would get the number, and print() would write into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115  # it lives as long as the process
