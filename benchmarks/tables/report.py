"""What the answers are worth: errors, order of plans, bands; as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tables.answers import Answer
from tables.rows import Reading, measured_gb, measured_s

__all__ = ["Tried", "error_line", "held", "memory_lines", "rank_lines", "tried"]

APART = 1.1  # two plans whose speeds differ by more than this are compared


class Tried:
    """An answer beside what was measured."""

    def __init__(self, answer: Answer, row: Mapping[str, Any]) -> None:
        self.answer, self.row = answer, row
        self.seconds = measured_s(row, answer.reading.case)
        self.memory_gb = measured_gb(row)
        self.is_oom = bool(row["measured"].get("oom"))

    @property
    def reading(self) -> Reading:
        return self.answer.reading

    @property
    def log_error(self) -> float | None:
        """Predicted over measured seconds."""
        return None if not self.seconds else math.log(self.answer.step_s / self.seconds)

    @property
    def memory_error(self) -> float | None:
        return None if not self.memory_gb else math.log(self.answer.memory / 1e9 / self.memory_gb)


def tried(answers: Sequence[Answer], rows: Sequence[Mapping[str, Any]]) -> list[Tried]:
    return [Tried(answer, row) for answer, row in zip(answers, rows, strict=True)]


def error_line(name: str, errors: Iterable[float]) -> str:
    """One line of a table: number, median and 90th percentile of the absolute relative error."""
    found = np.abs(np.expm1(np.array(list(errors))))
    if not len(found):
        return f"{name:42s}    no rows"
    return f"{name:42s} {len(found):5d}   {np.median(found) * 100:5.1f} %   {np.quantile(found, 0.9) * 100:5.1f} %"


def held(found: Iterable[tuple[float, float]]) -> float:
    """Return the share of (error, half width of the band) that are within."""
    inside = [abs(error) <= band for error, band in found]
    return sum(inside) / len(inside) if inside else math.nan


def _group(one: Tried) -> tuple[Any, ...]:
    case = one.reading.case
    model = one.row["model"]
    return (
        one.reading.title,
        model.get("name"),
        case.model.count,
        case.model.sequence,
        case.cluster.device.name,
        case.axes.workers,
        case.precision,
    )


def _plans(found: Sequence[Tried]) -> list[list[tuple[float, float]]]:
    """Return (predicted, measured) samples per second of the plans that one could choose from, choice by choice.

    Rows that are the same plan, printed twice or of other versions of the software, count once, by their mean.
    """
    groups: dict[tuple[Any, ...], dict[Any, list[tuple[float, float]]]] = {}
    for one in found:
        if one.seconds:
            case = one.reading.case
            plan = (case.axes, case.micro_batch, case.micro_batches, case.recompute)
            same = groups.setdefault(_group(one), {}).setdefault(plan, [])
            same.append((case.samples / one.answer.step_s, case.samples / one.seconds))
    return [
        [(_mean([a for a, _ in same]), _mean([b for _, b in same])) for same in plans.values()]
        for plans in groups.values()
    ]


def _mean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def rank_lines(found: Sequence[Tried]) -> list[str]:
    """Say how often the faster of two plans is known, and what the pick of the best costs."""
    right = compared = 0
    regrets: list[float] = []
    for plans in _plans(found):
        for index, (guess, truth) in enumerate(plans):
            for other_guess, other_truth in plans[:index]:
                if max(truth, other_truth) / min(truth, other_truth) > APART:
                    compared += 1
                    right += (guess > other_guess) == (truth > other_truth)
        if len(plans) > 1:
            pick = max(plans, key=lambda plan: plan[0])[1]
            regrets.append(max(truth for _, truth in plans) / pick - 1)
    if not compared:
        return ["no two plans of a model and a cluster differ by more than 10 %"]
    return [
        f"order of two plans that differ by more than 10 %: right in {right / compared * 100:.1f} % of {compared}",
        f"regret of the pick, of {len(regrets)} choices: median {np.median(regrets) * 100:.1f} %, "
        f"90th percentile {np.quantile(regrets, 0.9) * 100:.1f} %",
    ]


def memory_lines(found: Sequence[Tried]) -> list[str]:
    """Errors of memory, and what is said of rows that ran out of it."""
    with_error = [one for one in found if one.memory_error is not None]
    lines = [error_line("memory", [one.memory_error or 0.0 for one in with_error])]
    bands = held([(one.memory_error or 0.0, one.answer.memory_band) for one in with_error])
    lines += [f"  80 % bands hold {bands * 100:.0f} %"] if with_error else []
    out = [one for one in found if one.is_oom]
    if out:
        said = {word: sum(one.answer.fits == word for one in out) for word in ("does not fit", "unsure", "fits")}
        lines.append(f"out of memory: {len(out)} rows; " + ", ".join(f"{n} said {word!r}" for word, n in said.items()))
    wrong = sum(one.answer.fits == "does not fit" for one in with_error)
    lines.append(f"ran: {len(with_error)} rows; {wrong} said 'does not fit'")
    return lines
