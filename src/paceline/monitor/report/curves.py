"""The curves of a run, thinned to what a page can show: loss over steps, speed over time, held-out values.

A run of a million steps is drawn in some hundred columns. Each column keeps the mean, the least and the greatest value
that fall into it, so no spike disappears. A speed is that of a whole step: a long step is drawn as a level line from
its beginning to its end.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import statistics
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.logs.log_reader import lines_of
from paceline.logs.metric_rows import read_row
from paceline.monitor.records.damaged_lines import DamagedLines

__all__ = ["NUM_COLUMNS", "Curves", "Point", "read_curves", "thinned"]

NUM_COLUMNS = 480
LONG = 4.0  # times the median step: one that took longer is drawn from its beginning to its end


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One column: where it stands, and what was in it."""

    x: float
    mean: float
    least: float
    most: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curves:
    """`loss` over steps, `speed` (samples/s) over elapsed seconds."""

    loss: tuple[Point, ...]
    speed: tuple[Point, ...]
    first_loss: float | None
    last_loss: float | None
    speed_mean: float | None  # samples/s of all steps, without what lay between attempts
    num_samples: int
    num_losses: int
    num_broken: int  # steps whose loss is not finite


def read_curves(metrics: Path, elapsed: Callable[[float], float], damaged: DamagedLines | None = None) -> Curves:
    """Read a run's `metrics.jsonl`; empty curves where there is none. `damaged` gets the lines that were left out."""
    steps, losses, times, samples, took = array("d"), array("d"), array("d"), array("q"), array("d")
    since = array("d")  # when the step began, by the clock of `times`
    lows, highs, weights = array("d"), array("d"), array("d")  # of the losses: a row may stand for many
    slowest, fastest, nums = array("d"), array("d"), array("q")
    first_loss, last_loss, num_broken = None, None, 0
    for row in (damaged or DamagedLines()).read(metrics, lines_of(metrics), read_row):
        merged = row.get("merged")
        if isinstance(merged, dict):
            row = {**row, **_as_one(merged)}
        loss = row.get("loss")
        if isinstance(loss, (int, float)) and math.isfinite(loss):
            steps.append(row["step"])
            losses.append(loss)
            lows.append(row.get("least", loss))
            highs.append(row.get("most", loss))
            weights.append(row.get("num", 1))
            first_loss = row.get("first", loss) if first_loss is None else first_loss
            last_loss = row.get("last", loss)
        elif "loss" in row and not row.get("skipped", False):
            num_broken += 1
        num_broken += row.get("num_broken", 0)
        speed = row.get("samples_per_s")
        if speed and math.isfinite(row["num_samples"] / speed):
            times.append(elapsed(row["time"]))
            samples.append(row["num_samples"])
            took.append(row["num_samples"] / speed)
            since.append(elapsed(row.get("since", row["time"] - took[-1])))
            slowest.append(row.get("slowest", speed))
            fastest.append(row.get("fastest", speed))
            nums.append(row.get("num", 1))
    speeds = array("d", (number / seconds if seconds else 0.0 for number, seconds in zip(samples, took, strict=True)))
    return Curves(
        loss=thinned(steps, losses, weights=weights, spread=(lows, highs)),
        speed=_levels(since, times, speeds, took, nums=nums, spread=(slowest, fastest)),
        first_loss=first_loss,
        last_loss=last_loss,
        speed_mean=sum(samples) / sum(took) if took and sum(took) else None,
        num_samples=sum(samples),
        num_losses=int(sum(weights)),
        num_broken=num_broken,
    )


def _as_one(merged: Mapping[str, Any]) -> dict[str, Any]:
    """What a row that stands for many says of all of them."""
    loss, speed = merged.get("loss") or {}, merged.get("samples_per_s") or {}
    took_s, samples = merged.get("took_s", 0.0), merged.get("timed_samples", 0)
    return {
        "loss": loss.get("mean"),
        **{name: loss[name] for name in ("least", "most", "first", "last", "num") if name in loss},
        "num_broken": merged.get("num_broken", 0) - (not loss),  # a row without any loss is counted by itself
        "num_samples": samples,
        "samples_per_s": samples / took_s if took_s else None,
        "since": merged.get("since"),
        **({"slowest": speed["least"], "fastest": speed["most"]} if speed else {}),
    }


def _levels(
    since: Sequence[float],
    times: Sequence[float],
    speeds: Sequence[float],
    took: Sequence[float],
    *,
    nums: Sequence[int],
    spread: tuple[Sequence[float], Sequence[float]],
) -> tuple[Point, ...]:
    """Thin the speeds of steps; one that took long has a point in each column that it lasted through."""
    width = (times[-1] - min(since)) / NUM_COLUMNS if times else 0.0
    long_s = max(width, LONG * statistics.median(map(operator.truediv, took, nums))) if took else 0.0
    xs, ys, weights, lows, highs = array("d"), array("d"), array("d"), array("d"), array("d")
    for began, ended, speed, seconds, low, high in zip(since, times, speeds, took, *spread, strict=True):
        began = max(began, xs[-1]) if xs else began
        pieces = math.ceil((ended - began) / width) if width > 0 and seconds > long_s else 0
        for place in range(pieces):
            xs.append(began + place * (ended - began) / pieces)
            ys.append(speed)
            weights.append(seconds / (pieces + 1))
            lows.append(low)
            highs.append(high)
        xs.append(ended)
        ys.append(speed)
        weights.append(seconds / (pieces + 1))
        lows.append(low)
        highs.append(high)
    return thinned(xs, ys, weights=weights, spread=(lows, highs))


def thinned(
    xs: Sequence[float],
    ys: Sequence[float],
    *,
    weights: Sequence[float] | None = None,
    spread: tuple[Sequence[float], Sequence[float]] | None = None,
    columns: int = NUM_COLUMNS,
) -> tuple[Point, ...]:
    """Return at most `columns` points of a curve whose `xs` do not fall; means are weighted. `spread`: the least and
    the greatest value that each of the `ys` stands for."""
    lows, highs = spread or (ys, ys)
    if len(xs) <= columns:
        return tuple(itertools.starmap(Point, zip(xs, ys, lows, highs, strict=True)))
    first, width = xs[0], ((xs[-1] - xs[0]) or 1.0) / columns
    points: list[Point] = []
    begin = 0
    while begin < len(xs):
        column = min(int((xs[begin] - first) / width), columns - 1)
        end = begin + 1
        while end < len(xs) and (column == columns - 1 or xs[end] < first + (column + 1) * width):
            end += 1
        within, shares = ys[begin:end], weights[begin:end] if weights is not None else [1.0] * (end - begin)
        whole = sum(shares)
        mean = sum(y * share for y, share in zip(within, shares, strict=True)) / whole if whole else within[0]
        points.append(Point(sum(xs[begin:end]) / (end - begin), mean, min(lows[begin:end]), max(highs[begin:end])))
        begin = end
    return tuple(points)
