"""Parameter servers with mirrors: whichever process is killed, and at whatever point of a step, nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from forked import World
from layout_runs import BATCH, EXACT, Net, Text, assert_same, next_word, plan_of
from paceline.plan import Layout, ParameterServer, Plan
from server_kills import MIRROR, SERVER, arm

MIRRORED = ParameterServer(servers=2, mirrored=True, bucket_bytes=3000)
# Who is killed, before or after which of its methods: each in a step of its own; there is another mirror in the next.
POINTS = [
    (SERVER, "_push", "after"),
    (SERVER, "_before_sum", "before"),
    (SERVER, "_before_sum", "after"),  # the mirror has the sums, no worker has been told
    (SERVER, "_before_step", "before"),
    (SERVER, "_before_step", "after"),  # the mirror is told to step, the server has not
    (SERVER, "_after_step", "before"),  # the server has, too
    (SERVER, "_after_step", "after"),
    (SERVER, "_send_weights", "after"),  # some worker has the new weights, another one not
    (MIRROR, "_add_sums", "before"),
    (MIRROR, "_add_sums", "after"),
    (MIRROR, "_step", "before"),
    (MIRROR, "_step", "after"),
    (MIRROR, "_copy", "before"),  # of the one that takes the place of the last one
]
DEATHS = {2 * number + 2: point for number, point in enumerate(POINTS[:-1])} | {2 * len(POINTS) - 1: POINTS[-1]}
STEPS = 2 * len(POINTS) + 2


def mirrored(replicas: int) -> Plan:
    return Plan(layout=Layout(replicas=replicas), batch=BATCH, compute=EXACT, sync=MIRRORED)


def training(folder: Path | None = None, deaths: dict[int, tuple[str, str, str]] | None = None) -> Callable[..., Any]:
    def run(worker: Any) -> dict[str, Any]:
        arm(folder or Path(), deaths or {})
        torch.manual_seed(3)
        model = worker.prepare(Net(0.0))
        optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02))
        step = worker.stepper(model, optim, next_word, clip_norm=0.5)
        losses: list[float] = []
        norms: list[float] = []
        for batch in worker.batches(Text(), epochs=STEPS):
            losses.append(float(step(batch)))
            norms.append(float(step.grad_norm))
        weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
        return {"losses": losses, "norms": norms, "weights": weights.tolist()}

    return run


def replaced(world: World, workers: int) -> list[dict[str, Any]]:
    """What was told of servers whose mirrors have taken their place."""
    paths = [world.worker_dir(rank) / "events.jsonl" for rank in range(workers)]
    events = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return [event for event in events if event["event"] == "ServerReplaced"]


def test_a_kill_at_any_point_changes_no_bit(world: World, tmp_path: Path) -> None:
    calm = world(training(), 2, mirrored(2), max_steps=STEPS)
    assert replaced(world, 2) == []
    results = world(training(tmp_path, DEATHS), 2, mirrored(2), max_steps=STEPS, fresh=True)
    assert sorted(path.name for path in tmp_path.glob("exited_*")) == sorted(f"exited_{step}" for step in DEATHS)
    assert results == calm
    assert_same(results, world.one_process(training(), plan_of(Layout()), max_steps=STEPS))
    told = {event["step"]: event for event in replaced(world, 2)}
    assert sorted(told) == [step for step, (who, *_) in DEATHS.items() if who == SERVER]
    assert all(event["lost"].startswith(f"parameter server {event['server']} (pid") for event in told.values())
