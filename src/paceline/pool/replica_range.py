"""How many replicas a run may have, from its plan: what the pool gives it lies between the two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.errors import PlanError
from paceline.plan import CommandPlan, Plan
from paceline.plan.layout import Layout
from paceline.plan.script_scan import computed_plan, layout_of_script, workers_of_script

__all__ = ["replica_range"]


def replica_range(
    script: Path, plan: CommandPlan, *, workers: int | None, args: Sequence[str], say: Callable[[str], None]
) -> tuple[int, int, int]:
    """Return the least and most replicas of a run, and the workers of each.

    Where the command's `plan` has no layout, the script's own call is read. `workers`: that the command asks for;
    `args` of the script, for the command that `say` names. Raises PlanError where the script computes its plan, or the
    workers do not fit the layout.
    """
    layout = plan.whole.layout if plan.whole is not None else layout_of_script(script, plan.settings)
    if layout is None and (source := computed_plan(script)) is not None:
        raise PlanError(
            f"{script} computes its plan ({source}), so the pool cannot know how many replicas it takes. Give the plan "
            'to the command: --plan "replicas=1-4+batch(size=64)", for example.'
        )
    workers = workers or (layout.workers if plan.whole is not None and layout is not None else None)
    workers = workers or workers_of_script(script, plan.settings, args=args, say=say)
    if layout is not None and workers is not None and not isinstance(layout.replicas, tuple):
        Plan(layout=layout).require(workers=workers)
    return _range_of(layout, workers)


def _range_of(layout: Layout | None, workers: int | None) -> tuple[int, int, int]:
    if layout is None:
        return workers or 1, workers or 1, 1
    each = layout.workers_each
    if isinstance(layout.replicas, tuple):
        return layout.replicas[0], layout.replicas[1], each
    count = layout.replicas or max(1, (workers or each) // each)
    return count, count, each
