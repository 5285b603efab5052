"""How much of a run's time goes into steps that count, where hosts fail: goodput.

A failure costs its detection and, in a run of several replicas, what is missing until a host has taken the lost one's
place. With one replica all wait for that host, start again, and repeat the steps since the newest copy of the state.
With failures at a rate r, each of which costs c seconds, 1 / (1 + r c) of the time is left (as in Young, "A first order
approximation to the optimum checkpoint interval", 1974, where c is far below 1 / r).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from paceline.planner.axes import Axes

__all__ = ["Goodput", "goodput"]

# Of Paceline: its defaults, and what docs/reference/benchmarks.md has under "Recovery".
DETECTED_S = 10.0  # a host that is silent is given up (Job.silence_s); one whose connection breaks at once
REGROUPED_S = 0.2  # from there to the next step of the replicas that are left
RESTARTED_S = 1.4  # a start of all from snapshots in other hosts' memory
SNAPSHOT_STEPS = 10  # steps between these snapshots
STARTED_S = 6.0  # assumed, not measured: a start of all from a checkpoint on disk, without the model's preparation
SAVE_EVERY_S = 300.0  # between two checkpoints (Job.save_every_s)
SAVING = 0.01  # of the time, which saving by time keeps to


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """`share` of the time that goes into steps that count; `failures_per_day` of the job's hosts, and the seconds that
    each costs, by cause.
    """

    share: float
    failures_per_day: float
    costs: Mapping[str, float]


def goodput(axes: Axes, *, per_host: int, step_s: float, mtbf_s: float, replace_s: float) -> Goodput:
    """Return the goodput of a job whose hosts fail once in `mtbf_s` seconds each, and are replaced in `replace_s`.

    Workers of a replica are neighbours: a host has parts of as few replicas as can be.
    """
    hosts = max(1, math.ceil(axes.workers / per_host))
    each = axes.workers // axes.replicas
    lost = math.ceil(min(per_host, axes.workers) / each) if each < per_host else 1
    costs = {"the loss is noticed": DETECTED_S}
    if axes.replicas > lost:
        costs["the others regroup"] = REGROUPED_S
        costs["replicas are missing until a host replaces the lost one"] = replace_s * lost / axes.replicas
    elif hosts > 1:
        costs["all wait for a host that replaces the lost one"] = replace_s
        costs["a start from other hosts' memory"] = RESTARTED_S
        costs["steps that are repeated"] = SNAPSHOT_STEPS / 2 * step_s
    else:
        costs["all wait for a host that replaces the lost one"] = replace_s
        costs["a start from a checkpoint"] = STARTED_S
        costs["steps that are repeated"] = SAVE_EVERY_S / 2
    rate = hosts / mtbf_s
    share = (1 - SAVING) / (1 + rate * sum(costs.values()))
    return Goodput(share=share, failures_per_day=rate * 86400, costs=costs)
