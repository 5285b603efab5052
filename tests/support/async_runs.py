"""Runs whose replicas do not wait for each other, and what their steps and weights were."""

from __future__ import annotations

import json
from typing import Any

import torch

from forked import World
from layout_runs import (
    BATCH,
    EXACT,
)
from paceline.plan import Batch, Layout, ParameterServer, Plan

__all__ = ["THREADS", "asynchronous", "steps_of", "weights_of"]


THREADS = {"threads": 1}


def asynchronous(replicas: int, *, staleness: int | None = None, servers: int = 2, batch: Batch = BATCH) -> Plan:
    sync = ParameterServer(servers=servers, staleness=staleness)
    return Plan(layout=Layout(replicas=replicas), batch=batch, compute=EXACT, sync=sync)


def steps_of(world: World, workers: int) -> list[dict[str, Any]]:
    """What the workers said of their steps."""
    paths = [world.worker_dir(rank) / "events.jsonl" for rank in range(workers)]
    events = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return [event for event in events if event["event"] == "StepDone"]


def weights_of(model: torch.nn.Module) -> list[float]:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).tolist()
