"""Runs planted errors one at a time, judges them as the command does, and makes the table of what was found."""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forked import WorkersFailed, World
from layout_runs import workers_of
from paceline.cli.parity import module_records
from paceline.cli.parity.compare import CaptureReader, compare
from paceline.cli.parity.localize import Departure, locate
from paceline.cli.parity.metrics import reported_metrics
from paceline.cli.parity.report import LOST, ParityVerdict, Tolerance
from paceline.cli.parity.where import MARGINS, ask_for_modules
from paceline.plan import Batch, Plan
from planted import buffers, experts, losses, norms, optimizers, pipeline, random_states, reductions, tensor
from planted.planting import PlantedError, marks_in, wrap

__all__ = ["ERRORS", "FAST", "Outcome", "Trials", "table", "table_by_layout"]

STEPS = 3
LIMIT_S = 900.0  # of a run: a busy machine is no error
ROOMS = (reductions, losses, random_states, buffers, norms, tensor, pipeline, experts, optimizers)
ERRORS: tuple[PlantedError, ...] = tuple(error for room in ROOMS for error in room.ERRORS)
FAST = (
    "a row layer's bias is dropped",
    "a stale gradient of one parameter",
    "norm leaves out split parameters (Megatron-LM #7452)",
)
NO_EFFECT = "this planting took no effect"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What parity said of an error."""

    error: PlantedError
    is_caught: bool
    departure: Departure | None
    kinds: tuple[str, ...] = ()  # of differences over their tolerances
    failure: str = ""

    @property
    def is_placed(self) -> bool:
        named = self.departure.module if self.departure is not None else ""
        return self.is_caught and any(fnmatch.fnmatchcase(named, one) for one in self.error.expected)


class Trials:
    """Runs planted errors; the reference of a program runs once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._references: dict[Any, tuple[Path, Path]] = {}

    def __call__(self, error: PlantedError, **compute: Any) -> Outcome:
        """Run the configuration with the error; `compute`: other arithmetic, of the reference, too."""
        plan = _plan(error.plan, **compute)
        program = error.reference or error.program
        single = dataclasses.replace(_plan("replicas=1", **compute), batch=plan.batch)
        key = program, str(single)
        if key not in self._references:
            name = f"{program.__name__}_{len(self._references)}"
            self._references[key] = (
                self._run(f"{name}_reference", program, 1, single),
                self._run(f"{name}_perturbed", program, 1, single, perturbed=True),
            )
        reference, perturbed = self._references[key]
        marks = marks_in(self._directory / f"marks_{len(list(self._directory.glob('marks_*')))}")

        def planted(worker: Any) -> None:
            def batches(before: Any) -> Any:
                return lambda *args, **kwargs: (error.plant(worker), before(*args, **kwargs))[1]

            if error.is_early:
                error.plant(worker)
            else:
                wrap(type(worker), "batches", batches)
            error.program(worker)

        try:
            captured = self._run("planted", planted, error.workers, plan)
        except WorkersFailed as failure:
            last = str(failure).strip().splitlines()[-1]
            return Outcome(error=error, is_caught=False, departure=None, failure=last)
        if error.expected and not marks():
            return Outcome(error=error, is_caught=False, departure=None, failure=NO_EFFECT)
        verdict = ParityVerdict(
            workers=error.workers,
            plan=plan,
            device="cpu",
            reference_device="cpu",
            tolerance=Tolerance.of(None, precision=plan.compute.precision),
            found=compare(_reader(captured), _reader(reference)),
        )
        kinds = tuple(row[0] for row in verdict.too_large)
        if not plan.wire.exact:  # its gradients differ by right: only what it loses is an error
            kinds = tuple(one for one in kinds if one == LOST)
        departure = None
        if kinds:
            margin = MARGINS[plan.compute.precision]
            departure = locate(captured, reference, perturbed, steps=STEPS, margin=margin, reported=verdict.reported)
        return Outcome(error=error, is_caught=bool(kinds), departure=departure, kinds=kinds)

    def _run(self, name: str, program: Any, workers: int, plan: Plan, *, perturbed: bool = False) -> Path:
        place = self._directory / name
        shutil.rmtree(place, ignore_errors=True)
        captured = place / "captured"
        ask_for_modules(captured, steps=STEPS, perturbed_in=plan.compute.precision if perturbed else None)
        World(place)(program, workers, plan, capture_dir=str(captured), max_steps=STEPS, limit_s=LIMIT_S)
        module_records._file.cache_clear()
        module_records._step.cache_clear()
        return captured


def _reader(captured: Path) -> CaptureReader:
    return CaptureReader(captured, reported_metrics(captured.parent / "run" / "attempt_1"))


def _plan(text: str, **compute: Any) -> Plan:
    """Micro-batches of three samples, the last one of two; of two where there would be too few."""
    plan = Plan.parse(text)
    layout = plan.layout
    num_alone = workers_of(layout) // (layout.tensor * layout.stages * layout.context)
    batch = Batch(size=8, micro=3 if num_alone < 4 else 2)
    return dataclasses.replace(plan, batch=batch, compute=dataclasses.replace(plan.compute, **compute))


def table(outcomes: Sequence[Outcome]) -> str:
    """The table of all errors, as the reference page has it, and how many were caught and placed."""
    rows = ["| error | plan | caught | named | phase |", "|---|---|---|---|---|"]
    for one in outcomes:
        named = one.failure or "nothing" if one.departure is None else f"`{one.departure.module}`"
        right = "" if one.is_placed else f" (expected `{one.error.expected[0]}`)"
        phase = "" if one.departure is None else f"{one.departure.phase}, step {one.departure.step}"
        caught = "yes" if one.is_caught else "no"
        rows.append(f"| {one.error.what} | `{one.error.plan}` | {caught} | {named}{right} | {phase} |")
    num_caught, num_placed = sum(one.is_caught for one in outcomes), sum(one.is_placed for one in outcomes)
    rows.append(f"\n{num_caught} of {len(outcomes)} errors are caught, {num_placed} are placed in the right module.")
    return "\n".join(rows)


def table_by_layout(outcomes: Sequence[Outcome]) -> str:
    """How many errors of each layout are planted, caught and placed."""
    by_plan: dict[str, list[Outcome]] = collections.defaultdict(list)
    for one in outcomes:
        by_plan[one.error.plan].append(one)
    rows = ["| plan | planted | caught | placed |", "|---|---|---|---|"]
    for plan, some in sorted(by_plan.items()):
        counts = len(some), sum(one.is_caught for one in some), sum(one.is_placed for one in some)
        rows.append(f"| `{plan}` | {' | '.join(map(str, counts))} |")
    return "\n".join(rows)
