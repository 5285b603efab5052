"""How much a second of each run counts: the expected number of runs that finish after it, itself included.

A second that is taken off one run is a second less for all that finish after it. With equal power-law speed-ups and
known sizes, sharing by these weights is the best there is: heSRPT (Berg, Vesilo, Harchol-Balter, Performance 2020),
whose shares are those that maximize the sum of weight times speed, to within rounding of the weights.

A run that does not say what it has left is expected to need as much as it has had, with heavy tails: the chance that it
needs x more, after a of service, is a / (a + x). Runs whose service is of the same order are taken for runs of a kind,
which end in the order in which they came.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from paceline.pool.facts import PoolJob

__all__ = ["chance_of_longer", "weights"]

KIND_RATIO = 8.0  # runs whose service differs by less may be of a kind
FIRST_KIND_DEVICE_S = 600.0  # below that, all runs are new
LEAST_SERVICE_DEVICE_S = 60.0  # the service of a new run is taken for that, so that new runs are alike
STEPS_PER_DOUBLING = 8  # sizes are rounded to steps of 9 %, so that the cost does not grow with the square of the runs


@dataclasses.dataclass(slots=True)
class SizeGroup:
    """Runs of about the same size; `priority` is the sum of theirs."""

    size: float
    kind: int
    priority: float = 0.0


def weights(jobs: Mapping[str, PoolJob]) -> dict[str, float]:
    """Return the weight of each run: the sum of the priorities of the runs that are expected to finish no earlier.

    Runs are compared by their size over their priority.
    """
    known = {name: job for name, job in jobs.items() if job.remaining is not None}
    unknown = {name: job for name, job in jobs.items() if job.remaining is None}
    found = {name: job.priority for name, job in jobs.items()}
    _add_in_order(found, jobs, sorted(known, key=lambda name: (-_size(known[name]), jobs[name].age, name)))
    kinds: dict[int, list[str]] = {}
    for name, job in unknown.items():
        kinds.setdefault(_kind(_rounded(_size(job))), []).append(name)
    for names in kinds.values():
        _add_in_order(found, jobs, sorted(names, key=lambda name: (jobs[name].age, name)))
    certain, guessed = _groups(known.values()), _groups(unknown.values())
    sums = {group.size: _longer_unknown(group, guessed) + _longer_known(group, certain) for group in guessed.values()}
    for name, job in unknown.items():
        found[name] += sums[_rounded(_size(job))]
    sums = {
        group.size: sum(one.priority * one.size / (one.size + group.size) for one in guessed.values())
        for group in certain.values()
    }
    for name, job in known.items():
        found[name] += sums[_rounded(_size(job))]
    return found


def chance_of_longer(ratio: float) -> float:
    """Return the chance that a run needs more time than another, where its service is `ratio` times the other's.

    Both have the tail a / (a + x). The logarithm of the time over the service is then logistic for both, and the
    chance is that of the difference of two such values.
    """
    if abs(ratio - 1) < 1e-3:  # the formula is 0 / 0 there
        return 0.5
    return ratio * (ratio - 1 - math.log(ratio)) / (ratio - 1) ** 2


def _add_in_order(found: dict[str, float], jobs: Mapping[str, PoolJob], names: Sequence[str]) -> None:
    """Add to each run the priorities of those before it in `names`: those that finish later."""
    later = 0.0
    for name in names:
        found[name] += later
        later += jobs[name].priority


def _longer_unknown(group: SizeGroup, guessed: Mapping[float, SizeGroup]) -> float:
    """Return the priorities of runs of other kinds, times the chance that they need more time than this group."""
    others = (one for one in guessed.values() if one.kind != group.kind)
    return sum(one.priority * chance_of_longer(one.size / group.size) for one in others)


def _longer_known(group: SizeGroup, certain: Mapping[float, SizeGroup]) -> float:
    return sum(one.priority * one.size / (one.size + group.size) for one in certain.values())


def _groups(jobs: Iterable[PoolJob]) -> dict[float, SizeGroup]:
    found: dict[float, SizeGroup] = {}
    for job in jobs:
        size = _rounded(_size(job))
        found.setdefault(size, SizeGroup(size, _kind(size))).priority += job.priority
    return found


def _size(job: PoolJob) -> float:
    """Return what a run has left: as it says, or as much as it has had."""
    left = job.remaining if job.remaining is not None else max(job.attained, LEAST_SERVICE_DEVICE_S)
    return left / job.priority


def _rounded(size: float) -> float:
    return 2.0 ** (round(math.log2(max(size, 1.0)) * STEPS_PER_DOUBLING) / STEPS_PER_DOUBLING)


def _kind(size: float) -> int:
    return max(0, math.floor(math.log(size / FIRST_KIND_DEVICE_S, KIND_RATIO)) + 1)
