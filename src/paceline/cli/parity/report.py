"""What `paceline parity` says: the tolerances, the table, and a sentence for each configuration that does not hold."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.cli.parity.compare import Difference, Differences
from paceline.cli.parity.localize import Departure
from paceline.errors import PlanError, WorkerError
from paceline.plan import Cast, Plan, Raw

__all__ = [
    "BARE",
    "DEFAULTS",
    "FAILED",
    "LOST",
    "REFUSED",
    "FailedTrial",
    "ParityVerdict",
    "Tolerance",
    "later_parts",
    "parity_text",
    "print_report",
    "with_steady_metrics",
]

# By precision. In 16 bits it is two and a half roundings: each worker rounds its part of a sum.
DEFAULTS = {"fp32": 1e-5, "fp64": 1e-9, "bf16": 2e-2, "fp16": 2.5e-3, "fp8": 2e-2}
FAILED, REFUSED = "FAILED", "REFUSED"  # verdicts on what could not be compared
BARE = "a plain torch loop"
LOST = "what the wire sends and keeps differs from the gradient most in"
WIRE = 1e-2  # what a wire of 16 bits may change
STEP_WORDS = ("steps", "warm", "freq", "start", "every", "interval", "keep", "delay", "period", "after")  # in options
MANY = 10**6  # larger numbers are limits, not steps
NOT_PLAIN = """\
One process trains otherwise under Paceline than in a plain torch loop over the same micro-batches.
Look for code that acts outside of the micro-batch's forward (hooks, writes to parameters), and for buffers: a running
statistic of your own is averaged where prepare(..., buffers={"name": "mean"}) says so.
See docs/reference/parity.md."""
CAUSES = """\
Usual causes: a loss that is scaled by hand, or divides by the whole batch; code that asks worker.rank or
worker.workers; a random generator of the script's own; state that is neither in a parameter nor in a buffer.
See docs/reference/parity.md."""
ROUNDING = (
    "Or it is rounding that the training has amplified: check with --float64, whose rounding is nine digits smaller."
)
NOT_EVEN_ONE = """\
One worker already differs from the reference, which is the same computation: the script does not repeat itself.
Look for a random generator that it seeds from the clock or not at all, and for an order that is left to chance."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """Largest relative differences that pass.

    Loss, and gradients of the first step: the tolerance itself. Weights and all other state: 100 times that, since an
    optimizer of Adam's kind divides small gradients by themselves and so enlarges their rounding; but at most 1 %, or
    the tolerance itself.
    """

    numbers: float
    weights: float

    @classmethod
    def of(cls, given: float | None, *, precision: str) -> Tolerance:
        """The tolerance that was given, or the one of a precision."""
        numbers = DEFAULTS[precision] if given is None else given
        return cls(numbers=numbers, weights=max(numbers, min(100 * numbers, 0.01)))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParityVerdict:
    """One configuration, and what was found."""

    workers: int
    plan: Plan  # resolved
    device: str
    reference_device: str
    tolerance: Tolerance
    found: Differences
    is_bare: bool = False  # one process, against a plain torch loop
    draws_by_unit: bool = False  # against one process whose units draw the random numbers that stages draw
    unsteady: frozenset[str] = frozenset()  # values that the script reports and one worker does not repeat
    later_parts: tuple[str, ...] = ()  # options of optimizers that name a later step than the last one
    departure: Departure | None = None  # where it departs first
    is_located: bool = False  # whether that was looked for

    @property
    def label(self) -> str:
        if self.is_bare:
            return f"1 worker, against {BARE}"
        return f"{self.workers} worker{'s' * (self.workers > 1)}"

    @property
    def too_large(self) -> list[tuple[str, Difference, float]]:
        """What is over its tolerance: in words, by how much, and the tolerance."""
        rows = [
            ("the loss differs", self.found.loss, self.tolerance.numbers),
            ("gradients differ most in", self.found.first_gradients, self.tolerance.numbers),
            ("weights differ most in", self.found.weights, self.tolerance.weights),
            ("buffers differ most in", self.found.buffers, self.tolerance.weights),
            ("the optimizer's state differs most in", self.found.optimizers, self.tolerance.weights),
            ("what the script reports differs most in", self.metrics, self.tolerance.weights),
            (LOST, self.found.wire, self.tolerance.numbers),
        ]
        return [row for row in rows if not row[1].value <= row[2]]

    @property
    def metrics(self) -> Difference:
        """The largest difference of a value that the script reports, and that is judged."""
        steady = (one for one in self.found.metrics if one.where not in self.unsteady)
        return max(steady, key=lambda one: one.value, default=Difference())

    @property
    def reported(self) -> Difference | None:
        """The value that the script reports and that differs most, if it is too much."""
        return None if self.metrics.value <= self.tolerance.weights else self.metrics

    @property
    def is_rounding_of_wire(self) -> bool:
        """Whether the wire's rounding to 16 bits explains it all."""
        return isinstance(self.plan.wire, Cast) and all(found.value <= WIRE for _, found, _ in self.too_large)

    @property
    def holds(self) -> bool:
        return not self.too_large


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FailedTrial:
    """What could not be compared, and why."""

    label: str  # "2 workers", or "all" of a plan's
    plan: Plan | None  # None: the script's own
    error: WorkerError | PlanError

    @property
    def verdict(self) -> str:
        return REFUSED if isinstance(self.error, PlanError) else FAILED


