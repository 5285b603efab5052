"""Tiresias' policy (NSDI 2019), as the reference has it: two queues by attained service, replicas as the user asked."""

from __future__ import annotations

from collections.abc import Mapping

from pooling.runs import SimulatedRun

__all__ = ["tiresias"]

SECOND_QUEUE_DEVICE_S = 57_600.0  # 16 device-hours: a run that has had so much goes to the second queue


def tiresias(runs: Mapping[str, SimulatedRun], nodes: Mapping[str, int], now: float) -> dict[str, list[str]]:
    """Return the node of each replica. First in, first out in each queue; a smaller run behind may run."""
    del now
    free = dict(nodes)
    chosen: list[SimulatedRun] = []
    devices = sum(nodes.values())
    for run in sorted(runs.values(), key=_order):
        if run.asked.replicas <= devices:
            devices -= run.asked.replicas
            chosen.append(run)
    found: dict[str, list[str]] = {}
    for run in chosen:
        if run.allocation:
            found[run.name] = list(run.allocation)
            for node in run.allocation:
                free[node] -= 1
    for run in chosen:
        if not run.allocation:
            found[run.name] = _emptiest(free, run.asked.replicas)
    return found


def _order(run: SimulatedRun) -> tuple[bool, float, str]:
    return run.attained >= SECOND_QUEUE_DEVICE_S, run.asked.submitted_s, run.name


def _emptiest(free: dict[str, int], replicas: int) -> list[str]:
    """Take so many devices, of the emptiest nodes first."""
    taken: list[str] = []
    for node in sorted(free, key=lambda one: (-free[one], one)):
        count = min(free[node], replicas - len(taken))
        taken += [node] * count
        free[node] -= count
    return taken
