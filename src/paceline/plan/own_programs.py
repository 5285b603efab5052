"""Programs of Paceline's own that run as jobs: named by their place in the package, which differs between hosts."""

from __future__ import annotations

from pathlib import Path

__all__ = ["program_here", "sent_program"]

MARK = "paceline:"
PACKAGE = Path(__file__).parent.parent


def sent_program(program: str) -> str:
    """Return what other hosts are told to run: the path, or "paceline:doctor/doctor.py" of a file of the package."""
    path = Path(program)
    return f"{MARK}{path.relative_to(PACKAGE)}" if path.is_relative_to(PACKAGE) else program


def program_here(told: str) -> str:
    """Return the path on this host of what `sent_program` returned."""
    return str(PACKAGE / told.removeprefix(MARK)) if told.startswith(MARK) else told
