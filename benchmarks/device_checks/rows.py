"""Rows of the table: what was asked, what was measured, and how to run that check alone."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

__all__ = ["Row", "Verdict", "append", "read", "write_tables"]

Verdict = Literal["holds", "does not hold", "measured", "skipped", "failed", "not run"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table."""

    check: str
    asked: str
    measured: str
    verdict: Verdict
    command: str
    seconds: float = 0.0  # since the row before, or the check's beginning


def append(path: Path, row: Row) -> None:
    """Keep a row at once: what comes later may be cut off."""
    with path.open("a") as file:
        file.write(f"\n{json.dumps(dataclasses.asdict(row))}\n")  # the row before may have been cut off
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[Row]:
    """Return what was kept; lines that were cut off are left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(Row(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return rows


def write_tables(folder: Path, rows: Sequence[Row], facts: Mapping[str, str]) -> None:
    """Write table.md and table.json, each as a whole."""
    _replace(
        folder / "table.json",
        json.dumps({"facts": dict(facts), "rows": [dataclasses.asdict(row) for row in rows]}, indent=1),
    )
    lines = [", ".join(f"{name} {value}" for name, value in facts.items()), ""]
    lines += ["| check | asked | measured | verdict | command |", "|---|---|---|---|---|"]
    for row in rows:
        cells = (row.check, row.asked, row.measured, row.verdict, f"`{row.command}`")
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    _replace(folder / "table.md", "\n".join(lines) + "\n")


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.{time.monotonic_ns()}")
    part.write_text(text)
    part.replace(path)
