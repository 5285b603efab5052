"""The table of programs and plans, as a page's text, and what one run of the command keeps for it."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from trials.registry import PROGRAMS
from trials.verdicts import Cell

__all__ = ["FAULTS", "Row", "kept_rows", "summary", "table", "written"]

FAULTS = ("WRONG", "CRASH", "HANG")
HEADING = "## The table\n"
ONE = "one worker"
PARTICULARS = (  # what differs between sentences of one kind
    (re.compile(r"(layers of|experts in|cannot split|Cutting the layers of) [A-Z]\w+"), r"\1 the model"),
    (re.compile(r"(Layout\(context=2\):) [A-Z]\w+:"), r"\1 the model:"),
    (re.compile(r"^[A-Z]\w+ (cannot be partitioned|has \d+ modules|was called outside)"), r"The model \1"),
    (re.compile(r"replicas=[12], (?=shard|tensor)"), ""),
    (re.compile(r"Layout\(tensor=2, stages=2\)"), "Layout(tensor=2)"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One program: a cell for one worker (the plan ""), and for each plan."""

    program: str
    cells: Mapping[str, Cell]

    def line(self) -> str:
        """Return it as a line of JSON."""
        cells = {plan: dataclasses.asdict(cell) for plan, cell in self.cells.items()}
        return json.dumps({"program": self.program, "cells": cells}) + "\n"


def kept_rows(path: Path | None) -> dict[str, Row]:
    """Return the rows that earlier runs of the command have left in a file, by program."""
    if path is None or not path.exists():
        return {}
    values = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {
        one["program"]: Row(program=one["program"], cells={plan: Cell(**cell) for plan, cell in one["cells"].items()})
        for one in values
    }


def summary(rows: Sequence[Row]) -> str:
    """Return how many cells are of each state."""
    counts = collections.Counter(cell.state for row in rows for cell in row.cells.values())
    return ", ".join(f"{counts[state]} {state}" for state in ("same", "refused", *FAULTS) if counts[state])


def table(rows: Sequence[Row], plans: Sequence[str]) -> Iterator[str]:
    """Yield the table's lines, then the refusals' sentences, then what is wrong."""
    refusals: list[str] = []
    yield f"| program | {ONE} | {' | '.join(f'`{one}`' for one in plans)} |"
    yield f"|---|---|{'---|' * len(plans)}"
    for row in rows:
        shown = [_shown(row.cells.get(plan), refusals) for plan in ("", *plans)]
        yield f"| `{row.program}`: {PROGRAMS[row.program].about} | {' | '.join(shown)} |"
    yield ""
    yield f"In all: {summary(rows)}."
    yield ""
    for number, text in enumerate(refusals, start=1):
        yield f"{number}. {text}"
    for row in rows:
        for plan, cell in row.cells.items():
            if cell.state in FAULTS:
                yield f"- {row.program} under {plan or ONE}: {cell.state} {cell.difference:.1e} {cell.text}"


def written(page: str, rows: Sequence[Row], plans: Sequence[str], day: str) -> str:
    """Return a page with its table made anew; all above its heading stays."""
    head = page.partition(HEADING)[0]
    machine = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
    return "\n".join([f"{head}{HEADING}", f"Made on {day} ({machine}).", "", *table(rows, plans)]) + "\n"


def _shown(cell: Cell | None, refusals: list[str]) -> str:
    if cell is None:
        return "-"  # not run
    if cell.state == "same":
        return f"{cell.difference:.0e}" if cell.difference else "0"
    if cell.state == "refused":
        text = _shortened(cell.text)
        if text not in refusals:
            refusals.append(text)
        return f"({refusals.index(text) + 1})"
    return f"**{cell.state}**" + (f" {cell.difference:.0e}" if cell.difference else "")


def _shortened(text: str) -> str:
    """A refusal without its table of layers and guesses, the model's class, and sizes that the plan tells."""
    lines = [line.strip() for line in text.splitlines()]
    first, *rest = lines
    kept = [line for line in rest[:-1] if line.startswith("- ")]
    last = rest[-1].rpartition("): ")[2] if rest else ""
    told = " ".join([first, *kept, last]).strip()
    for pattern, what in PARTICULARS:
        told = pattern.sub(what, told)
    return told.replace("<", "&lt;").replace("|", "\\|")
