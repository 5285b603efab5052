"""What `paceline drill` prints: the table, what was promised, and a sentence for each broken promise."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

from paceline.plan import ParameterServer, Plan
from paceline.testing import Fault, Report
from paceline.testing.faults import OF_SERVERS
from paceline.testing.report import CURVE_TOLERANCE, LOSSY_TOLERANCE

__all__ = ["DrillVerdict", "drill_text", "print_report", "promise"]

ELASTIC = {
    "kill": "the others take the same step again without it; no step is lost, no sample is used twice",
    "term": "it finishes its step and leaves; the others go on; no step is lost",
    "stop": "it is given up after --silence-s; the others go on; no step is lost, and it never commits again",
    "cut": "one side goes on after --silence-s, the other one commits nothing more; no step is lost",
}
LOCAL = {  # in place of ELASTIC, where replicas take steps by themselves
    "kill": "before all agree again, the others run what it should have run since all last did; no sample is lost or "
    "used twice; what it had learnt since its weights last met the others' is lost with it",
    "term": "the round ends early, with its part in it, and it leaves; the others go on; no step is lost",
    "stop": "it is given up after --silence-s, and never agrees again; all else is as for kill",
    "cut": "one side goes on after --silence-s, as for kill; the other one agrees on nothing more",
}
ASYNC = {  # beside ELASTIC, where replicas do not wait for each other
    "kill": "no worker waits; its batch is handed out again; no sample is used twice",
    "term": "it finishes its batch and leaves; no worker waits",
    "stop": "it is given up after --silence-s, and its batch is handed out again; no worker waits for it meanwhile",
    "cut": "it is given up after --silence-s, and its batch is handed out again; no worker waits for it meanwhile",
}
BEGINS_AGAIN = "all workers begin again with the newest state in memory, or on disk where that is newer; no command"
KEPT = {  # beside FIXED
    "kill": BEGINS_AGAIN,
    "stop": f"{BEGINS_AGAIN}, after the job's timeout_s",
    "cut": "all begin again from memory, the lost host's part from its neighbor's, when a host comes in its place; on "
    "one host the run ends with an error, and the same command goes on from the newest whole checkpoint",
}
FIXED = {
    "kill": "the run ends with an error that names it; the same command goes on from the newest whole checkpoint",
    "term": "all finish the step, save and leave (exit code 75); the same command goes on; no step is lost",
    "stop": "the run ends with an error that names it; the same command goes on from the newest whole checkpoint",
    "cut": "the run ends with an error; the same command goes on from the newest whole checkpoint",
}
ALWAYS = {
    "slow": "nothing but time is lost",
    "full_disk": "the save fails with a warning, older checkpoints stay, training goes on",
    "torn_checkpoint": "the next start names and passes over what is not whole, and takes again only the steps since",
    "flip": "it is named, and gets the weights of the others before the next step (with plan.guard.check_every=1)",
    **dict.fromkeys(
        ("nan", "spike"),
        "no worker takes the step, weights stay as they were, training goes on (with plan.guard.on_spike=skip)",
    ),
}
POISONED = {  # in place of what ALWAYS says, by whose step it is
    "local": "the replica alone leaves out its step, and its weights stay as they were; training goes on",
    "turns": "its batch's update is left out, weights stay as they were, training goes on",
    "drops": "no worker takes the step, unless its share came too late and did not count; training goes on",
}
MIRRORED = "its mirror takes its place within the step; no step is lost"
UNMIRRORED = "all workers begin again from the newest checkpoint; no command"
CUT_SERVERS = {  # by whether they are mirrored
    True: "a worker that waits for a server or mirror on the other side goes on after the job's timeout_s",
    False: "where a server is on the other side, all begin again from the newest checkpoint, after the job's timeout_s",
}
COLUMNS = ("fault", "came", "steps lost", "samples repeated", "largest loss difference", "recovery s", "verdict")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DrillVerdict:
    """A run under faults, and what it did not keep."""

    report: Report
    like: Report
    broken: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not self.broken


def promise(fault: Fault, plan: Plan) -> str:
    """What is promised for a fault under a plan, in one line."""
    if fault.kind == "stop" and not fault.loses_a_worker:
        return "the others wait for it, or give it up after --silence-s; no step is lost"
    if fault.kind in OF_SERVERS:
        return MIRRORED if isinstance(plan.sync, ParameterServer) and plan.sync.mirrored else UNMIRRORED
    if fault.poisons and (plan.is_local or plan.is_asynchronous):
        whose = "local" if plan.is_local else "drops" if plan.has_backup_workers else "turns"
        return f"{POISONED[whose]} (with plan.guard.on_spike=skip)"
    fixed = FIXED | KEPT if plan.keeps_snapshots else FIXED
    elastic = ELASTIC | ASYNC if plan.is_asynchronous else LOCAL if plan.is_local else ELASTIC
    text = (ALWAYS | (elastic if plan.layout.is_elastic else fixed))[fault.kind]
    if fault.kind == "cut" and plan.layout.is_elastic and isinstance(plan.sync, ParameterServer):
        text += f"; {CUT_SERVERS[plan.sync.mirrored]}"
    return text + _how_near(fault, plan)


def _how_near(fault: Fault, plan: Plan) -> str:
    """How near losses are to those of an undisturbed run, where that is not to rounding."""
    is_smaller = plan.layout.is_elastic and fault.loses_a_worker  # the run
    is_begun_again = fault.ends_the_run or (fault.loses_a_worker and not plan.layout.is_elastic)
    if plan.is_asynchronous:
        return ""
    if (is_smaller and not plan.sync.exact_with_fewer) or (is_begun_again and not plan.sync.exact_again):
        return (
            f"; the curve is another one from there on, and its mean is near, to {CURVE_TOLERANCE:.0%} of the mean loss"
        )
    if is_smaller and not plan.wire.exact:
        return f"; the loss is within {LOSSY_TOLERANCE:.0%}, as the wire rounds, and what it had to send is lost"
    return ""


def print_report(judged: Sequence[DrillVerdict], *, like: Report, said: Sequence[str], as_json: bool) -> None:
    """Print the table and what it means, or all of it as JSON. `said`: what was said beforehand of what is drilled."""
    output = json.dumps(_facts(judged, like, said), indent=2) if as_json else drill_text(judged, like=like, said=said)
    print(output)


def drill_text(judged: Sequence[DrillVerdict], *, like: Report, said: Sequence[str] = ()) -> str:
    """Return the table, what was promised, a sentence per failure, and the verdict."""
    plan = judged[0].report.plan
    lines: list[Sequence[str]] = [COLUMNS, *(row for one in judged for row in _rows(one))]
    shown = dataclasses.replace(plan, guard=like.plan.guard)  # what the drill has set there stands with the promises
    head = f"plan {shown}, {like.workers} workers, {len(like.losses)} steps, against the undisturbed run ({like.plan})"
    blocks = ["\n".join([head, *said, "", *_table(lines)])]
    promises = {fault.kind: promise(fault, plan) for one in judged for fault in one.report.programme}
    blocks.append("\n".join(["promised:", *(f"  {kind}: {text}" for kind, text in promises.items())]))
    notes = list(dict.fromkeys(note for one in judged for note in one.report.notes))
    if notes:
        blocks.append("\n".join(["how it was done:", *(f"  {note}" for note in notes)]))
    failed = [one for one in judged if not one.holds]
    for one in failed:
        where = f"  see {one.report.folder}"
        blocks.append("\n".join([f"{one.report.programme}:", *(f"  {text}" for text in one.broken), where]))
    blocks.append(
        f"{len(failed)} of {len(judged)} runs did not keep what is promised" if failed else "all promises held"
    )
    return "\n\n".join(blocks)


def _rows(one: DrillVerdict) -> list[tuple[str, ...]]:
    """A line for each fault; what is true of the whole run stands on its first."""
    report, rows = one.report, list[tuple[str, ...]]()
    for number, (fault, came, recovery_s) in enumerate(
        zip(report.programme, report.came, report.recovery_s, strict=True)
    ):
        whole = (
            str(report.steps_lost),
            str(report.samples_repeated),
            _figure(report.loss_difference(one.like), is_mean=report.is_other_from is not None),
        )
        rows.append(
            (
                str(fault),
                "no" if came is None else f"step {came.step}, {came.place}",
                *(whole if number == 0 else ("", "", "")),
                "-" if recovery_s is None else f"{recovery_s:.2f}{_source(report) if number == 0 else ''}",
                ("holds" if one.holds else "BROKEN") if number == 0 else "",
            )
        )
    return rows


def _source(report: Report) -> str:
    """Where the state came from with which all began again: " (memory)"; "" if none did."""
    sources = dict.fromkeys(one.source for one in report.restarted if one is not None)
    return f" ({', '.join(sources)})" if sources else ""


def _facts(judged: Sequence[DrillVerdict], like: Report, said: Sequence[str]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for one in judged:
        report = one.report
        difference = report.loss_difference(like)
        rows.append(
            {
                "faults": [
                    {
                        "fault": str(fault),
                        "came": None if came is None else dataclasses.asdict(came),
                        "recovery_s": recovery_s,
                        "promise": promise(fault, report.plan),
                    }
                    for fault, came, recovery_s in zip(report.programme, report.came, report.recovery_s, strict=True)
                ],
                "plan": str(report.plan),
                "exit_codes": [start.exit_code for start in report.starts],
                "began_again_from": [one.source for one in report.restarted if one is not None],
                "steps_lost": report.steps_lost,
                "samples_repeated": report.samples_repeated,
                "loss_difference": difference if math.isfinite(difference) else None,
                "other_from_step": report.is_other_from,
                "notes": list(report.notes),
                "broken": list(one.broken),
                "holds": one.holds,
            }
        )
    return {"holds": all(one.holds for one in judged), "steps": len(like.losses), "said": list(said), "runs": rows}


def _table(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _figure(value: float, *, is_mean: bool) -> str:
    if value == 0.0 or math.isnan(value):
        return "0" if value == 0.0 else "not compared"
    return f"{value:.1e}{' (mean)' if is_mean else ''}" if math.isfinite(value) else "steps differ"
