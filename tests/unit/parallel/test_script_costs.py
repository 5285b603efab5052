"""What an inspection finds of models too large to run here, of optimizers, and of frozen layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.parallel.check import model_check
from paceline.parallel.check.model_check import check_model
from paceline.parallel.check.model_hints import ModelHints
from paceline.parallel.meta.fake_weights import fake_weights, filled_weights
from paceline.plan import CommandPlan, Plan
from paceline.worker.script_inspection import InspectionReport, inspect_script

SCRIPT = """
import paceline, torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

WIDTH, BLOCKS = {width}, {blocks}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (8, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(96, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 96, bias=False)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(worker):
    model = Language()
    {change}
    model = worker.prepare(model)
    optim = worker.prepare({optimizer})
    step = worker.stepper(model, optim, lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()))
    data = torch.zeros(8, 16, dtype=torch.long)
    for batch in worker.batches(TensorDataset(data, data)):
        step(batch)


paceline.run(train, plan="batch(size=8)")
"""
ADAM = "torch.optim.AdamW(model.parameters())"


def look(
    tmp_path: Path,
    plan: str = "batch(size=8)",
    *,
    width: int = 32,
    blocks: int = 2,
    change: str = "pass",
    optimizer: str = ADAM,
) -> InspectionReport:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(width=width, blocks=blocks, change=change, optimizer=optimizer))
    return inspect_script(script, args=(), plan=CommandPlan(whole=Plan.parse(plan)), workers=None)


@pytest.mark.parametrize(
    ("optimizer", "each"),
    [
        (ADAM, 8.0),
        ("torch.optim.SGD(model.parameters(), lr=0.1)", 0.0),
        ("torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)", 4.0),
    ],
)
def test_the_state_of_a_parameter_is_that_of_the_scripts_optimizer(tmp_path: Path, optimizer: str, each: float) -> None:
    costs = look(tmp_path, optimizer=optimizer).costs["model"]
    assert costs.optimizer_bytes == pytest.approx(each, abs=0.01)  # Adam counts its steps, too


def test_frozen_layers_are_known_from_the_script(tmp_path: Path) -> None:
    change = "model.requires_grad_(False).head.requires_grad_(True)"
    costs = look(tmp_path, change=change).costs["model"]
    assert (costs.trained, costs.parameters > 10 * costs.trained) == (96 * 32, True)
    assert costs.optimizer_bytes == pytest.approx(8, abs=0.01)
    assert not any(block.needs_backward for block in costs.blocks)
    head = 2 * 16 * 32 * 96
    assert costs.model_flops(1) < look(tmp_path).costs["model"].model_flops(1) / 2
    forward = sum(block.count * layer.flops(1) for block in costs.blocks for layer in block.matmuls)
    attention = sum(block.count * block.attention.flops(1) / 2 for block in costs.blocks if block.attention)
    assert costs.model_flops(1) == forward + attention + 2 * head  # forward, and the gradient of the head's weights


@pytest.mark.thorough
@pytest.mark.parametrize("plan", ["tensor=4", "tensor=2+stages=2", "replicas=2+context=2"])
def test_a_model_too_large_to_run_is_checked_by_its_shapes_in_no_time(tmp_path: Path, plan: str) -> None:
    """A block of it has 12 billion parameters: one forward would take minutes, and its comparison 100 GB."""
    found = look(tmp_path, f"{plan}+batch(size=8)", width=1 << 15, blocks=4)
    assert not found.refusals
    assert found.costs["model"].parameters > 5e10
    assert any("is too large to run here" in one.what for one in found.remarks)
    assert found.sizes["model"][0].parameters < 4 * 5.2e10 * (1.0 if "context" in plan else 0.3)


@pytest.mark.thorough
def test_a_model_too_large_to_run_is_refused_what_does_not_divide(tmp_path: Path) -> None:
    found = look(tmp_path, "tensor=3+batch(size=9)", width=1 << 15, blocks=4)
    assert "the 8 heads of blocks.*.v do not divide among 3 workers" in found.refusals[0].what


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


@pytest.mark.thorough
@pytest.mark.parametrize("sample", [None, (torch.zeros(4, 32),)])
def test_by_shapes_the_same_layers_are_split(sample: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_weights():
        model = nn.Sequential(Block(), Block())
    plan, hints = Plan.parse("tensor=2+stages=2+batch(size=8)"), ModelHints(sample=sample)
    plain = check_model(model, plan, device=torch.device("cpu"), hints=hints, fill=filled_weights)
    monkeypatch.setattr(model_check, "MOST_RUN", 0)
    shaped = check_model(model, plan, device=torch.device("cpu"), hints=hints, fill=filled_weights)
    assert (plain.is_verified, shaped.is_verified) == (True, False)
    assert plain.tensor is not None
    assert shaped.tensor is not None
    assert plain.tensor.layers == shaped.tensor.layers
    assert plain.stages is not None
    assert shaped.stages is not None
    assert plain.stages.partition.stages == shaped.stages.partition.stages
    assert all(one.is_meta for one in model.parameters())


def test_weights_of_many_experts_in_one_parameter_take_no_memory() -> None:
    former = torch.empty
    with fake_weights():
        weight = nn.Parameter(torch.empty(1 << 10, 1 << 13, 1 << 14))  # half a terabyte
        small, data = torch.empty(4, 4), torch.empty((2, 3))
    assert (weight.is_meta, weight.requires_grad) == (True, True)
    assert not small.is_meta
    assert data.shape == (2, 3)
    assert torch.empty is former


def test_fits_answers_for_a_model_too_large_to_run() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1 << 17, 1 << 17, bias=False) for _ in range(2)))
    found = paceline.fits(model, "tensor=2+batch(size=64,micro=1)", cluster="h100x8-ib")
    assert found.verdict == "does not fit"
    assert found.memory.parts["state"] > 1e11
