"""Runs a TensorFlow program as its own process, and nothing else: started by path, it imports only Python itself.

    python child.py REPORT PARENT_PID SIGNALS STACKS STACK_SIGNAL SCRIPT [the script's arguments]

The program sees what `python SCRIPT ...` would show it. If it ends with an error, what became of it is written to the
file REPORT as a JSON object: kind, module, message and traceback of the error. SIGNALS ("10,12", or "-") are those by
which a batch system warns all processes of a job. They would end this one, so they are ignored until the program says
otherwise: its parent hears them, too. At the signal STACK_SIGNAL (a number) the program's first thread adds its Python
stack to the file STACKS.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import runpy
import signal
import sys
import traceback

__all__ = ["main"]

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the script of the command line as the main program."""
    report, parent, notices, stacks, stack_signal, script = sys.argv[1:7]
    _end_with(int(parent))
    for number in notices.split(",") if notices != "-" else ():
        signal.signal(int(number), signal.SIG_IGN)
    faulthandler.enable()
    with contextlib.suppress(OSError):  # a full disk: without stacks
        file = open(stacks, "ab", buffering=0)  # noqa: SIM115  # faulthandler keeps it
        faulthandler.register(int(stack_signal), file=file, all_threads=False, chain=False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    sys.argv = sys.argv[6:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        if stop.code not in (None, 0):
            _report(report, stop)
        raise
    except BaseException as error:
        _report(report, error)
        raise


def _end_with(parent: int) -> None:
    """End when the process that looks after this one ends, however it does."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def _report(path: str, error: BaseException) -> None:
    fields = {
        "kind": type(error).__name__,
        "module": type(error).__module__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }
    try:
        with open(f"{path}.new", "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(fields, file)
        os.replace(f"{path}.new", path)
    except OSError as problem:
        print(f"paceline: {path} could not be written: {problem}", file=sys.stderr)


if __name__ == "__main__":
    main()
