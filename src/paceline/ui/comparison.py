"""Several runs side by side: what differs in their plans and jobs, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.ui.plan_facts import plan_parts

__all__ = ["MOST_COMPARED", "compared"]

MOST_COMPARED = 12
JOB = ("program", "args", "workers", "hosts", "device", "threads", "max_steps", "balance", "cluster")


def compared(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each fact of the runs: `group` (outcome, plan or job), `name`, `values` in the order of the
    runs (None: it has none) and whether it `differs`. A run is the `summary`, `about` and `evaluations` of its page."""
    facts = [dict(_facts(run)) for run in runs]
    names = dict.fromkeys(name for one in facts for name in one)
    rows: list[dict[str, Any]] = []
    for group, name in names:
        values = [one.get((group, name)) for one in facts]
        rows.append({"group": group, "name": name, "values": values, "differs": len(set(map(str, values))) > 1})
    order = ("outcome", "plan", "job")
    return sorted(rows, key=lambda row: order.index(row["group"]))


def _facts(run: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], Any]]:
    summary, about = run.get("summary", {}), run.get("about", {})
    for name in ("state", "step", "first_loss", "loss", "samples_per_s", "step_s"):
        yield ("outcome", name), summary.get(name)
    ended = summary.get("ended") or summary.get("at")
    yield ("outcome", "duration_s"), ended - summary["began"] if ended and summary.get("began") else None
    yield ("outcome", "attempts"), summary.get("attempt")
    for name, points in run.get("evaluations", {}).items():
        yield ("outcome", f"{name}, last"), points[-1][1]
        yield ("outcome", f"{name}, least"), min(value for _, value in points)
        yield ("outcome", f"{name}, most"), max(value for _, value in points)
    yield ("plan", "plan"), summary.get("plan")
    for name, value in plan_parts(summary.get("plan", "")).items():
        yield ("plan", name), value
    for name in JOB:
        if name in about.get("job", {}):
            yield ("job", name), about["job"][name]