def print_report(judged: Sequence[ParityVerdict], failed: Sequence[FailedTrial] = (), *, as_json: bool) -> None:
    """Print the table and what it means, or all of it as JSON."""
    print(json.dumps(_facts(judged, failed), indent=2) if as_json else parity_text(judged, failed))


def parity_text(judged: Sequence[ParityVerdict], lost: Sequence[FailedTrial] = ()) -> str:
    """Return the table, a sentence per failure, and the verdict."""
    blocks: list[str] = []
    for plan in dict.fromkeys(_without_replicas(row.plan) for row in judged):
        rows = [row for row in judged if _without_replicas(row.plan) == plan]
        blocks.append(_block(plan, rows))
    blocks += [_lost_block(row) for row in lost]
    failed = [row for row in judged if not row.holds]
    for row in failed:
        blocks.append("\n".join([f"{row.label}{_wire(row)}:", *(f"  {line}" for line in _sentences(row))]))
    if any(row.workers == 1 and not row.is_bare for row in failed):
        blocks.append(NOT_EVEN_ONE)
    elif all(row.is_bare for row in failed) and failed:
        blocks.append(NOT_PLAIN)
    elif any(not row.is_rounding_of_wire for row in failed):
        may_be_rounding = all(row.plan.compute.precision != "fp64" for row in failed)
        blocks.append(f"{CAUSES}\n{ROUNDING}" if may_be_rounding else CAUSES)
    blocks.append(_verdict(judged, failed, lost))
    return "\n\n".join(blocks)


def _block(plan: Plan, rows: Sequence[ParityVerdict]) -> str:
    """The table of one plan."""
    found = rows[0].found
    head = f"plan {plan}, {found.num_steps} steps, against one process in {_precision(plan)}"
    columns = (
        *("configuration", "loss", "gradients at step 1", "at all steps", "weights"),
        *("buffers", "optimizer", "reported", "tolerance", "verdict"),
    )
    lines: list[Sequence[str]] = [columns]
    for row in rows:
        lines.append(
            (
                row.label,
                _figure(row.found.loss.value),
                _figure(row.found.first_gradients.value),
                _figure(row.found.gradients.value),
                _figure(row.found.weights.value),
                _figure(row.found.buffers.value),
                _figure(row.found.optimizers.value),
                _figure(row.metrics.value),
                f"{row.tolerance.numbers:.0e} (state {row.tolerance.weights:.0e})",
                "holds" if row.holds else "DIFFERS",
            )
        )
    notes = [note for row in rows for note in _notes(row)]
    return "\n".join([head, "", *_table(lines), *dict.fromkeys(notes)])


def _lost_block(row: FailedTrial) -> str:
    """What could not be compared: a row, and the whole reason below it."""
    plan = "of the script" if row.plan is None else str(row.plan)
    table = _table([("configuration", "verdict"), (row.label, row.verdict)])
    return "\n".join([f"plan {plan}, not compared", "", *table, *(f"  {line}" for line in str(row.error).splitlines())])


def _notes(row: ParityVerdict) -> list[str]:
    found, notes = row.found, list[str]()
    if row.device != row.reference_device:
        notes.append(
            f"note: {row.label} ran on {row.device}, the reference on {row.reference_device}, which rounds otherwise: "
            "compare on one of them with --device"
        )
    if row.draws_by_unit:
        notes.append(
            f"note: {row.label}: under stages each unit draws random numbers of its own (dropout); the reference draws "
            "them, too"
        )
    if found.left_out.value > row.tolerance.weights:
        notes.append(
            f"note: {row.label}: weights with gradients too small to be judged: {found.num_left_out}; "
            f"they differ by up to {_figure(found.left_out.value)} ({found.left_out.where})"
        )
    if row.unsteady:
        notes.append(f"note: reported, but not judged, since one worker does not repeat it: {_names(row.unsteady)}")
    if row.later_parts:
        notes.append(
            f"note: {found.num_steps} steps do not reach {', '.join(row.later_parts)}: what the optimizer does from "
            "there on was not compared. Take more --steps"
        )
    return notes


