"""Every layout against one process, for ordinary models: the largest relative differences, as by `paceline parity`.

    python benchmarks/parity_matrix.py [--models gpt2,llama,...] [--workers 1,2,4] [--layouts "shard=2 tensor=2"]

The models are those of examples/models.py. torch and transformers are imported once, and all workers are forked from
this process, so a cell costs what its steps cost. Each cell says by how much the loss of any step and the gradients of
the first one differ from one process's, and is bold where either is more than 1e-5. What is refused is told below.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from driving.options import options_of
from paceline.cli.parity.compare import CaptureReader, compare
from paceline.errors import PlanError
from paceline.plan import Plan

ROOT = Path(__file__).resolve().parents[1]
MODELS = "gpt2,llama,bert,t5,vit,mixtral,resnet,transformer,mlp"
BATCH = "batch(size=16,micro=4)"
LIMIT = 1e-5
LIMIT_S = 300.0  # for a run
LAYOUTS = {  # by number of workers
    1: ["replicas=1"],
    2: [
        "replicas=2",
        "shard=2+zero=1",
        "shard=2+zero=2",
        "shard=2",
        "tensor=2",
        "tensor=2+sequence=true",
        "stages=2",
        "stages=2+schedule=zero-bubble",
        "context=2",
        "experts=2",
    ],
    4: [
        "replicas=4",
        "shard=4",
        "replicas=2+shard=2",
        "tensor=4",
        "replicas=2+tensor=2",
        "shard=2+tensor=2",
        "stages=4",
        "replicas=2+stages=2",
        "stages=2+schedule=interleaved+stages_per_worker=2+replicas=2",
        "shard=2+stages=2",
        "shard=2+stages=2+schedule=zero-bubble",
        "tensor=2+stages=2",
        "context=4",
        "replicas=2+context=2",
        "shard=2+context=2",
        "tensor=2+context=2",
        "stages=2+context=2",
        "experts=4",
        "replicas=2+experts=2",
        "shard=2+experts=2",
        "shard=2+zero=1+experts=2",
        "stages=2+experts=2",
        "tensor=2+experts=2",
        "context=2+experts=2",
    ],
}


class Matrix:
    """Runs one model after the other under every layout; `folder` is for what the runs leave."""

    def __init__(self, folder: Path, models: ModuleType, *, steps: int) -> None:
        self._folder, self._models, self._steps = folder, models, steps
        self._references: dict[str, CaptureReader] = {}  # by model
        self._count = 0
        self.refusals: list[str] = []  # each once

    def cell(self, model: str, layout: str, workers: int) -> str:
        """The two figures, or the number of the reason why there are none."""
        try:
            plan = Plan.parse(f"{layout}+{BATCH}").resolve(workers)
            plan.require(workers=workers)
            if model not in self._references:
                self._references[model] = self._run(model, Plan.parse(f"replicas=1+{BATCH}"), 1)
            found = compare(self._run(model, plan, workers), self._references[model])
        except PlanError as error:
            return f"[{self._number(str(error))}]"
        figures = found.loss.value, found.first_gradients.value
        text = ", ".join(f"{value:.0e}" if value else "0" for value in figures)
        return text if max(figures) <= LIMIT else f"**{text}**"

    def _run(self, model: str, plan: Plan, workers: int) -> CaptureReader:
        from forked import WorkersFailed, World

        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        self._models.NAME = model  # pyright: ignore[reportAttributeAccessIssue]  # what the script reads from its arguments
        job: dict[str, Any] = {"max_steps": self._steps, "threads": 1, "save_at_end": False}
        job["capture_dir"] = str(folder / "captured")
        try:
            World(folder)(self._models.train, workers, plan, limit_s=LIMIT_S, **job)
        except WorkersFailed as failed:
            last = [text.strip().splitlines() for text in failed.errors.values()]
            said = [line for lines in last for line in lines if line.startswith("paceline.errors.PlanError: ")]
            if said:
                raise PlanError(said[0].removeprefix("paceline.errors.PlanError: ")) from None
            raise SystemExit(f"{model} under {plan}:\n{failed}") from None
        return CaptureReader(folder / "captured")

    def _number(self, reason: str) -> int:
        if reason not in self.refusals:
            self.refusals.append(reason)
        return self.refusals.index(reason) + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--workers", default="1,2,4")
    parser.add_argument("--layouts", default="", help="only these, with blanks between them")
    parser.add_argument("--steps", type=int, default=20)
    options = options_of(
        parser, takes="about 40 minutes", quick={"workers": "1,2", "layouts": "replicas=2", "steps": 3}
    )
    names, only = options.models.split(","), options.layouts.split()
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # what it imports, it imports once
    sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "examples")]
    import models

    if any(name in models.LANGUAGE or name == "vit" for name in names):
        for name in names:
            if name not in models.OWN:
                models.of_transformers(name)  # imports its module, once for all workers
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        matrix = Matrix(Path(folder), models, steps=options.steps)
        print(f"| workers | layout | {' | '.join(names)} |")
        print(f"|---|---|{'---|' * len(names)}", flush=True)
        for workers in map(int, options.workers.split(",")):
            for layout in LAYOUTS[workers]:
                if not only or layout in only:
                    cells = [matrix.cell(name, layout, workers) for name in names]
                    print(f"| {workers} | `{layout}` | {' | '.join(cells)} |", flush=True)
        print("")
        for number, reason in enumerate(matrix.refusals, start=1):
            print(f"[{number}] {reason}")


if __name__ == "__main__":
    main()
