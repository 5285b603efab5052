"""Programs as users write them, under every kind of plan: each is as in one process, or refused by name.

    python benchmarks/program_matrix.py [--programs mlp,gpt2,...] [--plans "shard=2 tensor=2"]

Each program (benchmarks/trials) runs in plain torch, in one process, without any code of Paceline's steps; then under
Paceline with one worker, and under each plan. A cell says: "same", the largest relative difference of any loss to plain
torch's (and of what was measured in the end to one worker's); or the number of the refusal, whose words are told below;
or WRONG, CRASH or HANG. Models of timm, diffusers, torch_geometric and peft need the extra `long`.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib
import importlib.util
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from driving.options import options_of
from paceline.plan import Batch, Plan
from trials.plain_worker import PlainWorker
from trials.registry import PROGRAMS, Outcome, Program

ROOT = Path(__file__).resolve().parents[1]
BATCH = Batch(size=16, micro=4)  # of 20 samples: every second step has one micro-batch
LIMIT_S = 60.0
PLANS = {
    "replicas=2": 2,
    "shard=2": 2,
    "tensor=2": 2,
    "stages=2": 2,
    "context=2": 2,
    "experts=2": 2,
    "replicas=2+shard=2": 4,
    "tensor=2+stages=2": 4,
}
KINDS = ("models", "loops", "optimizers")
OWN = re.compile(r"^(?:paceline\.errors\.\w+|ValueError|TypeError|RuntimeError): (?P<text>.+)", re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """What became of a program under a plan."""

    state: str  # same | refused | WRONG | CRASH | HANG
    difference: float = 0.0
    text: str = ""


class Matrix:
    """Runs programs; `folder` is for what the runs leave."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        self._plain: dict[str, Outcome] = {}
        self._alone: dict[str, Outcome] = {}

    def cell(self, program: Program, plan_text: str, workers: int) -> Cell:
        """Run a program under a plan, and compare it with plain torch and with one worker."""
        try:
            if program.name not in self._plain:
                self._plain[program.name] = program.train(PlainWorker(BATCH))
        except Exception as error:  # a program that does not run in plain torch is a mistake of this list
            raise SystemExit(f"{program.name} fails in plain torch: {error!r}") from error
        plan = dataclasses.replace(Plan.parse(plan_text) if plan_text else Plan(), batch=BATCH)
        found = self._run(program, plan, workers)
        if isinstance(found, Cell):
            return found
        if not plan_text:
            self._alone[program.name] = found
        references = [self._plain[program.name], *filter(None, [self._alone.get(program.name)])]
        difference = max(_difference(found, one) for one in references)
        return Cell(state="same" if difference <= program.limit else "WRONG", difference=difference)

    def _run(self, program: Program, plan: Plan, workers: int) -> Outcome | Cell:
        from forked import WorkersFailed, World
        from paceline.errors import PlanError

        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        try:
            plan = plan.resolve(workers)
            plan.require(workers=workers)
            job: dict[str, Any] = {"threads": 1, "save_at_end": False, "save_every": None, "timeout_s": LIMIT_S / 2}
            results = World(folder)(program.train, workers, plan, limit_s=LIMIT_S, **job)
        except PlanError as error:
            return Cell(state="refused", text=str(error))
        except WorkersFailed as failed:
            return judged(list(failed.errors.values()))
        if any(_difference(one, results[0]) > 0 for one in results):
            return Cell(state="WRONG", difference=max(_difference(one, results[0]) for one in results))
        return results[0]


def judged(errors: list[str]) -> Cell:
    """Whether workers failed with a sentence of ours, which is a refusal, or in torch's or Python's words."""
    if any("stood still" in text or "limit_s" in text for text in errors):
        return Cell(state="HANG", text=errors[0].strip().splitlines()[-1])
    for text in errors:
        last = [line for line in text.strip().splitlines() if re.match(r"\S*(Error|Exception)\b.*: ", line)]
        raised = re.findall(r'File "([^"]+)", line \d+', text)
        is_ours = bool(raised) and "/paceline/" in raised[-1]
        if last and is_ours and not last[-1].startswith("paceline.errors.SyncError"):
            return Cell(state="refused", text=last[-1].partition(": ")[2])
    last = [line for line in errors[0].strip().splitlines() if line.strip()]
    return Cell(state="CRASH", text=last[-1] if last else "")


def _difference(found: Outcome, reference: Outcome) -> float:
    """The largest relative difference of what both have seen; infinite where one has seen less, or no number."""
    if len(found.losses) != len(reference.losses):
        return float("inf")
    pairs = list(zip(found.losses, reference.losses, strict=True))
    pairs += [(value, reference.others[name]) for name, value in found.others.items() if name in reference.others]
    worst = 0.0
    for value, expected in pairs:
        difference = abs(value - expected) / max(abs(expected), 1e-6)
        worst = max(worst, difference if difference == difference else float("inf"))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", default="", help="only these, with commas between them")
    parser.add_argument("--plans", default="", help="only these, with blanks between them")
    options = options_of(
        parser, takes="about 20 minutes", quick={"programs": "mlp,moco", "plans": "replicas=2 shard=2"}
    )
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.path[:0] = [str(ROOT / "tests" / "support")]
    import cpu_torchvision  # noqa: F401  # before transformers and timm

    for kind in KINDS:
        importlib.import_module(f"trials.{kind}")
    import imported

    imported.import_all()
    only = options.programs.split(",") if options.programs else list(PROGRAMS)
    absent = {name: needs for name in only if (needs := PROGRAMS[name].needs) and not importlib.util.find_spec(needs)}
    plans = [one for one in PLANS if not options.plans or one in options.plans.split()]
    refusals: list[str] = []
    faults: list[str] = []
    counts: collections.Counter[str] = collections.Counter()
    print(f"| program | plain torch | {' | '.join(f'`{one}`' for one in plans)} |\n|---|---|{'---|' * len(plans)}")
    with tempfile.TemporaryDirectory() as folder:
        matrix = Matrix(Path(folder))
        for name in only:
            if name in absent:
                continue
            program = PROGRAMS[name]
            texts: list[str] = []
            for plan, workers in [("", 1), *((one, PLANS[one]) for one in plans)]:
                cell = matrix.cell(program, plan, workers)
                counts[cell.state] += 1
                if cell.state == "refused":
                    if cell.text not in refusals:
                        refusals.append(cell.text)
                    texts.append(f"[{refusals.index(cell.text) + 1}]")
                elif cell.state == "same":
                    texts.append(f"{cell.difference:.0e}" if cell.difference else "0")
                else:
                    texts.append(f"**{cell.state}**" + (f" {cell.difference:.0e}" if cell.difference else ""))
                    faults.append(
                        f"{name} under {plan or 'one worker'}: {cell.state} {cell.difference:.1e} {cell.text}"
                    )
            print(f"| {name}: {program.about} | {' | '.join(texts)} |", flush=True)
    print("\n" + ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) + "\n")
    for number, reason in enumerate(refusals, start=1):
        print(f"[{number}] {reason}")
    for fault in faults:
        print(f"- {fault}")
    for name, needs in absent.items():
        print(f"- {name} was left out: it needs {needs} (pip install paceline[long])")


if __name__ == "__main__":
    main()
