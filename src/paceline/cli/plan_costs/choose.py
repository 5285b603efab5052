"""The process in which `plan="auto"` is chosen: `python -m paceline.cli.plan_costs.choose ASKED SCRIPT [ARGS]`.

ASKED is JSON, as `paceline.runs.auto_plan` writes it. The last line of output is JSON: the plan, and why. Lines
before it tell of each plan that was run.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.cli.plan_costs.here import this_machine
from paceline.cli.plan_costs.subject import Subject
from paceline.cli.plan_costs.verify import verified_plans
from paceline.errors import PacelineError, PlanError
from paceline.plan import CommandPlan, Layout, Plan
from paceline.runs.auto_plan import TRIED
from paceline.units import duration_text

__all__ = ["chosen", "main"]

OTHERS = 4  # plans beside the first


def chosen(script: Path, plan: CommandPlan, args: Sequence[str], *, workers: int) -> tuple[Plan, str]:
    """Return the fastest of the best plans, and why it was taken; PlanError where none of them ran."""
    from paceline.worker.script_inspection import inspect_script

    subject = Subject.of(inspect_script(script, args=args, plan=plan, workers=workers))
    if not subject.plan.layout.takes(workers):  # it is to be replaced
        subject = dataclasses.replace(subject, plan=dataclasses.replace(subject.plan, layout=Layout(replicas=workers)))
    where = this_machine(workers)
    tried = verified_plans(
        subject, where, OTHERS, script=script, args=args, tell=lambda text: print(f"{TRIED}{text}", flush=True)
    )
    ran = [(one.receipt.measured_s, str(one.priced.plan)) for one in tried if one.receipt is not None]
    if not ran:
        problems = "; ".join(f"{one.priced.plan}: {one.problem}" for one in tried)
        raise PlanError(f"none of {len(tried)} plans ran: {problems}")
    step_s, fastest = min(ran)
    return Plan.parse(fastest), f"{duration_text(step_s)} a step, the fastest of {len(ran)} that were run"


def main() -> int:
    """Choose, and print; errors in one line."""
    asked, script, *args = sys.argv[1:]
    given = json.loads(asked)
    try:
        command = CommandPlan.of(None if given["plan"] is None else Plan.parse(given["plan"]), given["overrides"])
        plan, why = chosen(Path(script), command, args, workers=given["workers"])
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"plan": str(plan), "why": why}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
