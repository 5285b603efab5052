"""One check in a process of its own: NAME DEVICE SCRATCH ROWS COMMAND."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path

from device_checks.bench import Bench

__all__ = ["main"]


def main(words: list[str]) -> int:
    name, device, scratch, rows, command = words
    warnings.simplefilter("ignore")
    bench = Bench(name, device=device, scratch=Path(scratch), rows=Path(rows), command=command)
    importlib.import_module(f"device_checks.checks.{name}").check(bench)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
