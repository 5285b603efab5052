"""`paceline plan train.py`: looks at what a script prepares, and prints what stands against its plan, what is good to
know, and what each worker would hold, as tables that fit 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import PlanError
from paceline.plan import Compute, Plan
from paceline.units import bytes_text

if TYPE_CHECKING:
    from paceline.parallel.check.sizes import Sizes
    from paceline.worker.looking import Findings

__all__ = ["look", "table"]

REFUSED = (24, 40, 32)  # columns: module, what, remedy
NOTED = (24, 74)
GAP = "  "


def look(
    script: Path,
    *,
    args: Sequence[str],
    plan: Plan | None,
    overrides: Sequence[str],
    workers: int | None,
    is_short: bool,
) -> int:
    """Print what was found; returns 2 where something stands against it. `is_short`: leave the plan itself out."""
    if not script.is_file():
        raise PlanError(f"There is no script {script}.")
    from paceline.worker.looking import look_at_script

    found = look_at_script(script, args=args, plan=plan, overrides=overrides, workers=workers)
    if not is_short:
        print(f"plan     {found.plan}")
        print(f"python   {found.plan!r}")
        print(f"workers  {found.workers}\n")
    _print_refusals(found)
    if found.remarks:
        print("\nGood to know")
        print(table([(one.module, one.what) for one in found.remarks], NOTED))
    for name, sizes in found.sizes.items():
        print(f"\nEach worker holds of {name}, beside activations (by formula)")
        print(_sizes_table(sizes, found.plan.compute))
    return 2 if found.refusals else 0


def table(rows: Iterable[Sequence[str]], widths: Sequence[int]) -> str:
    """Return rows of cells, each wrapped to its column's width."""
    lines: list[str] = []
    for row in rows:
        cells = [_wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
        for number in range(max(map(len, cells))):
            parts = [cell[number] if number < len(cell) else "" for cell in cells]
            line = GAP.join(f"{part:<{width}}" for part, width in zip(parts, widths, strict=True))
            lines.append(line.rstrip())
    return "\n".join(lines)


def _wrapped(text: str, width: int) -> list[str]:
    found: list[str] = []
    for line in text.splitlines():
        words = [piece for word in line.split(" ") for piece in _pieces(word, width)]
        found += textwrap.wrap(" ".join(words), width) or [""]
    return found or [""]


def _pieces(word: str, width: int) -> Iterator[str]:
    """A module's name that is longer than a line goes on in the next one from a dot, or an underscore."""
    while len(word) > width:
        at = max(word.rfind(mark, 1, width + 1) for mark in "._")
        at = at if at > 0 else width
        yield word[:at]
        word = word[at:]
    yield word


def _print_refusals(found: Findings) -> None:
    if not found.refusals:
        print(f"Nothing stands against {found.plan}.")
        return
    count = len(found.refusals)
    print(f"{count} {'thing stands' if count == 1 else 'things stand'} against {found.plan}")
    print(table([("module", "what", "remedy")], REFUSED))
    print(GAP.join("-" * width for width in REFUSED))
    print(table([(one.module, one.what, one.remedy) for one in found.refusals], REFUSED))


def _sizes_table(sizes: Sequence[Sizes], compute: Compute) -> str:
    is_offloaded = compute.offload != "none"
    head = ("", "parameters", "gradients", "optimizer", *(["elsewhere"] if is_offloaded else []), "most in a step")
    rows: list[tuple[str, ...]] = [head]
    for one in sizes:
        who = "each" if one.stage is None else f"stage worker {one.stage}"
        rest = [one.parameters, one.gradients, one.optimizer, *([one.elsewhere] if is_offloaded else []), one.peak]
        rows.append((who, *(_bytes(number) for number in rest)))
    text = "\n".join("".join(f"{cell:<16}" for cell in row).rstrip() for row in rows)
    if not is_offloaded:
        return text
    where = "the host's memory" if compute.offload_path is None else f"files in {compute.offload_path}"
    return f"{text}\nElsewhere is {where}; a step's most is what is in the device's memory."


def _bytes(number: int | None) -> str:
    return "not known before" if number is None else bytes_text(number)
