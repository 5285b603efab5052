"""How many sizes, seeds and cases a test tries: fewer in `make check`, most in `make test`, all in `make test-long`.

A property that is proved for hundreds of sizes takes seconds. `make test` proves it for all of them; between two edits
(`--quick`) every `step`-th is enough, with the first and the last, and tests marked `thorough` are left out. A claim on
real workers that holds for twenty combinations takes a minute. `make test` tries every path, and some of the
combinations; the mark `further` leaves the rest to `make test-long` (`--further`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest

__all__ = ["examples", "further", "some", "spread", "turn_on", "without"]

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


def spread(of: Sequence[T], *, step: int = 2) -> list[Any]:
    """All of them, as cases of a test; but for every `step`-th from the first on, they are `further` ones."""
    return [case if number % step == 0 else further(case) for number, case in enumerate(of)]


def without(left: Sequence[T], of: Iterable[T]) -> list[Any]:
    """All of them, as cases of a test; but those of `left` are `further` ones."""
    return [further(case) if case in left else case for case in of]


def further(*values: Any, id: str | None = None) -> Any:
    """A case of a test that only `make test-long` tries; also one that has an id already."""
    marks, case = pytest.mark.further, values[0]
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, id=case.id, marks=marks)
    return pytest.param(*values, id=id, marks=marks)
