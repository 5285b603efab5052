"""The command called in this process, with something else in place of what it starts."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.cli import main as cli

__all__ = ["Record", "refused", "run"]


Record = list[tuple[tuple[Any, ...], dict[str, Any]]]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = cli.main(words)
    said = capsys.readouterr()
    return status, said.out, said.err


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the message of a command that is refused: exit status 2, one message, nothing on stdout."""
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "")
    assert err.startswith("paceline: ")
    return err.removeprefix("paceline: ")
