"""Where a run stands in its pool and its sweep: it may wait, or be pruned, where its own record only says that it was
stopped."""

from __future__ import annotations

import dataclasses
from typing import Any

from paceline.monitor.records.run_record import RUNNING
from paceline.ui.run_summary import RunSummary

__all__ = ["NOWHERE", "GroupEntry", "RunPlace", "place_of"]

WAITING, LEAVING, STARTING, PRUNED = "waiting", "leaving", "starting", "pruned"
ENDED_EARLY = ("stopped", "lost", "failed")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroupEntry:
    """What the files of a pool and of a sweep say of a run. `since`: its last change in the pool, in seconds since
    1970."""

    pool: str | None = None
    phase: str = ""
    since: float | None = None
    sweep: str | None = None
    number: int | None = None
    trial_state: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunPlace:
    """The pool and the sweep that a run belongs to, by the names of their pages, and the trial that it is. `state` is
    shown in place of the record's: waiting, starting or pruned; "": the record's holds."""

    state: str = ""
    pool: str | None = None
    sweep: str | None = None
    number: int | None = None

    def facts(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


NOWHERE = RunPlace()


def place_of(run: RunSummary, found: GroupEntry | None) -> RunPlace:
    """Return where a run stands; `found` is None where no pool and no sweep names it."""
    if found is None:
        return NOWHERE
    return RunPlace(state=_state(run, found), pool=found.pool, sweep=found.sweep, number=found.number)


def _state(run: RunSummary, found: GroupEntry) -> str:
    if run.state not in ENDED_EARLY:
        return ""
    if found.trial_state == PRUNED:
        return PRUNED
    if found.phase == WAITING or (found.phase == LEAVING and run.state == "stopped"):
        return WAITING
    is_newer = found.since is not None and run.ended is not None and found.since > run.ended
    return STARTING if found.phase == RUNNING and is_newer else ""
