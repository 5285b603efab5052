"""Paceline's policy over simulated runs: a run's facts as the policy takes them."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.pool.facts import PoolJob, PoolTerms
from paceline.pool.policy import allocate
from pooling.cluster import Policy, Times
from pooling.runs import SimulatedRun

__all__ = ["facts_of", "paceline_policy"]


def paceline_policy(times: Times) -> Policy:
    """Return the policy, which knows how often it decides and what a change costs."""
    terms = PoolTerms(interval_s=times.interval_s)

    def decide(runs: Mapping[str, SimulatedRun], nodes: Mapping[str, int], now: float) -> dict[str, list[str]]:
        jobs = {name: facts_of(run, now, times) for name, run in runs.items()}
        return allocate(jobs, nodes, now, terms)

    return decide


def facts_of(run: SimulatedRun, now: float, times: Times) -> PoolJob:
    """Return what a run tells the policy."""
    return PoolJob(
        speedup=run.speedup,
        max_replicas=run.max_replicas,
        age=now - run.asked.submitted_s,
        attained=run.attained,
        restarts=max(0, run.restarts),
        allocation=run.allocation,
        remaining=run.remaining_s if run.says_remaining else None,
        moving_s=times.stand_still_s,
    )
