"""Measured training runs (Pollux, OSDI 2021): seconds of a step, statistics of gradients, progress until the end."""

from __future__ import annotations

import csv
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import LinearNDInterpolator

__all__ = ["Application", "Submission", "load_applications", "load_submissions", "packed"]

DATA = Path(__file__).parents[1] / "data" / "pollux"
MOST_NODES, MOST_REPLICAS = 16, 64  # of what was measured
NUM_BATCHES = 50  # that are tried for a number of replicas, from the smallest to the largest in even ratios
LARGEST_LOCAL = {"yolov3": 8}  # the largest local batch, where it is less than was measured
FIXED = {"ncf": 32768}  # one replica, and always this batch, whose gain is counted as that of others
Floats = NDArray[np.float64]
Placement = tuple[int, ...]  # the replicas on each node


@dataclasses.dataclass(frozen=True, slots=True)
class Submission:
    """One run of a workload: when it comes, and what a careful user would ask for."""

    name: str
    submitted_s: float
    application: str
    replicas: int
    batch: int


@dataclasses.dataclass(frozen=True)
class BatchChoices:
    """Ways to make a step's batch on a number of replicas: local batch, and the passes that are accumulated."""

    local: NDArray[np.int64]
    passes: NDArray[np.int64]
    total: NDArray[np.int64]


