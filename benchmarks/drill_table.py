"""`paceline drill` on every kind of plan that README and docs name, with one fault of each kind that applies.

    python benchmarks/drill_table.py [--plans "data; tensor"] [--kept runs/drill_table.json] [--write]

The program that is drilled is programs/storm_work.py: a GPT so small that a run takes seconds, or routed experts. Runs
are forks of a process that has already imported torch. Results are kept in a file, so a command that was ended goes on
where it was; remove the file to drill all plans again. `--write` puts the table into docs/reference/drill.md.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import io
import json
import os
import signal
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import torch

from driving.options import options_of
from paceline.cli.drill.request import DrillRequest
from paceline.cli.drill.run import main_drill
from paceline.errors import PlanError, WorkerError
from paceline.plan import Plan
from paceline.testing import KINDS, runs
from paceline.testing.faults import OF_SERVERS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "drill.md"
BEGIN, END = "<!-- the table of benchmarks/drill_table.py -->", "<!-- end of the table -->"
PROGRAM = ROOT / "benchmarks" / "programs" / "storm_work.py"
STEPS = 32
BATCH = "batch(size=24,micro=4)"
FAULTS = (*KINDS, *OF_SERVERS)
QUICK_FAULTS = "kill:worker=1,step=6; full_disk:step=3; nan:worker=1,step=5"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DrilledPlan:
    """A plan as the docs name it, without its batch, and what runs under it."""

    text: str
    workers: int
    model: str = "gpt"
    keeps_number: bool = False  # --keep-plan

    @property
    def plan(self) -> Plan:
        text = f"{self.text}+{BATCH}"
        return Plan.parse(f"{text}+compute(precision=fp64)" if Plan.parse(text).wire.exact else text)


PLANS = {
    "data": DrilledPlan(text="replicas=3", workers=3),
    "data, fixed number": DrilledPlan(text="replicas=3", workers=3, keeps_number=True),
    "fully sharded": DrilledPlan(text="shard=2", workers=2),
    "fully sharded, ZeRO 1": DrilledPlan(text="shard=2+zero=1", workers=2),
    "fully sharded, ZeRO 2": DrilledPlan(text="shard=2+zero=2", workers=2),
    "data x fully sharded": DrilledPlan(text="replicas=2+shard=2", workers=4),
    "tensor": DrilledPlan(text="tensor=2", workers=2),
    "pipeline": DrilledPlan(text="stages=2", workers=2),
    "context": DrilledPlan(text="context=2", workers=2),
    "experts": DrilledPlan(text="experts=2", workers=2, model="moe"),
    "fully sharded x tensor": DrilledPlan(text="shard=2+tensor=2", workers=4),
    "tensor x pipeline": DrilledPlan(text="tensor=2+stages=2", workers=4),
    "local SGD": DrilledPlan(text="replicas=3+localsgd(every=4)", workers=3),
    "local SGD, a round longer than the run": DrilledPlan(
        text="replicas=3+localsgd(every=64,outer=nesterov)", workers=3
    ),
    "local SGD that streams": DrilledPlan(
        text="replicas=3+localsgd(every=4,fragments=2,overlap=1,mixing=0.5)", workers=3
    ),
    "gossip": DrilledPlan(text="replicas=3+gossip(average_every=8)", workers=3),
    "Adasum": DrilledPlan(text="replicas=3+allreduce(op=adasum)", workers=3),
    "servers": DrilledPlan(text="replicas=3+parameterserver(servers=2)", workers=3),
    "servers, mirrored": DrilledPlan(text="replicas=3+parameterserver(servers=2,mirrored=true)", workers=3),
    "servers, bounded staleness": DrilledPlan(text="replicas=3+parameterserver(staleness=3)", workers=3),
    "servers, without waiting": DrilledPlan(text="replicas=3+parameterserver(staleness=none)", workers=3),
    "servers, backup workers": DrilledPlan(text="replicas=3+parameterserver(drop=1)", workers=3),
    "PowerSGD": DrilledPlan(text="replicas=3+powersgd(rank=2)", workers=3),
    "top-k": DrilledPlan(text="replicas=3+topk(ratio=0.05)", workers=3),
    "int8": DrilledPlan(text="replicas=3+int8", workers=3),
}


def drilled(plan: DrilledPlan, *, faults: str, steps: int) -> dict[str, Any]:
    """Drill one plan; returns what the table needs of it."""
    with tempfile.TemporaryDirectory(prefix="paceline-drill-work-") as folder:
        request = DrillRequest(
            script=PROGRAM,
            args=(folder, plan.model, "1000", "0", "0"),
            workers=plan.workers,
            plan=plan.plan,
            overrides=("threads=1",),
            faults=faults,
            steps=steps,
            keep_plan=plan.keeps_number,
            json=True,
        )
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                main_drill(request)
        except (PlanError, WorkerError) as error:
            return {"date": _today(), "said": [], "verdicts": {}, "refused": str(error)}
    facts = json.loads(printed.getvalue())
    verdicts = {
        fault["fault"].partition(":")[0]: [f"`{fault['fault']}`: {text}" for text in row["broken"]]
        for row in facts["runs"]
        for fault in row["faults"]
    }
    return {"date": _today(), "said": facts["said"], "verdicts": verdicts, "refused": ""}


def table(found: dict[str, dict[str, Any]]) -> str:
    """Return plans by faults, and below it each reason once."""
    reasons: list[str] = []
    lines = [f"| plan | | {' | '.join(f'`{name}`' for name in FAULTS)} |", "|---" * (len(FAULTS) + 2) + "|"]
    for name, plan in PLANS.items():
        if name not in found:
            continue
        of_plan = found[name]
        cells = [_cell(of_plan, kind, plan, reasons) for kind in FAULTS]
        kept = " `--keep-plan`" if plan.keeps_number else ""
        lines.append(f"| {name} | `{plan.text}`{kept} | {' | '.join(cells)} |")
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, start=1)]
    return "\n".join([*lines, "", "A number in brackets says why a kind of fault was left out:", "", *notes])


def _cell(found: dict[str, Any], kind: str, plan: DrilledPlan, reasons: list[str]) -> str:
    if found["refused"]:
        return f"DOES NOT HOLD ({_number(reasons, found['refused'])})"
    if kind in found["verdicts"]:
        broken = found["verdicts"][kind]
        return f"**DOES NOT HOLD** ({_number(reasons, ' '.join(broken))})" if broken else "holds"
    why = next((said for said in found["said"] if said.startswith(f"{kind} does not apply: ")), "")
    if not why and kind in OF_SERVERS and "parameterserver" not in plan.text:
        why = f"{kind} does not apply: the plan has no parameter server"
    return f"- ({_number(reasons, why)})" if why else ""


def _number(reasons: list[str], reason: str) -> int:
    reason = reason.rstrip(".") + "."
    if reason not in reasons:
        reasons.append(reason)
    return reasons.index(reason) + 1


def block(found: dict[str, dict[str, Any]]) -> str:
    """Return what stands in the docs: when, where, by which command, and the table."""
    days = sorted({of_plan["date"] for of_plan in found.values()})
    who = "root, so `cut` pulls the cable between two hosts" if os.geteuid() == 0 else "not root: `cut` is imitated"
    head = (
        f"Recorded on {' and '.join(dict.fromkeys((days[0], days[-1])))} on a machine with {os.cpu_count()} cores "
        f"({processor()}), torch {torch.__version__}, {STEPS} steps a run, each once. The user was {who}."
    )
    command = "```\npython benchmarks/drill_table.py --write\n```"
    return f"{textwrap.fill(head, 120)}\n\n{command}\n\n{table(found)}"


def write(page: Path, text: str) -> None:
    """Put `text` between the markers of a page."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page} lacks the lines {BEGIN} and {END}, between which the table goes. Add them.")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def processor() -> str:
    """Return the name of this machine's processor."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _today() -> str:
    today = datetime.date.today()
    return f"{today.day} {today:%B %Y}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", default="", help=f"only these: {'; '.join(PLANS)}")
    parser.add_argument("--faults", default="", help="as of `paceline drill` (default: one of each kind)")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run")
    parser.add_argument("--kept", default="runs/drill_table.json", help="what was found before; empty: nothing is kept")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.relative_to(ROOT)}")
    quick = {"plans": "data", "faults": QUICK_FAULTS, "steps": 8, "kept": ""}
    options = options_of(parser, takes="about 45 minutes", quick=quick)
    names = [name.strip() for name in options.plans.split(";")] if options.plans else list(PLANS)
    if unknown := [name for name in names if name not in PLANS]:
        raise SystemExit(f"--plans names {', '.join(unknown)}; there are: {'; '.join(PLANS)}.")
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    import lasting
    import warm

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs end, and what was mounted goes
    runs.subprocess = warm.Subprocess  # pyright: ignore[reportAttributeAccessIssue]  # torch is imported once
    kept = Path(options.kept) if options.kept else None
    found: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept and kept.exists() else {}
    try:
        for number, name in enumerate(names, start=1):
            if name in found:
                continue
            print(f"{number}/{len(names)}  {name}: {PLANS[name].text}", flush=True)
            found[name] = drilled(PLANS[name], faults=options.faults, steps=options.steps)
            held = [not broken for broken in found[name]["verdicts"].values()]
            print(found[name]["refused"] or f"{sum(held)} of {len(held)} hold", flush=True)
            if kept:
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps(found, indent=2))
    finally:
        warm.close()
        lasting.remove_all()
    print(f"\n{table(found)}")
    if options.write:
        write(PAGE, block(found))
    broken = [name for name, one in found.items() if one["refused"] or any(one["verdicts"].values())]
    if broken:
        raise SystemExit(f"not all promises held under: {', '.join(broken)}")


if __name__ == "__main__":
    main()
