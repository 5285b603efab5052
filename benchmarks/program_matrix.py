"""Programs as users write them, under every kind of plan: each is as in one process, or refused by name.

    python benchmarks/program_matrix.py [--programs mlp,gpt2,...] [--plans "shard=2 tensor=2"]
    python benchmarks/program_matrix.py --write docs/reference/programs-and-plans.md

Each program (benchmarks/trials) runs in plain torch, in one process, without any code of Paceline's steps; then under
Paceline with one worker, and under each plan. A cell says the largest relative difference of any loss to plain torch's
(and of what was measured in the end to one worker's); or, in brackets, the number of the refusal, whose words are told
below; or WRONG, CRASH or HANG. A program whose losses would be much the same without its optimizers' steps shows
nothing, and ends the command. Models of timm, diffusers, torch_geometric and peft need the extra `long`.

With `--results` each program's row is added to a file, and programs that are in it are not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import importlib.util
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from driving.options import options_of
from paceline.plan import Batch, Plan
from trials.page import FAULTS, Row, kept_rows, summary, table, written
from trials.plain_worker import PlainWorker
from trials.registry import PROGRAMS, Outcome, Program
from trials.verdicts import Cell, difference, judged

ROOT = Path(__file__).resolve().parents[1]
BATCH = Batch(size=16, micro=4)  # of 20 samples: every second step has one micro-batch
WAIT_S, LIMIT_S = 60.0, 180.0  # of an operation of all workers; of a whole program
LEAST_EFFECT = 20.0  # how many times the limit of a program its optimizers' steps change what it sees
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
KINDS = ("models", "loops", "optimizers", "tokens")


class ShowsNothing(Exception):
    """A program that is no trial: it fails in plain torch, or does not train there."""


class Matrix:
    """Runs programs; `folder` is for what the runs leave."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0

    def row(self, program: Program, plans: list[str]) -> Row:
        """Run a program under one worker and under each plan, and compare it with plain torch and with one worker."""
        plain = self._plain(program)
        alone = self._run(program, dataclasses.replace(Plan(), batch=BATCH), 1)
        references = [plain] if isinstance(alone, Cell) else [plain, alone]
        cells = {"": self._cell(program, alone, references)}
        for text in plans:
            plan = dataclasses.replace(Plan.parse(text), batch=BATCH)
            cells[text] = self._cell(program, self._run(program, plan, PLANS[text]), references)
        return Row(program=program.name, cells=cells)

    def _plain(self, program: Program) -> Outcome:
        try:
            sizes = dataclasses.replace(BATCH, micro=BATCH.size) if program.sees_whole_batches else BATCH
            plain, still = (program.train(PlainWorker(sizes, is_still=one)) for one in (False, True))
        except Exception as error:  # a program that does not run in plain torch is a mistake of this list
            raise ShowsNothing(f"{program.name} fails in plain torch: {error!r}") from error
        if not difference(still, plain) > LEAST_EFFECT * program.limit:
            raise ShowsNothing(f"{program.name} hardly trains: without steps it differs by {difference(still, plain)}")
        return plain

    def _cell(self, program: Program, found: Outcome | Cell, references: list[Outcome]) -> Cell:
        if isinstance(found, Cell):
            return found
        worst = max(difference(found, one) for one in references)
        return Cell(state="same" if worst <= program.limit else "WRONG", difference=worst)

    def _run(self, program: Program, plan: Plan, workers: int) -> Outcome | Cell:
        from forked import WorkersFailed, World
        from paceline.errors import PlanError

        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        try:
            plan = plan.resolve(workers)
            plan.require(workers=workers)
            job: dict[str, Any] = {"threads": 1, "save_at_end": False, "save_every": None, "timeout_s": WAIT_S}
            results = World(folder)(program.train, workers, plan, limit_s=LIMIT_S, **job)
        except PlanError as error:
            return Cell(state="refused", text=str(error))
        except WorkersFailed as failed:
            return judged(failed.errors)
        apart = max(difference(one, results[0]) for one in results)
        return Cell(state="WRONG", difference=apart, text="workers differ") if apart > 0 else results[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", default="", help="only these, with commas between them")
    parser.add_argument("--plans", default="", help="only these, with blanks between them")
    parser.add_argument("--results", type=Path, help="a file of rows: add to it, and leave out what it has")
    parser.add_argument("--write", type=Path, help="a page, whose table is made anew")
    options = options_of(
        parser, takes="about 20 minutes", quick={"programs": "mlp,moco", "plans": "replicas=2 shard=2"}
    )
    _prepare()
    only = options.programs.split(",") if options.programs else list(PROGRAMS)
    absent = {name: needs for name in only if (needs := PROGRAMS[name].needs) and not importlib.util.find_spec(needs)}
    plans = [one for one in PLANS if not options.plans or one in options.plans.split()]
    rows = {name: row for name, row in kept_rows(options.results).items() if name in only}
    mistakes: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        matrix = Matrix(Path(folder))
        for name in only:
            if name in absent or name in rows:
                continue
            try:
                rows[name] = row = matrix.row(PROGRAMS[name], plans)
            except ShowsNothing as error:
                mistakes.append(str(error))
                print(error, flush=True)
                continue
            print(f"{name}: {summary([row])}", flush=True)
            for plan, cell in row.cells.items():
                if cell.state in FAULTS:
                    print(f"  {plan or 'one worker'}: {cell.state} {cell.difference:.1e} {cell.text}", flush=True)
            if options.results:
                with options.results.open("a", encoding="utf-8") as file:
                    file.write(row.line())
    ordered = [rows[name] for name in only if name in rows]
    print("\n".join(table(ordered, plans)))
    for name, needs in absent.items():
        print(f"- {name} was left out: it needs {needs} (pip install paceline[long])")
    if mistakes:
        raise SystemExit("\n".join(mistakes))
    if options.write:
        page = options.write.read_text(encoding="utf-8")
        today = datetime.date.today()
        options.write.write_text(written(page, ordered, plans, f"{today.day} {today:%B %Y}"), encoding="utf-8")


def _prepare() -> None:
    """Import what the programs need, once, before workers are forked."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.path[:0] = [str(ROOT / "tests" / "support")]
    import cpu_torchvision  # noqa: F401  # before transformers and timm

    for kind in KINDS:
        importlib.import_module(f"trials.{kind}")
    import imported

    imported.import_all()


if __name__ == "__main__":
    main()