class Application:
    """One kind of run, as it was measured. A step's seconds are interpolated between measurements."""

    def __init__(self, name: str, steps: Sequence[dict[str, str]], gradients: Sequence[dict[str, str]]) -> None:
        self.name = name
        self._placed: dict[str, Floats] = {}  # rows of local batch, seconds, seconds of synchronizing
        self._read_steps(steps)
        self._read_gradients(gradients)
        local = np.array([float(row["local_batch"]) for row in steps])
        self.min_local = FIXED.get(name, int(local.min()))
        self.max_local = FIXED.get(name, LARGEST_LOCAL.get(name, int(local.max())))
        self.initial_batch, self.max_batch = min(self._gradients), max(self._gradients)
        self.max_replicas = 1 if name in FIXED else min(MOST_REPLICAS, self.max_batch // self.min_local)
        self.best: dict[tuple[Placement, tuple[float, float]], tuple[float, int, int]] = {}  # the runs' memory
        self._choices: dict[int, BatchChoices] = {}
        self._arrays: dict[Placement, tuple[Floats, Floats]] = {}
        self._seconds: dict[tuple[Placement, int], tuple[float, float]] = {}

    @property
    def num_epochs(self) -> int:
        return len(self.progress)

    def step_seconds(self, placement: Placement, local: int) -> tuple[float, float]:
        """Return the seconds of one pass and of its synchronizing; NaN where nothing near was measured."""
        key = (_turned(placement), local)
        if key not in self._seconds:
            self._seconds[key] = self._interpolated(*key)
        return self._seconds[key]

    def seconds_of(self, placement: Placement) -> tuple[Floats, Floats]:
        """Return `step_seconds` for each of the `choices` that the replicas of a placement have."""
        placement = _turned(placement)
        if placement not in self._arrays:
            both = np.array([self.step_seconds(placement, int(local)) for local in self.choices(sum(placement)).local])
            self._arrays[placement] = both[:, 0], both[:, 1]
        return self._arrays[placement]

    def mean_sync(self, placement: Placement) -> float:
        """Return the seconds of synchronizing on a placement, in the mean of the choices."""
        return float(np.nanmean(self.seconds_of(placement)[1]))

    def gradients(self, batch: float, epoch: int) -> tuple[float, float]:
        """Return the squared norm of the gradient and its variance, `epoch` epochs after the start."""
        below = max(one for one in self._gradients if one <= batch)
        above = min(one for one in self._gradients if one >= batch)
        share = 0.0 if above == below else (batch - below) / (above - below)
        row = [self._gradients[one][min(epoch, len(self._gradients[one]) - 1)] for one in (below, above)]
        found = row[0] * (1 - share) + row[1] * share
        return float(found[0]), float(found[1])

    def choices(self, replicas: int) -> BatchChoices:
        """Return the batches that a run on so many replicas may choose from."""
        if replicas not in self._choices:
            least = max(self.initial_batch, self.min_local * replicas)
            total = np.geomspace(least, max(least, self.max_batch), NUM_BATCHES)
            passes = np.maximum(1, np.ceil(total / replicas / self.max_local - 1e-8))
            if replicas == 1 and self.name not in FIXED:  # the noise of gradients is estimated from two passes at least
                passes = np.where(total > self.initial_batch + 1e-8, np.maximum(passes, 2), passes)
            local = np.ceil(total / replicas / passes - 1e-8)
            local = np.minimum(local, self.max_batch // (replicas * passes))
            fits = (local >= self.min_local) & (local <= self.max_local)
            local, passes = local[fits].astype(np.int64), passes[fits].astype(np.int64)
            self._choices[replicas] = BatchChoices(local, passes, local * passes * replicas)
        return self._choices[replicas]

    def split(self, replicas: int, batch: int) -> tuple[int, int]:
        """Return local batch and passes of a batch that the user has fixed."""
        local = int(np.ceil(batch / replicas - 1e-8))
        passes = int(np.ceil(local / self.max_local - 1e-8))
        if replicas == 1 and batch > self.initial_batch and self.name not in FIXED:
            passes = max(2, passes)
        return min(int(np.ceil(local / passes - 1e-8)), self.max_batch // (replicas * passes)), passes

    def _read_steps(self, rows: Sequence[dict[str, str]]) -> None:
        placed: dict[str, list[list[float]]] = {}
        means: dict[tuple[int, int, float], list[list[float]]] = {}
        for row in rows:
            point = [float(row[key]) for key in ("local_batch", "step_s", "sync_s")]
            where = row["placement"]
            nodes = int(where[:-1]) if where.endswith("x") else len(where)
            if not where.endswith("x"):
                placed.setdefault(where, []).append(point)
            means.setdefault((nodes, int(row["replicas"]), point[0]), []).append(point[1:])
        self._placed = {where: np.array(sorted(points)) for where, points in placed.items()}
        self._points = np.array(list(means), dtype=float)
        self._values = np.array([np.mean(values, axis=0) for values in means.values()])

    def _read_gradients(self, rows: Sequence[dict[str, str]]) -> None:
        found: dict[int, list[list[float]]] = {}
        for row in rows:
            found.setdefault(int(row["batch"]), []).append(
                [float(row[key]) for key in ("grad_sqr", "grad_var", "progress")]
            )
        self._gradients = {batch: np.array(values)[:, :2] for batch, values in found.items()}
        epochs = min(map(len, found.values()))
        self.progress = [values[2] for values in found[min(found)]][:epochs]  # in steps of the initial batch

    @functools.cached_property
    def _everywhere(self) -> LinearNDInterpolator:
        return LinearNDInterpolator(self._points, self._values)

    def _interpolated(self, placement: Placement, local: int) -> tuple[float, float]:
        rows = self._placed.get("".join(map(str, placement)))
        if rows is not None and rows[0, 0] <= local <= rows[-1, 0]:
            return float(np.interp(local, rows[:, 0], rows[:, 1])), float(np.interp(local, rows[:, 0], rows[:, 2]))
        where = (min(len(placement), MOST_NODES), sum(placement), local)
        found = self._everywhere([where])[0]
        return float(found[0]), float(found[1])


def packed(replicas: int, nodes: int) -> Placement:
    """Return replicas spread evenly over so many nodes, fewer first: 7 over 2 is (3, 4)."""
    each, more = divmod(replicas, nodes)
    return (each,) * (nodes - more) + (each + 1,) * more


def load_applications() -> dict[str, Application]:
    """Return all measured applications by their names."""
    steps, gradients = _by_application("steps.csv"), _by_application("gradients.csv")
    return {name: Application(name, rows, gradients[name]) for name, rows in steps.items()}


def load_submissions(load: str, workload: int) -> list[Submission]:
    """Return the runs of one workload ("1.0" or "1.5"; 1 to 4) in the order in which they come."""
    rows = [row for row in _rows("workloads.csv") if (row["load"], row["workload"]) == (load, str(workload))]
    return [
        Submission(f"{row['application']}-{at}", float(row["submitted_s"]), row["application"], *_asked(row))
        for at, row in enumerate(rows)
    ]


def _asked(row: dict[str, Any]) -> tuple[int, int]:
    return int(row["replicas"]), int(row["batch"])


def _by_application(file: str) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for row in _rows(file):
        found.setdefault(row["application"], []).append(row)
    return found


def _rows(file: str) -> Iterator[dict[str, str]]:
    with (DATA / file).open() as lines:
        yield from csv.DictReader(lines)


def _turned(placement: Placement) -> Placement:
    """Return the turn of a ring of nodes that comes first: (2, 1) is (1, 2)."""
    return min(placement[at:] + placement[:at] for at in range(len(placement)))
