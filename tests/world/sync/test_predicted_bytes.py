"""The bytes that the planner predicts for each sync and wire, beside those that runs count."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import quick
from forked import World
from paceline.events import StepDone, decode
from paceline.parallel.meta.traced_costs import trace_costs
from paceline.plan import (
    AllReduce,
    Batch,
    Cast,
    Gossip,
    Int8,
    Layout,
    LocalSGD,
    OneBit,
    ParameterServer,
    Plan,
    PowerSGD,
    Raw,
    Sparse,
    Sync,
    TopK,
    Wire,
)
from paceline.planner.cluster import Cluster, catalogue
from paceline.planner.data_parallel import sent_bytes
from paceline.planner.plan_case import case_of

STEPS = 8  # PowerSGD sends its factors by turns, and local steps end in rounds of 4
WORKERS = 3


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(200, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 7))


def train(worker: Any) -> None:
    model = worker.prepare(made())
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    step = worker.stepper(model, optim, F.mse_loss)
    data = torch.utils.data.TensorDataset(torch.randn(48, 200), torch.randn(48, 7))
    for batch in worker.batches(data, epochs=2):
        step(batch)


def predicted(plan: Plan) -> float:
    device = dataclasses.replace(catalogue().device("a100"), is_synchronous=True)
    model = made()
    costs = trace_costs(model, lambda fake: model(fake(torch.zeros(2, 200))), samples=2, units=[])
    where = Cluster.of(device, WORKERS, devices_per_host=WORKERS)
    return sent_bytes(case_of(plan.resolve(WORKERS), costs, where, workers=WORKERS))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("sync", "wire"),
    [
        (AllReduce(), Raw()),
        quick.further(AllReduce(), Sparse()),
        quick.further(AllReduce(), Cast(dtype="bf16")),
        (AllReduce(), Int8()),
        quick.further(AllReduce(bucket_bytes=1 << 16), Int8(feedback=False)),
        (AllReduce(), OneBit()),
        (AllReduce(), TopK(ratio=0.02)),
        (AllReduce(), PowerSGD(rank=2)),
        (AllReduce(op="adasum"), Raw()),
        quick.further(LocalSGD(every=4), Raw()),
        (LocalSGD(every=4), Int8()),
        (Gossip(every=2, average_every=8), Raw()),
        quick.further(Gossip(peers="random", every=1, average_every=4), Raw()),
        quick.further(ParameterServer(), Raw()),
        (ParameterServer(servers=2), Cast(dtype="bf16")),
    ],
    ids=str,
)
def test_a_run_sends_the_bytes_that_were_predicted(world: World, sync: Sync, wire: Wire) -> None:
    plan = Plan(layout=Layout(replicas=WORKERS), batch=Batch(size=12, micro=4), sync=sync, wire=wire)
    world(train, WORKERS, plan, max_steps=STEPS, save_at_end=False)
    sent = 0
    for rank in range(WORKERS):
        lines = (world.worker_dir(rank) / "events.jsonl").read_text().splitlines()
        sent += sum(one.event.num_wire_bytes for one in map(decode, lines) if isinstance(one.event, StepDone))
    assert sent / WORKERS / STEPS == pytest.approx(predicted(plan), rel=0.05)
