"""Each benchmark says at its start, in one line, what it does and how long it takes, and has a `--quick`."""

from __future__ import annotations

import argparse
import ast
import importlib
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
PROGRAMS = sorted(BENCHMARKS.glob("*.py"))
DESCRIPTION = """What a step costs: of two
programs, in turn. More about it.

    python benchmarks/one.py
"""


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("driving.options")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="one.py", description=DESCRIPTION)
    made.add_argument("--rounds", type=int, default=15)
    return made


def test_the_start_says_in_one_line_what_is_done_and_how_long_it_takes(
    options: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    given = options.options_of(parser(), takes="about 4 minutes", quick={"rounds": 1}, words=[])
    said = capsys.readouterr()
    assert given.rounds == 15 and not given.quick
    assert said.err == (
        "one.py: What a step costs: of two programs, in turn. It takes about 4 minutes (--quick: a minute).\n"
    )
    assert not said.out, "figures alone go to a file"


def test_quick_sets_what_is_not_given(options: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert options.options_of(parser(), takes="long", quick={"rounds": 1}, words=["--quick"]).rounds == 1
    assert "less than a minute, by --quick" in capsys.readouterr().err
    assert (
        options.options_of(parser(), takes="long", quick={"rounds": 1}, words=["--quick", "--rounds", "3"]).rounds == 3
    )
    with pytest.raises(ValueError, match="--quick sets turns, which the program has no option for"):
        options.options_of(parser(), takes="long", quick={"turns": 1}, words=[])


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_each_program_reads_its_options_so_and_describes_itself(path: Path) -> None:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    by_name = {ast.unparse(call.func): {word.arg: ast.unparse(word.value) for word in call.keywords} for call in calls}
    assert by_name["options_of"].keys() >= {"takes", "quick"}
    assert by_name["argparse.ArgumentParser"]["description"] == "__doc__"
    assert "parser.parse_args" not in by_name
