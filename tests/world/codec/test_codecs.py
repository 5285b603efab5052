"""Codecs between real replicas: same bits on all, nothing lost, bytes as counted, even without gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forked import World
from paceline.comm.allreduce.scheduled_group import backend_group_of
from paceline.comm.elastic.generation_group import GenerationGroup
from paceline.plan import AllReduce, Cast, Int8, OneBit, PowerSGD, Raw, Sparse, TopK, Wire
from paceline.sync.allreduce.gradient_reducer import GradientReducer

WIRES = [Raw(), Cast(dtype="bf16", feedback=True), Int8(), OneBit(), TopK(ratio=0.1), PowerSGD(rank=2), Sparse()]
STEPS, IDLE = 4, 2  # the last replica has no micro-batch in step IDLE


class Words(nn.Module):
    """An embedding that makes sparse gradients, of which a step touches few rows, and layers of several buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1200, 24, sparse=True)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(4)))
        self.idle = nn.Linear(3, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.layers(self.words(words)).square().sum()


def by_every_wire(worker: Any) -> dict[str, dict[str, Any]]:
    found = {repr(wire): summed(worker._group, wire) for wire in WIRES}
    over = backend_group_of(worker._group._current())
    watched = GenerationGroup(over._group, device=over.device, check=lambda: None, timeout_s=20.0)
    for wire in (Int8(), OneBit()):  # of which no sum is another's: the same bits on every way
        for group in (over, watched):
            for name, total in summed(group, wire)["total"].items():
                assert torch.equal(total, found[repr(wire)]["total"][name]), (wire, group, name)
    return found


def summed(group: Any, wire: Wire) -> dict[str, Any]:
    torch.manual_seed(1)
    model = Words()
    total = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    sync = AllReduce(bucket_bytes=24 * 24 * 4 + 1)
    gradients = GradientReducer(model.named_parameters(), group=group, sync=sync, wire=wire)
    for step in range(STEPS):
        gradients.begin(0, step=step)
        if step != IDLE or group.index != group.size - 1:
            words = torch.randint(1200, (6,), generator=torch.Generator().manual_seed(10 * step + group.index))
            gradients.arm()
            model(words).backward()
        gradients.flush([1.0])  # the one that is idle sends what it held back
        assert gradients.collect() == [group.size]
        gradients.land(scale=1.0)
        assert model.idle.weight.grad is None
        for name, parameter in model.named_parameters():
            total[name] += 0.0 if parameter.grad is None else parameter.grad
        gradients.settle()
    return {"total": total, "held": gradients.memory().own, "bytes": gradients.bytes}


@pytest.mark.parametrize("replicas", [2, 3])
def test_every_wire_brings_all_replicas_the_same_and_holds_back_the_rest(world: World, replicas: int) -> None:
    found = world(by_every_wire, replicas)
    exact = found[0]["Raw()"]
    raw_bytes = found[0]["Int8()"]["bytes"].num_raw
    assert exact["bytes"].num_sent == exact["bytes"].num_raw > raw_bytes  # with the step metadata
    for wire in map(repr, WIRES):
        results = [one[wire] for one in found]
        for name, whole in exact["total"].items():
            came = results[0]["total"][name]
            assert all(torch.equal(result["total"][name], came) for result in results), (wire, name)
            held = sum(result["held"].get(name, torch.zeros_like(came)) for result in results)
            torch.testing.assert_close(
                came + held,
                whole,
                rtol=0.0,
                atol=2e-2 * float(whole.abs().max()),
                msg=lambda text, wire=wire, name=name: f"{wire} {name}: {text}",
            )
        sent = [result["bytes"] for result in results]
        assert all(one == sent[0] for one in sent)
        assert wire == "Raw()" or sent[0].num_raw == raw_bytes
    share = {wire: found[0][wire]["bytes"].num_sent / raw_bytes for wire in map(repr, WIRES)}
    gathered = replicas / 2  # what a gather sends more than a sum
    assert share["Cast(dtype='bf16', feedback=True)"] == pytest.approx(0.5, rel=1e-3)
    assert share["Int8()"] < (0.27 if replicas == 2 else 0.3)
    assert share["OneBit()"] < (1 / 28 if replicas == 2 else 1 / 25)
    assert share["TopK(ratio=0.1)"] == pytest.approx(0.1 * gathered, rel=0.1)
    assert share["PowerSGD(rank=2)"] < 0.12
    assert share["Sparse()"] < 0.4
