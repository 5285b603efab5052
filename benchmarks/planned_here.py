"""How well step times and memory of this machine are predicted, and how good the chosen plan is.

    python benchmarks/planned_here.py [--models mlp,gpt] [--workers 1,2,4]

For each model and number of workers the machine is measured (`paceline doctor`), the script's plan is run in several
sizes of micro-batches, and the best plan of every layout is predicted from these. Then each of them is run, too. Errors
are of predictions that were made before. "Chosen" is the best of the first `--verify` plans by prediction, as
`paceline plan --verify` chooses.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from driving.options import options_of
from paceline.cli.plan_costs.here import this_machine
from paceline.cli.plan_costs.subject import Subject
from paceline.cli.plan_costs.verify import Verified, verified, verified_plans
from paceline.plan import CommandPlan
from paceline.planner.named_cluster import NamedCluster
from paceline.planner.search import PricedPlan
from paceline.units import duration_text
from paceline.worker.script_inspection import inspect_script

PROGRAM = Path(__file__).parent / "programs" / "six_models.py"
MODELS = "mlp,blocks,convolutions,encoder,gpt,recurrent"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--workers", default="1,2,4")
    parser.add_argument("--verify", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each case's best plan, for the spread")
    parser.add_argument("--out", type=Path, help="write what was predicted and measured of each plan, as JSON lines")
    options = options_of(parser, takes="15 minutes", quick={"models": "mlp", "workers": "2"})
    times: list[float] = []
    memories: list[float] = []
    regrets: list[float] = []
    spreads: list[float] = []
    print(
        "| model | workers | plans | error of step time, median | of memory, median | chosen over best | "
        "spread of runs | best plan |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for model in options.models.split(","):
        for workers in map(int, options.workers.split(",")):
            subject, where = asked(model, workers)
            found = verified_plans(subject, where, 100, script=PROGRAM, args=("--model", model))
            own, others = found[0], found[1:]
            if options.out is not None:
                write(options.out, model, workers, found)
            error = [abs(one.priced.step.step_s / one.receipt.measured_s - 1) for one in others if one.receipt]
            space = [
                abs(one.priced.memory.peak / one.receipt.measured_bytes - 1)
                for one in others
                if one.receipt and one.receipt.measured_bytes
            ]
            measured = {str(one.priced.plan): one.receipt.measured_s for one in found if one.receipt}
            chosen = min(measured.get(str(one.priced.plan), float("inf")) for one in (own, *others[: options.verify]))
            best = min(measured, key=lambda plan: measured[plan])
            times, memories = times + error, memories + space
            regrets.append(chosen / measured[best] - 1)
            plan = next(one.priced for one in found if str(one.priced.plan) == best)
            runs = [measured[best], *repeated(subject, plan, model, options.repeats - 1)]
            spreads.append(statistics.pstdev(runs) / statistics.median(runs))
            print(
                f"| {model} | {workers} | {len(measured)} | {percent(error)} | {percent(space)} | "
                f"{regrets[-1] * 100:.0f} % | {spreads[-1] * 100:.1f} % | `{best}` {duration_text(measured[best])} |",
                flush=True,
            )
    print(f"\nstep time: median error {percent(times)} of {len(times)}; memory: {percent(memories)} of {len(memories)}")
    print(f"chosen over best: median {percent(regrets)}, worst {max(regrets) * 100:.0f} %")
    print(f"standard deviation of {options.repeats} runs of a plan over their median: {percent(spreads)} in the median")


def asked(model: str, workers: int) -> tuple[Subject, NamedCluster]:
    found = inspect_script(PROGRAM, args=("--model", model), plan=CommandPlan(), workers=workers)
    return Subject.of(found), this_machine(workers)


def repeated(subject: Subject, plan: PricedPlan, model: str, count: int) -> list[float]:
    """Seconds of a step, in further runs of the same plan."""
    runs = (verified(subject, PROGRAM, ("--model", model), plan) for _ in range(count))
    return [one.receipt.measured_s for one in runs if one.receipt is not None]


def write(path: Path, model: str, workers: int, found: Sequence[Verified]) -> None:
    with path.open("a") as file:
        for number, one in enumerate(found):
            row = {
                "model": model,
                "workers": workers,
                "number": number,
                "plan": str(one.priced.plan),
                "predicted_s": one.priced.step.step_s,
                "predicted_parts": dict(one.priced.step.parts),
                "predicted_bytes": one.priced.memory.peak,
                "receipt": None if one.receipt is None else dataclasses.asdict(one.receipt),
                "problem": one.problem,
            }
            file.write(json.dumps(row) + "\n")


def percent(errors: list[float]) -> str:
    return f"{statistics.median(errors) * 100:.1f} %" if errors else "-"


if __name__ == "__main__":
    main()
