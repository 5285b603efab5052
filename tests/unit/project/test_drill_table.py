"""The table of `benchmarks/drill_table.py`: what held, what did not and why, at its place in the docs."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def drill_table(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("drill_table")


def test_a_cell_says_whether_a_promise_held_or_why_the_fault_was_left_out(drill_table: Any) -> None:
    held = {"kill": [], "nan": ["`nan:worker=1,step=5`: step 5 was taken all the same"]}
    found = {"tensor": {"date": "", "verdicts": held, "said": ["flip does not apply: it needs 3"], "refused": ""}}
    _, _, row, _, _, _, *reasons = drill_table.table(found).splitlines()
    cells = dict(zip(["plan", "", *drill_table.FAULTS], (cell.strip() for cell in row.split("|")[1:]), strict=False))
    assert cells["plan"] == "tensor" and cells["kill"] == "holds" and cells["term"] == ""
    assert (cells["flip"], cells["nan"]) == ("- (1)", "**DOES NOT HOLD** (2)")
    assert reasons[0] == "1. flip does not apply: it needs 3."
    assert reasons[1] == "2. `nan:worker=1,step=5`: step 5 was taken all the same."


def test_a_plan_that_could_not_be_drilled_does_not_hold(drill_table: Any) -> None:
    found = {"tensor": {"date": "", "verdicts": {}, "said": [], "refused": "it fails undisturbed"}}
    assert drill_table.table(found).count("DOES NOT HOLD (1)") == len(drill_table.FAULTS)


def test_only_what_is_between_the_marks_of_a_page_is_replaced(drill_table: Any, tmp_path: Path) -> None:
    page = tmp_path / "drill.md"
    page.write_text(f"before\n{drill_table.BEGIN}\nold\n{drill_table.END}\nafter\n")
    drill_table.write(page, "new")
    assert page.read_text() == f"before\n{drill_table.BEGIN}\n\nnew\n\n{drill_table.END}\nafter\n"
    page.write_text("before\n")
    with pytest.raises(SystemExit, match="lacks the lines"):
        drill_table.write(page, "new")


def test_the_docs_have_a_row_for_each_plan_that_is_drilled(drill_table: Any) -> None:
    shown = drill_table.PAGE.read_text(encoding="utf-8").partition(drill_table.BEGIN)[2].partition(drill_table.END)[0]
    rows = [line.split("|")[1].strip() for line in shown.splitlines() if line.startswith("| ")]
    assert rows == ["plan", *drill_table.PLANS]
