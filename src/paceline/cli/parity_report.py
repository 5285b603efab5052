"""What `paceline parity` says: the tolerances, the table, and a sentence for each configuration that does not hold."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

from paceline.cli.parity_compare import Difference, Differences
from paceline.plan import Plan, Raw

__all__ = ["DEFAULTS", "Judged", "Tolerance", "print_report", "report"]

DEFAULTS = {"fp32": 1e-5, "fp64": 1e-9, "bf16": 1e-2}  # by precision
WIRE = 1e-2  # what a wire of 16 bits may change
CAUSES = """\
Usual causes: a loss that is scaled by hand, or divides by the whole batch; code that asks worker.rank or
worker.workers; a random generator of the script's own; state that is neither in a parameter nor in a buffer.
See docs/parity.md."""
NOT_EVEN_ONE = """\
One worker already differs from the reference, which is the same computation: the script does not repeat itself.
Look for a random generator that it seeds from the clock or not at all, and for an order that is left to chance."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """Largest relative differences that pass.

    Loss, and gradients of the first step: the tolerance itself. Weights: 100 times that, since an optimizer of Adam's
    kind divides small gradients by themselves and so enlarges their rounding; but at most 1 %, or the tolerance itself.
    """

    numbers: float
    weights: float

    @classmethod
    def of(cls, given: float | None, *, precision: str) -> Tolerance:
        """The tolerance that was given, or the one of a precision."""
        numbers = DEFAULTS[precision] if given is None else given
        return cls(numbers=numbers, weights=max(numbers, min(100 * numbers, 0.01)))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """One configuration, and what was found."""

    workers: int
    plan: Plan  # resolved
    device: str
    reference_device: str
    tolerance: Tolerance
    found: Differences

    @property
    def label(self) -> str:
        return f"{self.workers} worker{'s' * (self.workers > 1)}"

    @property
    def too_large(self) -> list[tuple[str, Difference, float]]:
        """What is over its tolerance: in words, by how much, and the tolerance."""
        rows = [
            ("the loss differs", self.found.loss, self.tolerance.numbers),
            ("gradients differ most in", self.found.first_gradients, self.tolerance.numbers),
            ("weights differ most in", self.found.weights, self.tolerance.weights),
        ]
        return [row for row in rows if not row[1].value <= row[2]]

    @property
    def is_rounding_of_wire(self) -> bool:
        """Whether the wire's rounding to 16 bits explains it all."""
        return not isinstance(self.plan.wire, Raw) and all(found.value <= WIRE for _, found, _ in self.too_large)

    @property
    def holds(self) -> bool:
        return not self.too_large


def print_report(judged: Sequence[Judged], *, as_json: bool) -> None:
    """Print the table and what it means, or all of it as JSON."""
    print(json.dumps(_facts(judged), indent=2) if as_json else report(judged))


def report(judged: Sequence[Judged]) -> str:
    """Return the table, a sentence per failure, and the verdict."""
    blocks: list[str] = []
    for plan in dict.fromkeys(_without_replicas(row.plan) for row in judged):
        rows = [row for row in judged if _without_replicas(row.plan) == plan]
        blocks.append(_block(plan, rows))
    failed = [row for row in judged if not row.holds]
    for row in failed:
        blocks.append("\n".join([f"{row.label}{_wire(row)}:", *(f"  {line}" for line in _sentences(row))]))
    if any(row.workers == 1 for row in failed):
        blocks.append(NOT_EVEN_ONE)
    elif any(not row.is_rounding_of_wire for row in failed):
        blocks.append(CAUSES)
    blocks.append(_verdict(judged, failed))
    return "\n\n".join(blocks)


def _block(plan: Plan, rows: Sequence[Judged]) -> str:
    """The table of one plan."""
    found = rows[0].found
    head = f"plan {plan}, {found.num_steps} steps, against one process in {_precision(plan)}"
    columns = ("configuration", "loss", "gradients at step 1", "at all steps", "weights", "tolerance", "verdict")
    lines: list[Sequence[str]] = [columns]
    for row in rows:
        lines.append(
            (
                row.label,
                _figure(row.found.loss.value),
                _figure(row.found.first_gradients.value),
                _figure(row.found.gradients.value),
                _figure(row.found.weights.value),
                f"{row.tolerance.numbers:.0e} (weights {row.tolerance.weights:.0e})",
                "holds" if row.holds else "DIFFERS",
            )
        )
    notes = [note for row in rows for note in _notes(row)]
    return "\n".join([head, "", *_table(lines), *dict.fromkeys(notes)])


def _notes(row: Judged) -> list[str]:
    found, notes = row.found, list[str]()
    if row.device != row.reference_device:
        notes.append(
            f"note: {row.label} ran on {row.device}, the reference on {row.reference_device}, which rounds otherwise: "
            "compare on one of them with --device"
        )
    if found.left_out.value > row.tolerance.weights:
        notes.append(
            f"note: {row.label}: weights with gradients too small to be judged: {found.num_left_out}; "
            f"they differ by up to {_figure(found.left_out.value)} ({found.left_out.where})"
        )
    return notes


def _sentences(row: Judged) -> list[str]:
    lines: list[str] = []
    for what, difference, tolerance in row.too_large:
        where = "" if difference.where == "loss" else f" {difference.where}"
        when = f" at step {difference.step}" if difference.step is not None else " at the end"
        lines.append(f"{what}{where} by {_figure(difference.value)}{when} (tolerance {tolerance:.0e})")
    if row.is_rounding_of_wire:
        lines.append(f"{row.plan.wire!r} rounds gradients to 16 bits: allow for it with --tolerance {WIRE:.0e}")
    return lines


def _verdict(judged: Sequence[Judged], failed: Sequence[Judged]) -> str:
    if not failed:
        return "parity holds"
    return f"parity does not hold for {len(failed)} of {len(judged)} configurations"


def _facts(judged: Sequence[Judged]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for row in judged:
        found = {
            kind: dataclasses.asdict(value) | {"value": value.value if math.isfinite(value.value) else str(value.value)}
            for kind, value in ((field.name, getattr(row.found, field.name)) for field in dataclasses.fields(row.found))
            if isinstance(value, Difference)
        }
        rows.append(
            {"workers": row.workers, "plan": str(row.plan), "device": row.device, "steps": row.found.num_steps}
            | found
            | {
                "num_left_out": row.found.num_left_out,
                "tolerance": dataclasses.asdict(row.tolerance),
                "holds": row.holds,
            }
        )
    return {"holds": all(row.holds for row in judged), "configurations": rows}


def _table(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _without_replicas(plan: Plan) -> Plan:
    return dataclasses.replace(plan, layout=dataclasses.replace(plan.layout, replicas=None))


def _wire(row: Judged) -> str:
    return "" if isinstance(row.plan.wire, Raw) else f" with {row.plan.wire!r}"


def _precision(plan: Plan) -> str:
    return {"fp32": "float32", "fp64": "float64", "bf16": "bfloat16"}[plan.compute.precision]


def _figure(value: float) -> str:
    if value == 0.0:
        return "0"
    return f"{value:.1e}" if math.isfinite(value) else "not finite"
