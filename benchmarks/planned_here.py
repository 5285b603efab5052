"""How well step times and memory of this machine are predicted, and how good the chosen plan is.

    python benchmarks/planned_here.py [--models mlp,gpt] [--workers 1,2,4]

For each model and number of workers the machine is measured (`paceline doctor`), the script's plan is run, and the best
plan of every layout is predicted from these two. Then each of them is run, too. Errors are of predictions that were
made before. "Chosen" is the best of the first `--verify` plans by prediction, as `paceline plan --verify` chooses.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from driving.options import options_of
from paceline.cli.plan_costs.here import this_machine
from paceline.cli.plan_costs.subject import Subject
from paceline.cli.plan_costs.verify import Verified, verified_plans
from paceline.plan import CommandPlan
from paceline.units import duration_text
from paceline.worker.script_inspection import inspect_script

PROGRAM = Path(__file__).parent / "programs" / "six_models.py"
MODELS = "mlp,blocks,convolutions,encoder,gpt,recurrent"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--workers", default="1,2,4")
    parser.add_argument("--verify", type=int, default=3)
    options = options_of(parser, takes="15 minutes", quick={"models": "mlp", "workers": "2"})
    times: list[float] = []
    memories: list[float] = []
    regrets: list[float] = []
    print("| model | workers | plans | error of step time, median | of memory, median | chosen over best | best plan |")
    print("|---|---|---|---|---|---|---|")
    for model in options.models.split(","):
        for workers in map(int, options.workers.split(",")):
            found = tried(model, workers)
            own, others = found[0], found[1:]
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
            print(
                f"| {model} | {workers} | {len(measured)} | {percent(error)} | {percent(space)} | "
                f"{regrets[-1] * 100:.0f} % | `{best}` {duration_text(measured[best])} |",
                flush=True,
            )
    print(f"\nstep time: median error {percent(times)} of {len(times)}; memory: {percent(memories)} of {len(memories)}")
    print(f"chosen over best: median {percent(regrets)}, worst {max(regrets) * 100:.0f} %")


def tried(model: str, workers: int) -> list[Verified]:
    args = ("--model", model)
    found = inspect_script(PROGRAM, args=args, plan=CommandPlan(), workers=workers)
    subject = Subject.of(found)
    return verified_plans(subject, this_machine(workers), 100, script=PROGRAM, args=args)


def percent(errors: list[float]) -> str:
    return f"{statistics.median(errors) * 100:.1f} %" if errors else "-"


if __name__ == "__main__":
    main()
