"""How many sizes and seeds a test tries: all of them, or a selection with `--quick`, which `make check` uses.

A property that is proved for hundreds of sizes takes seconds. `make test` proves it for all of them; between two edits
every `step`-th is enough, with the first and the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

__all__ = ["examples", "some", "turn_on"]

T = TypeVar("T")

_is_quick = False


def turn_on(quick: bool) -> None:
    """Called once, before tests are collected."""
    global _is_quick
    _is_quick = quick


def some(of: Sequence[T], *, step: int) -> list[T]:
    """All of them; with `--quick` every `step`-th from the first on, and the last."""
    return [*of[:-1:step], *of[-1:]] if _is_quick else list(of)


def examples(number: int) -> int:
    """How many examples hypothesis makes; with `--quick` a fifth."""
    return -(-number // 5) if _is_quick else number
