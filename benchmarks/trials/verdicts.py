"""What became of a program under a plan: as in one process, refused in a sentence of ours, or wrong.

A refusal is an error that Paceline's own code raises, by a `raise` statement, of a class that a user is meant to see,
and its message tells what to do. All else is a crash: torch's words under our frames, or a KeyError of our code.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from trials.registry import Outcome

__all__ = ["Cell", "Raised", "difference", "judged", "raised_in"]

FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
ERROR = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*)(?:: (?P<text>.*))?", re.DOTALL)
OWN = ("ValueError", "TypeError", "RuntimeError", "paceline.errors.")
FOLLOWS = ("paceline.errors.SyncError",)  # what a worker says whose peer has failed
CUT_OFF = re.compile(r"onnection (closed|reset|refused)|broken pipe|peer", re.IGNORECASE)
REMEDY = re.compile(
    r"\b(accumulate|add|assign|average|build|call|check|choose|clip|copy|compute|divide|drop|end|evaluate|exclude|"
    r"freeze|give|hold|initialise|keep|leave|loop|make|mark|measure|move|must|name|pad|pass|prepare|project|put|register|"
    r"replace|return|run|save|set|split|start|step|take|train|turn|use|wait|without|work|write)\b",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """What became of a program under a plan."""

    state: str  # same | refused | WRONG | CRASH | HANG
    difference: float = 0.0
    text: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Raised:
    """The last error of a traceback, and where it was raised."""

    kind: str
    text: str
    is_ours: bool  # by a `raise` statement in paceline's own files

    @property
    def is_refusal(self) -> bool:
        """Whether it is a sentence of ours that names a remedy."""
        is_meant = self.kind.startswith(OWN) and self.kind not in FOLLOWS
        first, _, rest = self.text.partition(". ")
        tells = REMEDY.search(rest) or (re.search(r"[;:,] ", first) and REMEDY.search(first))
        return self.is_ours and is_meant and bool(tells)

    @property
    def only_follows(self) -> bool:
        """Whether it says no more than that another worker has failed."""
        return self.kind in FOLLOWS or (not self.is_refusal and bool(CUT_OFF.search(self.text)))


def raised_in(text: str) -> Raised | None:
    """The last error of a traceback; None where a process has left none."""
    frames = list(FRAME.finditer(text))
    if not frames or text.startswith("status "):
        return None
    lines = text[frames[-1].end() :].splitlines()[1:]
    start = next((number for number, line in enumerate(lines) if line and not line.startswith(" ")), None)
    found = ERROR.match("\n".join(lines[start:]).strip()) if start is not None else None
    if found is None:
        return None
    file, line = frames[-1]["file"], int(frames[-1]["line"])
    is_ours = "/paceline/" in file and _raises(file, line)
    return Raised(kind=found["kind"], text=(found["text"] or "").strip(), is_ours=is_ours)


def judged(errors: Mapping[int, str]) -> Cell:
    """Return what the failures of some workers (rank -> traceback) amount to."""
    found = {rank: raised_in(text) for rank, text in errors.items()}
    raised = [one for one in found.values() if one is not None]
    crashes = [one for one in raised if not one.is_refusal and not one.only_follows]
    if crashes:
        return Cell(state="CRASH", text=f"{crashes[0].kind}: {crashes[0].text}")
    refusals = [one.text for one in raised if one.is_refusal]
    if refusals:
        return Cell(state="refused", text=refusals[0])
    stuck = [text for rank, text in errors.items() if found[rank] is None]
    if stuck or any("stood still" in one.text or "timeout" in one.text for one in raised):
        return Cell(state="HANG", text=(stuck or [one.text for one in raised])[0])
    return Cell(state="CRASH", text=raised[0].text)


def difference(found: Outcome, reference: Outcome) -> float:
    """The largest relative difference to what the reference has seen; infinite where something is missing or no
    number."""
    if len(found.losses) != len(reference.losses) or reference.others.keys() - found.others.keys():
        return math.inf
    pairs: Sequence[tuple[float, float]] = [
        *zip(found.losses, reference.losses, strict=True),
        *((found.others[name], value) for name, value in reference.others.items()),
    ]
    worst = 0.0
    for value, expected in pairs:
        one = 0.0 if value == expected else abs(value - expected) / max(abs(expected), 1e-6)
        worst = max(worst, one if math.isfinite(one) else math.inf)
    return worst


def _raises(file: str, line: int) -> bool:
    """Whether a line belongs to a `raise` statement with an error of its own."""
    return any(first <= line <= last for first, last in _raise_statements(file))


@functools.lru_cache
def _raise_statements(file: str) -> tuple[tuple[int, int], ...]:
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    return tuple(
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and node.exc is not None
    )
