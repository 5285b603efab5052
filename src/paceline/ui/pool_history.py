"""What a pool has decided, and how many devices each of its runs had over time, by its `decisions.jsonl`."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from paceline.plain_data import read_object
from paceline.ui.metrics_rows import number
from paceline.units import printable

__all__ = ["Decision", "decision_of", "history_of"]

MOST_REPLICAS = 1_000_000
MOST_CHANGES = 800  # the newest, of the history
MOST_TEXT = 600


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """A run goes from `before` to `after` replicas, at `time` in seconds since 1970; `why` in words."""

    time: float
    run: str
    before: int
    after: int
    why: str

    def facts(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def decision_of(line: bytes) -> Decision | None:
    """Return the decision of a line; None where it is none."""
    try:
        row = read_object(line)
    except ValueError:
        return None
    when, run, before, after = number(row.get("time")), row.get("run"), row.get("before"), row.get("after")
    if when is None or not 0 < when < 1e11 or not isinstance(run, str):
        return None
    if type(before) is not int or type(after) is not int or not (0 <= before <= MOST_REPLICAS >= after >= 0):
        return None
    why = printable(str(row.get("why", "")))[:MOST_TEXT]
    return Decision(time=when, run=printable(run)[:MOST_TEXT], before=before, after=after, why=why)


def history_of(
    decisions: Sequence[Decision], *, each: Mapping[str, int], ends: Mapping[str, float], slots: int
) -> dict[str, list[list[float]]]:
    """Return for each run the moments at which its devices changed: `[[time, devices], ...]`, by time.

    `each`: workers of a replica, by run; 1 where that is not known. `ends`: when runs gave all of theirs back, which is
    no decision: they ended, or their pool did. Of a run that is in neither, which was taken out, no file says when. It
    counts until others had its devices, of all `slots`, and at the latest until the last decision.
    """
    rows = sorted(decisions, key=lambda one: one.time)[-MOST_CHANGES:]
    found: dict[str, list[list[float]]] = {}
    for row in rows:
        changes = found.setdefault(row.run, [])
        if row.before == 0 and changes and changes[-1][1]:  # it was given back, and no decision says when
            changes.append([max(changes[-1][0], min(ends.get(row.run, row.time), row.time)), 0])
        changes.append([row.time, row.after * each.get(row.run, 1)])
        _end_the_unknown(found, row.time, known=each.keys(), ends=ends, slots=slots)
    for run, changes in found.items():
        if not changes[-1][1]:
            continue
        if run in ends:
            changes.append([max(ends[run], changes[-1][0]), 0])
        elif run not in each:
            changes.append([max(rows[-1].time, changes[-1][0]), 0])
    return found


def _end_the_unknown(
    found: Mapping[str, list[list[float]]],
    now: float,
    *,
    known: Collection[str],
    ends: Mapping[str, float],
    slots: int,
) -> None:
    """Where more devices are held than there are, runs that ended by now have given theirs back, and so have those that
    nothing more is known of, the one first that changed first."""
    for run, changes in found.items():
        if changes[-1][1] and run in ends and changes[-1][0] <= ends[run] <= now:
            changes.append([ends[run], 0])
    too_many = sum(changes[-1][1] for changes in found.values()) - slots
    gone = [one for run, one in found.items() if one[-1][1] and run not in known and run not in ends]
    for changes in sorted(gone, key=lambda one: one[-1][0]):
        if too_many <= 0 or changes[-1][0] >= now:
            return
        too_many -= changes[-1][1]
        changes.append([now, 0])
