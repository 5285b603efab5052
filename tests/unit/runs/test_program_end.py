"""Where a program's own files only raise SystemExit, its status can be noted; else the name must stay a class."""

from __future__ import annotations

import ast

import pytest

from paceline.runs.program_end import only_raises_exit


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("raise SystemExit(main())", True),
        ("def stop():\n    raise SystemExit('no data')\nraise SystemExit(stop())", True),
        ("raise SystemExit", False),
        ("try:\n    raise SystemExit(1)\nexcept SystemExit:\n    pass", False),
        ("class Stop(SystemExit): ...", False),
        ("with contextlib.suppress(SystemExit):\n    raise SystemExit(2)", False),
        ("stop = SystemExit(1)\nraise stop", False),
        ("sys.exit(1)", False),
    ],
)
def test_only_calls_that_are_raised_may_be_replaced(text: str, expected: bool) -> None:
    assert only_raises_exit(ast.parse(text)) is expected