def with_steady_metrics(rows: Sequence[ParityVerdict]) -> list[ParityVerdict]:
    """Judge no value that one worker does not repeat, such as a speed."""
    unsteady: dict[Plan, frozenset[str]] = {}
    for row in rows:
        if row.workers == 1 and not row.is_bare:
            limit = row.tolerance.weights
            names = frozenset(one.where for one in row.found.metrics if not one.value <= limit)
            unsteady[_without_replicas(row.plan)] = names
    return [dataclasses.replace(row, unsteady=unsteady.get(_without_replicas(row.plan), frozenset())) for row in rows]


def later_parts(optimizers: Sequence[Mapping[str, Any]], *, num_steps: int) -> tuple[str, ...]:
    """Options of optimizers that look like a number of steps, and were not reached: `AdaShift(keep_num=10)`."""
    found = [
        f"{one['class']}({name}={value})"
        for one in optimizers
        for name, value in one["options"].items()
        if num_steps <= value < MANY and any(word in name.lower() for word in STEP_WORDS)
    ]
    return tuple(dict.fromkeys(found))


def _sentences(row: ParityVerdict) -> list[str]:
    lines: list[str] = []
    for what, difference, tolerance in row.too_large:
        where = "" if difference is row.found.loss else f" {difference.where}"
        when = f" at step {difference.step}" if difference.step is not None else " at the end"
        lines.append(f"{what}{where} by {_figure(difference.value)}{when} (tolerance {tolerance:.0e})")
    if row.departure is not None:
        lines.append(str(row.departure))
    elif row.is_located:
        lines.append("module by module nothing departs by more than rounding explains")
    if row.is_rounding_of_wire:
        lines.append(f"{row.plan.wire!r} rounds gradients to 16 bits: allow for it with --tolerance {WIRE:.0e}")
    elif not row.plan.wire.exact and not isinstance(row.plan.wire, Cast):
        lines.append(f"{row.plan.wire!r} sends a part of each gradient: judge it by held-out losses, not by parity")
        if row.found.wire.where and row.found.wire.value <= row.tolerance.numbers:
            rest = _figure(row.found.wire.value)
            lines.append(f"what it sends and keeps adds up to the gradients, to {rest}: nothing is lost")
    return lines


def _verdict(judged: Sequence[ParityVerdict], failed: Sequence[ParityVerdict], lost: Sequence[FailedTrial]) -> str:
    said = f"parity does not hold for {len(failed)} of {len(judged)} configurations" if failed else "parity holds"
    if not lost:
        return said
    here = "" if failed else " for what was compared"
    return f"{said}{here}; {len(lost)} could not be compared"


def _facts(judged: Sequence[ParityVerdict], lost: Sequence[FailedTrial]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for row in judged:
        fields = {field.name: getattr(row.found, field.name) for field in dataclasses.fields(row.found)}
        fields["metrics"] = row.metrics
        found = {
            kind: dataclasses.asdict(value) | {"value": value.value if math.isfinite(value.value) else str(value.value)}
            for kind, value in fields.items()
            if isinstance(value, Difference)
        }
        rows.append(
            {"workers": row.workers, "plan": str(row.plan), "device": row.device, "steps": row.found.num_steps}
            | found
            | {
                "num_left_out": row.found.num_left_out,
                "against": BARE if row.is_bare else "one process",
                "draws_by_unit": row.draws_by_unit,
                "not_repeated": sorted(row.unsteady),
                "later_parts": list(row.later_parts),
                "tolerance": dataclasses.asdict(row.tolerance),
                "holds": row.holds,
                "departs_first": None if row.departure is None else _departure_facts(row.departure),
            }
        )
    not_compared = [
        {
            "configuration": row.label,
            "plan": None if row.plan is None else str(row.plan),
            "verdict": row.verdict,
            "reason": str(row.error),
        }
        for row in lost
    ]
    holds = all(row.holds for row in judged) and not lost
    return {"holds": holds, "configurations": rows, "not_compared": not_compared}


def _departure_facts(departure: Departure) -> dict[str, Any]:
    facts = dataclasses.asdict(departure)
    return {key: str(one) if isinstance(one, float) and not math.isfinite(one) else one for key, one in facts.items()}


def _table(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _without_replicas(plan: Plan) -> Plan:
    return dataclasses.replace(plan, layout=dataclasses.replace(plan.layout, replicas=None))


def _wire(row: ParityVerdict) -> str:
    return "" if isinstance(row.plan.wire, Raw) else f" with {row.plan.wire!r}"


def _precision(plan: Plan) -> str:
    return {"fp32": "float32", "fp64": "float64", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8"}[
        plan.compute.precision
    ]


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _figure(value: float) -> str:
    if value == 0.0:
        return "0"
    return f"{value:.1e}" if math.isfinite(value) else "not finite"
