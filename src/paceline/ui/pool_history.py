"""What a pool has decided, and how many devices each of its runs had over time, by its `decisions.jsonl`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.plain_data import read_object
from paceline.ui.metrics_rows import number
from paceline.units import printable

__all__ = ["Decision", "decision_of", "history_of"]

MOST_REPLICAS = 1_000_000
MOST_CHANGES = 800  # the newest, of the history
MOST_TEXT = 600
AT_ONCE_S = 0.1  # decisions that are so close are of one look: what one run gives, another one gets


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


@dataclasses.dataclass(kw_only=True, slots=True)
class _Stretch:
    """A run has so many devices `since` a moment, `until` another one; None: it has them still. `is_known`: that is so;
    otherwise it is the latest that can be."""

    since: float
    devices: int
    until: float | None
    is_known: bool

    def is_at(self, moment: float) -> bool:
        return self.since <= moment and (self.until is None or moment < self.until)


def history_of(
    decisions: Sequence[Decision],
    *,
    each: Mapping[str, int],
    ends: Mapping[str, float | None],
    missed: Mapping[str, float],
    slots: int,
) -> dict[str, list[list[float]]]:
    """Return for each run the moments at which its devices changed: `[[time, devices], ...]`, by time.

    `each`: workers of a replica, by run; 1 where that is not known. `ends`: when the runs of the queue gave all of
    theirs back, which is no decision; None: they have them still. Any other run was taken out, `missed` from some
    moment on, or not even that is known. It counts until others had its devices, of all `slots`, and at the latest
    until it was missed, it started again, or the newest decision was made.
    """
    rows = sorted(decisions, key=lambda one: one.time)[-MOST_CHANGES:]
    by_run: dict[str, list[Decision]] = {}
    for row in rows:
        by_run.setdefault(row.run, []).append(row)
    found: dict[str, list[_Stretch]] = {}
    for run, own in by_run.items():
        last = ends[run] if run in ends else missed.get(run, rows[-1].time)
        found[run] = list(_stretches(own, each.get(run, 1), last, is_known=run in ends))
    _give_to_others([one for stretches in found.values() for one in stretches], rows, slots)
    return {run: list(_changes(stretches)) for run, stretches in found.items()}


def _stretches(rows: Sequence[Decision], each: int, last: float | None, *, is_known: bool) -> Iterator[_Stretch]:
    """What a run had from each of its decisions to the next one; after the newest until `last`."""
    for place, row in enumerate(rows):
        following = rows[place + 1] if place + 1 < len(rows) else None
        until, known = last, is_known or row.after == 0
        if following is not None:
            is_told = following.before > 0 or row.after == 0
            given_back = is_known and last is not None and row.time <= last <= following.time
            until = last if given_back and not is_told else following.time
            known = is_told or given_back  # else it was given back before it started again, and no file says when
        until = None if until is None else max(until, row.time)
        yield _Stretch(since=row.time, devices=row.after * each, until=until, is_known=known)


def _give_to_others(stretches: Sequence[_Stretch], rows: Sequence[Decision], slots: int) -> None:
    """Where more devices are held than there are, stretches whose end is not known have ended, the oldest one first."""
    waiting = sorted((one for one in stretches if one.devices), key=lambda one: one.since)
    held: list[_Stretch] = []
    place = 0
    for row, following in itertools.zip_longest(rows, rows[1:]):
        while place < len(waiting) and waiting[place].since <= row.time:
            held.append(waiting[place])
            place += 1
        if following is not None and following.time - row.time < AT_ONCE_S:
            continue
        held = [one for one in held if one.is_at(row.time)]
        too_many = sum(one.devices for one in held) - slots
        for one in held:
            if too_many > 0 and not one.is_known and one.since < row.time:
                one.until = row.time
                too_many -= one.devices


def _changes(stretches: Sequence[_Stretch]) -> Iterator[list[float]]:
    for place, one in enumerate(stretches):
        yield [one.since, one.devices]
        following = stretches[place + 1].since if place + 1 < len(stretches) else None
        if one.devices and one.until is not None and (following is None or one.until < following):
            yield [one.until, 0]
