"""Attempts that a run's pool ended are no incidents of the run: its report says `preempted` of them, as of any other
request to save and leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.ui.pool_history import Decision

__all__ = ["with_pauses"]

PREEMPTED, PAUSED = "preempted", "paused"
WITHIN_S = 120.0  # from the decision until the run has saved and ended


def with_pauses(report: Mapping[str, Any], decisions: Sequence[Decision]) -> dict[str, Any]:
    """Return the report with the incidents that are decisions of the run's pool told as that: of the kind `paused`."""
    ends = {one["attempt"]: one["began"] + one["duration_s"] for one in report.get("attempts", ())}
    return dict(report) | {
        "incidents": [_told(one, ends.get(one.get("attempt")), decisions) for one in report.get("incidents", ())]
    }


def _told(incident: dict[str, Any], ended: float | None, decisions: Sequence[Decision]) -> dict[str, Any]:
    if incident["kind"] != "end" or incident.get("causes") != [PREEMPTED] or ended is None:
        return incident
    before = [one for one in decisions if one.before > 0 and ended - WITHIN_S <= one.time <= ended]
    if not before:
        return incident
    newest = before[-1]
    cause = "paused by its pool" if newest.after == 0 else "started anew by its pool"
    return incident | {
        "kind": PAUSED,
        "causes": [cause],
        "text": incident["text"].replace(f": {PREEMPTED}", f": {cause}", 1),
    }
