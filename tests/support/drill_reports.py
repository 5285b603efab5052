"""Reports of runs under faults, and requests for drills, as the tests of the drill make them."""

from __future__ import annotations

from pathlib import Path

from paceline.cli.arguments import Parser
from paceline.cli.drill.command import add
from paceline.cli.drill.request import DrillRequest, drill_request
from paceline.cli.drill.run import DrillTerms, drill_terms
from paceline.events import Record, StepDone
from paceline.monitor.audit.audit import AuditResult
from paceline.plan import Layout, Plan
from paceline.testing import (
    Came,
    Programme,
    Report,
    Start,
)

__all__ = ["CLEAN", "KILL", "committed", "request", "terms", "told"]


CLEAN = AuditResult(run_dir="run", num_attempts=1, epochs=(), problems=(), notes=())


def told(programme: str = "", **changes: object) -> Report:
    faults = Programme.parse(programme)
    fields: dict[str, object] = {
        "folder": Path("folder"),
        "run_dir": Path("folder/run"),
        "programme": faults,
        "came": tuple(Came(step=fault.step, place=fault.place, time=1.0, pid=1) for fault in faults),
        "starts": (Start(exit_code=0, output="", resumable_step=0),),
        "resumed_from": (0,),
        "committed": (4,),
        "plan": Plan(layout=Layout(replicas=(1, 3))),
        "workers": 3,
        "losses": {1: 1.0, 2: 0.9, 3: 0.8, 4: 0.7},
        "left_out": frozenset(),
        "late": frozenset(),
        "differing": (),
        "regrouped": (),
        "failed_saves": (),
        "passed_over": (),
        "audit": CLEAN,
        "recovery_s": (None,) * len(faults),
        "notes": (),
    }
    values = fields | changes
    values.setdefault("restarted", (None,) * len(values["resumed_from"]))  # type: ignore[arg-type]  # the values are of many types
    return Report(**values)  # type: ignore[arg-type]  # the values are of many types


KILL = "kill:worker=1,step=2,where=sum"


def terms(plan: Plan | str, *words: str, workers: int = 3, steps: int = 40) -> DrillTerms:
    asked = request(__file__, *words)
    whole = Plan.parse(plan) if isinstance(plan, str) else plan
    return drill_terms(asked, whole.resolve(workers), workers=workers, steps=steps)


def committed(step: int, when: float) -> Record:
    done = StepDone(step=step, epoch=0, num_samples=1, loss=1.0, metrics={}, seconds={})
    return Record(when, 0, done)


# The command's options.
def request(*words: str) -> DrillRequest:
    parser = Parser(prog="paceline")
    commands = parser.add_subparsers(parser_class=Parser)
    add(commands)
    arguments = parser.parse_args(["drill", *words])
    arguments.script_args = ()
    return drill_request(arguments)
