"""A training program for replicas of several workers, which are lost at chosen points of chosen steps; each fault once.

Where they may be lost: `doomed`.

OPTIONS  JSON: plan, and fields of the Job; pause_s: after each step; no_joins: newcomers fail; routed: with experts;
         averages: the workers average a tensor after each step; gate: after this step wait for the file "open"
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import device_ways
import paceline
from paceline import Plan
from paceline.checkpoint.sharded_writer import WriterGroup
from paceline.comm.sharded_tensors import local_part
from scheduled_kills import FAULTS, OPTIONS, arm, fault, left

WORDS, LENGTH, WIDTH, INNER, SAMPLES = 23, 6, 8, 31, 54  # parts are uneven, and the last step of an epoch is short


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).split(width, dim=2)
        q, k, v = (part.view(samples, length, 2, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Experts(nn.ModuleList):
    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self):
            rows, slot = torch.where(index == number)
            out = out.index_add(0, rows, expert(tokens[rows]) * weights[rows, slot, None])
        return out


class Routed(nn.Module):
    """With experts of each kind: modules of their own, and rows of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
        self.experts, self.gains = Experts(nn.Linear(WIDTH, WIDTH) for _ in range(4)), Gains()

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weights, index = self.router(tokens).softmax(1).topk(2, dim=1)
        return x + (self.experts(tokens, index, weights) + self.gains(tokens, index, weights)).view_as(x)


class Gains(nn.Module):
    num_experts = 4

    def __init__(self) -> None:
        super().__init__()
        self.of_each = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return tokens * (self.of_each[index] * weights[..., None]).sum(1)


class Net(nn.Module):
    """With tied weights, and a buffer that changes."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Routed() if OPTIONS.get("routed") else Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, words: Tensor) -> Tensor:
        if self.training:
            self.seen.mul_(0.9).add_(0.1 * words.float().mean())
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_word(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def arm_model(worker: paceline.Worker, model: nn.Module) -> None:
    """Have the faults of a step's own work come after norms, of which each worker has some in every layout."""

    def after(module: nn.Module, given: Any, output: Tensor) -> None:
        fault(worker, "forward")
        if output.requires_grad:
            output.register_hook(lambda _: fault(worker, "backward"))

    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.register_forward_hook(after)


def train(worker: paceline.Worker) -> None:
    if OPTIONS.get("no_joins") and worker._consensus.is_newcomer:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.manual_seed(1)
    words = torch.randint(WORDS, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    data = TensorDataset(words[:, :-1], words[:, 1:])
    net = Net()
    if FAULTS:
        arm(worker, sums=("metadata", "gradients"), save=(WriterGroup, "tell"))
        arm_model(worker, net)
    model = worker.prepare(net)
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
    schedule = worker.prepare(torch.optim.lr_scheduler.StepLR(optim, step_size=5, gamma=0.9))
    if worker.gather(f"from {worker.rank}")[0] != "from 0":
        raise ValueError("the first worker gave something else")
    if worker.plan.layout.is_elastic:
        with contextlib.suppress(RuntimeError):
            torch.distributed.barrier()
            raise ValueError("a barrier of one replica passed for one of the whole run")
    step = worker.stepper(model, optim, next_word, clip_norm=1.0)
    for batch in worker.batches(data, epochs=1000):
        step(batch)
        schedule.step()
        if OPTIONS.get("averages"):
            fault(worker, "average")
            if worker.average(torch.full((4,), worker.step / 2)).tolist() != [worker.step / 2] * 4:
                raise ValueError("an average that was given up half way counts")
        if worker.step % 4 == 0:
            fault(worker, "evaluate")
            worker.report(held_out=worker.evaluate(model, data, next_word)["loss"])
        time.sleep(float(OPTIONS.get("pause_s", 0)))
        while worker.step == OPTIONS.get("gate") and not left("open").exists():
            snapshots = worker._memory_checkpointer._checkpoint
            if snapshots is not None and snapshots.is_replicated:
                left(f"arrived_{worker.rank}").touch()  # the newest one is on the neighbor host too
            time.sleep(0.02)
    here = [tensor for tensor in [*model.parameters(), *model.buffers()] if not tensor.is_meta]
    if not worker.plan.is_local:  # otherwise each replica has its own
        here += [value for state in optim.state.values() for value in state.values()]
    digest = hashlib.sha256(b"".join(local_part(tensor).numpy().tobytes() for tensor in here)).hexdigest()
    told = worker.gather((worker.rank, digest))
    if worker.is_first:
        left("weights.json").write_text(json.dumps(told))


if __name__ == "__main__":
    job = {"max_steps": 12, "workers": 4, "save_every": 3, "tensorboard": False, **OPTIONS.get("job", {})}
    if "way" in OPTIONS:
        device_ways.have_workers_pretend(train, OPTIONS["way"])
    paceline.run(train, plan=Plan.parse(OPTIONS["plan"]), **job)
