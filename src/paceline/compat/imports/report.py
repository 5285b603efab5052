"""The table of `paceline import`: what is taken, and what stands against it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from paceline.compat.imports.fit import Fit, OptimizerFit
from paceline.compat.imports.foreign import ForeignCheckpoint
from paceline.units import bytes_text, printable

__all__ = ["fit_table", "source_line"]

T = TypeVar("T")

SHOWN = 12  # names of one kind


def source_line(found: ForeignCheckpoint, step: int) -> str:
    """Return "x.ckpt: Lightning checkpoint, epoch 3, step 1200"."""
    epoch = "" if found.epoch is None else f", epoch {found.epoch}"
    return f"{found.source}: {found.kind}{epoch}, step {step}"


def fit_table(
    fit: Fit, optimizers: Mapping[str, OptimizerFit], schedulers: Iterable[str], anew: Iterable[str]
) -> list[str]:
    """Return the lines. `anew`: what the script prepares and the checkpoint lacks."""
    size = sum(one.num_bytes for one in fit.taken.values())
    tied = f", {len(fit.ties)} more names are tied to them" if fit.ties else ""
    rows = [("taken", f"{_count(len(fit.taken), 'tensor')} of the model, {bytes_text(size)}{tied}")]
    for kind, names in _conversions(fit).items():
        rows.append(("converted", f"{_count(len(names), 'tensor')} {kind}"))
    rows += [("missing", f"{name} {list(shape)}") for name, shape in _some(fit.missing)]
    rows += [("unexpected", f"{name} {list(shape)}") for name, shape in _some(fit.unexpected)]
    rows += [
        ("other shape", f"{name}: {list(there)} in the file, {list(own)} in the model")
        for name, (there, own) in _some(fit.shapes)
    ]
    for kind, names in (("missing", fit.missing), ("unexpected", fit.unexpected), ("other shape", fit.shapes)):
        if len(names) > SHOWN:
            rows.append((kind, f"... {len(names)} in all"))
    for name, one in optimizers.items():
        entries = sorted({entry for values in (*one.tensors.values(), *one.values.values()) for entry in values})
        without = f"; {len(one.without)} have none" if one.without else ""
        count = len(one.tensors.keys() | one.values.keys())
        rows.append(("taken", f"state of {_count(count, 'parameter')} for {name} ({', '.join(entries)}){without}"))
    rows += [("taken", f"state of {name}") for name in schedulers]
    rows += [("anew", f"{name}: the checkpoint has no state for it") for name in anew]
    width = max(len(kind) for kind, _ in rows)
    return [f"  {kind:<{width}}  {printable(text)}" for kind, text in rows]


def _conversions(fit: Fit) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, dtype in fit.converted.items():
        before = str(fit.taken[name].dtype).removeprefix("torch.")
        found.setdefault(f"from {before} to {str(dtype).removeprefix('torch.')}", []).append(name)
    return found


def _some(named: Mapping[str, T]) -> list[tuple[str, T]]:
    return list(named.items())[:SHOWN]


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
