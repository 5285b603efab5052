"""A simulated cluster: runs come, a policy decides at fixed times, runs go on until all are finished."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pooling.applications import Application, Submission
from pooling.runs import Knowledge, SimulatedRun

__all__ = ["NODES", "Policy", "PoolOutcome", "Times", "simulate"]

Policy = Callable[[Mapping[str, SimulatedRun], Mapping[str, int], float], Mapping[str, Sequence[str]]]
NODES = {f"node-{at:02}": 4 for at in range(16)}
LONGEST_S = 30 * 86400.0


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """Seconds between two decisions, and seconds that a run stands still when its devices change."""

    interval_s: float = 60.0
    stand_still_s: float = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class PoolOutcome:
    """What became of a workload."""

    jct_s: Mapping[str, float]  # of each run, from its submission
    restarts: int
    longest_wait_s: float  # that a run was without devices at a stretch

    @property
    def mean_s(self) -> float:
        return float(np.mean(list(self.jct_s.values())))

    @property
    def p99_s(self) -> float:
        return sorted(self.jct_s.values())[int(0.99 * len(self.jct_s))]  # as in the reference


def simulate(
    submissions: Sequence[Submission],
    apps: Mapping[str, Application],
    policy: Policy,
    *,
    knowledge: Knowledge,
    times: Times | None = None,
    fixed_batch: bool = False,
    nodes: Mapping[str, int] = NODES,
) -> PoolOutcome:
    """Return what a policy makes of a workload. A run that comes between two decisions waits for the next one."""
    times = times or Times()
    coming = sorted(
        (SimulatedRun(one, apps[one.application], knowledge=knowledge, fixed_batch=fixed_batch) for one in submissions),
        key=lambda run: run.asked.submitted_s,
    )
    everyone, here = list(coming), dict[str, SimulatedRun]()
    now, longest_wait = 0.0, 0.0
    while coming or here:
        if not here:  # nothing happens until the next run comes
            now = max(now, math.ceil(coming[0].asked.submitted_s / times.interval_s) * times.interval_s)
        while coming and coming[0].asked.submitted_s <= now:
            run = coming.pop(0)
            here[run.name] = run
        _give(here, nodes, policy(here, nodes, now), times)
        for run in here.values():
            if run.allocation:
                longest_wait = max(longest_wait, now - run.last_held_s)
            run.advance(now, times.interval_s)
        here = {name: run for name, run in here.items() if not run.is_finished}
        now += times.interval_s
        if now > LONGEST_S:
            raise RuntimeError(f"{len(here)} runs are not finished after 30 days; the policy starves them")
    return PoolOutcome(
        {run.name: run.jct_s for run in everyone}, sum(max(0, run.restarts) for run in everyone), longest_wait
    )


def _give(
    here: Mapping[str, SimulatedRun],
    nodes: Mapping[str, int],
    decided: Mapping[str, Sequence[str]],
    times: Times,
) -> None:
    used: dict[str, int] = {}
    for name, run in here.items():
        wanted = list(decided.get(name, ()))
        for node in wanted:
            used[node] = used.get(node, 0) + 1
        if wanted != run.allocation:
            run.move(wanted, times.stand_still_s)
    if any(count > nodes[node] for node, count in used.items()):
        raise RuntimeError(f"the policy gave out more devices than there are: {used}")
