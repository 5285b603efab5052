"""A training program whose workers are lost at chosen points of chosen steps; faults fire once, at steps, not at times.

Where they may be lost: `doomed`.

OPTIONS  JSON: plan, and fields of the Job; pause_s: after each step; gate: after this step wait for the file
         "open"; whole: [step, workers], after this step (0: after each) wait until so many are there, or are
         to be; turns: replicas do not wait for each other, so there is no schedule; loops: over batches, all
         but the last one over one epoch; averages: the workers average a tensor after each step; hooked:
         gradients are clamped by hooks, and an average of the weights is kept; way: of a device's tensors,
         which the host's take here
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import device_ways
import paceline
from paceline import Plan
from paceline.checkpoint.async_writer import AsyncWriter
from scheduled_kills import FAULTS, OPTIONS, arm, fault, left

WIDTH = int(OPTIONS.get("width", 32))
LOOK_S = 0.02  # nothing tells a program that a file is there, or that others are about to join
SAMPLES = 90  # of an epoch: the last step of each is short


class Digits(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, worker: paceline.Worker) -> None:
        self._worker = worker

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        fault(self._worker, "data")
        numbers = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return numbers, numbers.argmax()


class Net(nn.Module):
    """With everything whose state must survive: statistics, dropout."""

    def __init__(self) -> None:
        super().__init__()
        # No bias before the norm: its gradient is nothing but rounding, which Adam would make as large as all others.
        first = nn.Linear(8, WIDTH, bias=False)
        self.layers = nn.Sequential(first, nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.2), nn.Linear(WIDTH, 8))

    def forward(self, numbers: Tensor) -> Tensor:
        return self.layers(numbers)


def enumerate_state(optim: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    """The optimizer's tensors, in the order of its parameters."""
    parameters = [parameter for group in optim.param_groups for parameter in group["params"]]
    return [
        (f"{number}.{name}", value)
        for number, parameter in enumerate(parameters)
        for name, value in sorted(optim.state[parameter].items())
    ]


def lacks(worker: paceline.Worker, whole: int) -> bool:
    """Whether there are fewer workers, and none is announced to join at the next place where that can be: who reports
    after an announcement joins at the place after that, however long this one is waited at."""
    consensus: Any = worker._consensus
    return len(consensus.ranks) < whole and consensus._coordinator.planned(consensus.generation) is None


def _in_backward(worker: paceline.Worker, _: torch.nn.Module, __: Any, output: torch.Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda _: fault(worker, "backward"))


def train(worker: paceline.Worker) -> str:
    if FAULTS:
        arm(worker, sums=("gradients", "layers"), save=(AsyncWriter, "_write"))
    if OPTIONS.get("no_joins") and worker._consensus.is_newcomer:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.manual_seed(1)
    model = worker.prepare(Net())
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
    schedule = None
    if not OPTIONS.get("turns"):
        schedule = worker.prepare(torch.optim.lr_scheduler.StepLR(optim, step_size=5, gamma=0.9))
    average = worker.prepare(paceline.ExponentialMovingAverage(model, decay=0.8)) if OPTIONS.get("hooked") else None
    if average is not None:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
    words = worker.gather(f"from {worker.rank}")[0]
    step = worker.stepper(model, optim, F.cross_entropy, clip_norm=1.0)
    model.register_forward_pre_hook(lambda *_: fault(worker, "forward"))
    model.register_forward_hook(functools.partial(_in_backward, worker))
    if words != "from 0":
        raise ValueError(f"the first worker gave {words}")
    pause_s = float(OPTIONS.get("pause_s", 0))
    whole_at, num_whole = OPTIONS.get("whole", (None, 0))
    num_short = int(OPTIONS.get("loops", 1)) - 1
    loops = (worker.batches(Digits(worker), epochs=epochs) for epochs in [1] * num_short + [1000])
    for batch in itertools.chain.from_iterable(loops):
        if OPTIONS.get("plain"):
            for x, y in batch:
                worker.backward(F.cross_entropy(model(x), y))
            optim.step()
        else:
            step(batch)
        if schedule is not None:
            schedule.step()
        if OPTIONS.get("averages"):
            fault(worker, "average")
            if worker.average(torch.full((4,), worker.step / 2)).tolist() != [worker.step / 2] * 4:
                raise ValueError("an average that was given up half way counts")
        if average is not None:
            average.update()
        time.sleep(pause_s)
        while worker.step == OPTIONS.get("gate") and not left("open").exists():
            time.sleep(LOOK_S)
        while whole_at in (0, worker.step) and lacks(worker, num_whole):
            time.sleep(LOOK_S)
        if worker.step % 4 == 0 or OPTIONS.get("turns"):  # in turns nobody knows who has which step
            fault(worker, "evaluate")
        if worker.step % 4 == 0:
            result = worker.evaluate(model, Digits(worker), F.cross_entropy)
            worker.report(held_out=result["loss"])
    averages: dict[str, Tensor] = {}
    state = {**model.state_dict(), **(dict(enumerate_state(optim)) if not worker.plan.is_local else {})}
    if average is not None:
        with average.swapped_in():
            averages = {name: one.detach().clone() for name, one in model.named_parameters()}
        state |= {f"average {name}": one for name, one in averages.items()}
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in state.values())).hexdigest()
    total = sum(float(value.double().abs().sum()) for value in (*model.parameters(), *averages.values()))
    sums = worker.gather((worker.rank, (digest, total)))
    if worker.is_first:
        left("weights.json").write_text(json.dumps(sums))
    return "done"


if __name__ == "__main__":
    job = {"max_steps": 12, "workers": 4, "save_every": 3, "tensorboard": False, **OPTIONS.get("job", {})}
    sys.setswitchinterval(0.001)
    if "way" in OPTIONS:
        device_ways.have_workers_pretend(train, OPTIONS["way"])
    paceline.run(
        train,
        plan=Plan.parse(OPTIONS.get("plan", "replicas=2-4+batch(size=20,micro=2)+compute(precision=fp64)")),
        **job,
    )
