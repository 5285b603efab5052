"""Which attempts led to a run's state: the line back from one attempt, by the heads of the ledgers.

Each attempt says, in the first lines of its workers' ledgers, from which step of which attempt it went on. That need
not be the attempt before: one that was started over, or from an older step, and saved nothing, leads nowhere.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.monitor.files import worker_number

__all__ = ["Beginning", "Stretch", "beginning_of", "beginnings", "comes_by", "line_from", "parsed"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Beginning:
    """What an attempt went on from, by the head of its ledgers."""

    from_step: int
    of_attempt: int | None  # whose checkpoint it was; None: none of this run
    source: str | None = None  # the checkpoint, where it is another run's
    starts: tuple[tuple[str, int, int], ...] = ()  # stream, epoch, position: where that checkpoint stands


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """The steps of an attempt that led to what came later: `after` + 1 to `until`.

    Of an attempt that has left no ledger nobody knows on what it went on. It may have gone on from any before, so all
    of these follow it, each from step 1; of a step that several took the later one's word counts.
    """

    attempt: int
    after: int
    until: float

    def __contains__(self, step: int) -> bool:
        return self.after < step <= self.until


def line_from(newest: int, begun: Mapping[int, Beginning]) -> Iterator[Stretch]:
    """Yield the stretches that led to the state of an attempt, its own first; `begun` is of all that left ledgers."""
    attempt: int | None = newest
    until = math.inf
    while attempt is not None:
        if attempt not in begun:
            yield from (Stretch(attempt=one, after=0, until=until) for one in range(attempt, 0, -1))
            return
        own = begun[attempt]
        yield Stretch(attempt=attempt, after=own.from_step, until=until)
        until = min(until, own.from_step)
        is_known = own.source is None and own.of_attempt is not None and own.of_attempt < attempt and until > 0
        attempt = own.of_attempt if is_known else None


def comes_by(attempt: int, place: Beginning | None, begun: Mapping[int, Beginning]) -> bool:
    """Whether the line to an attempt's last step goes through the state that another one has begun with; where that is
    not known it may."""
    if place is None:
        return True
    line = list(line_from(attempt, begun))
    if any(one.attempt not in begun for one in line):  # nobody knows where it begins
        return True
    if place.of_attempt is not None:
        return any(one.attempt == place.of_attempt and place.from_step <= one.until for one in line)
    first = begun[line[-1].attempt]
    return (first.from_step, first.of_attempt, first.source) == (place.from_step, None, place.source)


def beginnings(run_dir: Path, *, until_attempt: int) -> dict[int, Beginning]:
    """What the attempts up to this one went on from, as far as their ledgers tell; reads a few lines of each."""
    found: dict[int, Beginning] = {}
    for number in range(1, until_attempt + 1):
        paths = sorted((run_dir / f"attempt_{number}").glob("worker_*/ledger.jsonl"))
        told = (beginning_of(path) for path in paths if worker_number(path.parent.name) is not None)
        begun = next((one for one in told if one is not None), None)
        if begun is not None:
            found[number] = begun
    return found


def beginning_of(path: Path) -> Beginning | None:
    """What an attempt went on from, by the first line of a ledger or its repetition after a restore; None where that
    is missing or cut off."""
    if not path.exists():
        return None
    begun: Beginning | None = None
    with open(path, encoding="utf-8", errors="replace") as file:
        for text in file:
            line = parsed(text)
            if line is None or not isinstance(line.get("from_step"), int):
                break
            begun = _begun(line)
    return begun


def parsed(text: str) -> dict[str, Any] | None:
    """The object that a line of a ledger holds; None where it is damaged."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def _begun(line: dict[str, Any]) -> Beginning:
    return Beginning(
        from_step=line["from_step"],
        of_attempt=line.get("of_attempt"),
        source=line.get("source"),
        starts=tuple((str(name), int(epoch), int(place)) for name, (epoch, place) in line.get("starts", {}).items()),
    )
