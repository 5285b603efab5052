"""A training program whose workers are lost at chosen points of chosen steps; faults fire once, at steps, not at times.

FAULTS   JSON: a list of {"worker": 2, "step": 5, "where": "forward", "signal": 9}; where: data, forward, backward,
         sum (its part of the gradients is handed over), vote (it has the sum, others may not know), committed,
         evaluate, save (the writer of the checkpoint, in the middle), regroup (during the recovery from another);
         with "whom": "supervisor" it is the supervisor that is killed, by that worker
OPTIONS  JSON: plan, and fields of the Job; pause_s: after each step; gate: after this step wait for the file "open"
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline
from paceline import Plan
from paceline.checkpoint.writer import Writer
from paceline.comm.generation import Members
from paceline.worker import place
from paceline.worker.agreement import Agreement

FAULTS: list[dict[str, Any]] = json.loads(os.environ.get("FAULTS", "[]"))
OPTIONS: dict[str, Any] = json.loads(os.environ.get("OPTIONS", "{}"))
WIDTH = int(OPTIONS.get("width", 32))
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


def fault(worker: paceline.Worker, where: str) -> None:
    """Be lost, where this worker's hour has come."""
    for number, one in enumerate(FAULTS):
        marker = Path(os.environ["FAULT_DIR"]) / f"fault_{number}"
        is_due = one["where"] == where and one["worker"] == worker.rank and worker.step + 1 >= one["step"]
        if is_due and not marker.exists():
            marker.write_text(f"{worker.step} {time.time()}")
            whom = os.getpid() if one.get("whom") != "supervisor" else supervisor()
            os.kill(whom, one.get("signal", signal.SIGKILL))


def supervisor() -> int:
    """The process number of whoever keeps the run's record."""
    return int(json.loads(Path(OPTIONS["job"]["run_dir"], "run.json").read_text())["pid"])


def arm(worker: paceline.Worker) -> None:
    """Put the faults where only Paceline itself comes by."""
    plain_sum, plain_vote, plain_write, plain_assemble = (
        Members.all_reduce,
        Agreement.vote,
        Writer._write,
        place.assemble,
    )

    def all_reduce(self: Members, tensor: Tensor, *, what: str) -> Any:
        transfer = plain_sum(self, tensor, what=what)
        if "gradients" in what or "layers" in what:
            fault(worker, "sum")
        return transfer

    def vote(self: Agreement) -> bool:
        fault(worker, "vote")
        passed = plain_vote(self)
        fault(worker, "committed")
        return passed

    def write(self: Writer, save: Any) -> Any:
        fault(worker, "save")
        return plain_write(self, save)

    def assemble(*args: Any, **fields: Any) -> Any:
        fault(worker, "regroup")
        return plain_assemble(*args, **fields)

    Members.all_reduce, Agreement.vote, Writer._write, place.assemble = all_reduce, vote, write, assemble  # type: ignore[method-assign,assignment]


def train(worker: paceline.Worker) -> str:
    if FAULTS:
        arm(worker)
    if OPTIONS.get("no_joins") and worker._agreement.is_newcomer:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.manual_seed(1)
    model = worker.prepare(Net())
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
    schedule = worker.prepare(torch.optim.lr_scheduler.StepLR(optim, step_size=5, gamma=0.9))
    words = worker.broadcast([f"from {worker.rank}"])
    step = worker.stepper(model, optim, F.cross_entropy, clip_norm=1.0)
    model.register_forward_pre_hook(lambda *_: fault(worker, "forward"))
    next(model.parameters()).register_hook(lambda _: fault(worker, "backward"))
    if words != ["from 0"]:
        raise ValueError(f"the first broadcast gave {words}")
    pause_s = float(OPTIONS.get("pause_s", 0))
    for batch in worker.batches(Digits(worker), epochs=1000):
        if OPTIONS.get("plain"):
            for x, y in batch:
                worker.backward(F.cross_entropy(model(x), y))
            optim.step()
        else:
            step(batch)
        schedule.step()
        time.sleep(pause_s)
        while worker.step == OPTIONS.get("gate") and not Path(os.environ["FAULT_DIR"], "open").exists():
            time.sleep(0.02)
        if worker.step % 4 == 0:
            fault(worker, "evaluate")
            result = worker.evaluate(model, Digits(worker), F.cross_entropy)
            worker.report(held_out=result["loss"])
    state = {**model.state_dict(), **dict(enumerate_state(optim))}
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in state.values())).hexdigest()
    total = sum(float(parameter.double().abs().sum()) for parameter in model.parameters())
    sums = worker.gather((worker.rank, (digest, total)))
    if worker.is_first:
        Path(os.environ["FAULT_DIR"], "weights.json").write_text(json.dumps(sums))
    return "done"


if __name__ == "__main__":
    job = {"max_steps": 12, "workers": 4, "save_every": 3, "tensorboard": False, **OPTIONS.get("job", {})}
    sys.setswitchinterval(0.001)
    paceline.run(
        train,
        plan=Plan.parse(OPTIONS.get("plan", "replicas=2-4+batch(size=20,micro=2)+compute(precision=fp64)")),
        **job,
    )
