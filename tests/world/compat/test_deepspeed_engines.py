"""Programs of DeepSpeed with several engines that train in turn; the oracle is a loop of plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import programs
from programs import PACELINE

MODELS = """\
torch.manual_seed(0)
x = torch.randn(480, 4)
noise = torch.randn(480, 2)
maker = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 4))
judge = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
"""

# The judge takes two losses for each micro-batch, in two micro-batches; the maker's loss goes through the judge.
PROGRAM = f"""\
import argparse
import json

import torch
from torch import nn
from torch.nn.functional import softplus

import deepspeed

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, default=0)
parser.add_argument("--first", type=int, default=0)
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--precision", default="")
parser.add_argument("--save", action="store_true")
args = parser.parse_args()
deepspeed.init_distributed()
rank, world = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
{MODELS}

def config(rate, *, size, count, clip):
    found = {{"train_batch_size": size, "gradient_accumulation_steps": count, "gradient_clipping": clip}}
    found["optimizer"] = {{"type": "Adam", "params": {{"lr": rate}}}}
    found["zero_optimization"] = {{"stage": args.stage}}
    if args.precision:
        found[args.precision] = {{"enabled": True}}
        if args.precision == "fp16":
            found["fp16"]["initial_scale_power"] = 8
    return found


warm = {{"type": "WarmupLR", "params": {{"warmup_max_lr": 0.05, "warmup_num_steps": 4, "warmup_type": "linear"}}}}
of_judge = config(0.05, size=16, count=2, clip=0.3) | {{"scheduler": warm}}
J, *_ = deepspeed.initialize(model=judge, model_parameters=judge.parameters(), config=of_judge)
of_maker = config(0.02, size=8, count=1, clip=0.1)
M, *_ = deepspeed.initialize(model=maker, model_parameters=maker.parameters(), config=of_maker)
if args.first:
    _, judges = J.load_checkpoint("saved", tag="judge")
    _, makers = M.load_checkpoint("saved", tag="maker")
    assert judges["who"] == "judge" and makers["at"] == args.first
losses = []
for step in range(args.first, args.first + args.steps):
    own = []
    for part in range(2):
        width = 8 // world
        at = (step * 2 + part) * 8 + rank * width
        made = M(noise[at : at + width])
        real, fake = softplus(-J(x[at : at + width])).mean(), softplus(J(made.detach())).mean()
        assert J.is_gradient_accumulation_boundary() == (part == 1)
        J.backward(real)
        J.backward(fake)
        J.step()
        own.append(float(real + fake))
    judge.requires_grad_(False)
    loss = softplus(-J(made)).mean()
    M.backward(loss)
    M.step()
    judge.requires_grad_(True)
    both = torch.tensor([sum(own) / 2, float(loss)], dtype=torch.float64)
    torch.distributed.all_reduce(both)
    losses.append((both / world).tolist())
    if args.save and step == args.first + args.steps - 2:
        J.save_checkpoint("saved", tag="older")
if args.save:
    J.save_checkpoint("saved", tag="judge", client_state={{"who": "judge"}})
    M.save_checkpoint("saved", tag="maker", client_state={{"at": step + 1}})
assert (J.global_steps, M.global_steps, J.global_samples) == (step + 1, step + 1, 16 * (step + 1))
assert J.train_batch_size() == 16 and M.train_batch_size() == 8
if rank == 0:
    print("found " + json.dumps({{"losses": losses, "rates": J.get_lr() + M.get_lr()}}), flush=True)
"""


def reference(steps: int) -> list[list[float]]:
    """The losses of whole batches, in one process, by torch alone."""
    place: dict[str, Any] = {"torch": torch, "nn": nn}
    exec(MODELS, place)
    x, noise, maker, judge = (place[name] for name in ("x", "noise", "maker", "judge"))
    of_judge = torch.optim.AdamW(judge.parameters(), lr=0.05, weight_decay=0.0)
    of_maker = torch.optim.AdamW(maker.parameters(), lr=0.02, weight_decay=0.0)
    softplus = nn.functional.softplus
    losses = list[list[float]]()
    for step in range(steps):
        of_judge.zero_grad()
        of_judge.param_groups[0]["lr"] = 0.05 * max(0, step - 1) / 4  # the schedule begins after the first step
        total, made = 0.0, torch.empty(0)
        for part in range(2):
            at = (step * 2 + part) * 8
            made = maker(noise[at : at + 8])
            loss = (softplus(-judge(x[at : at + 8])).mean() + softplus(judge(made.detach())).mean()) / 2
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(judge.parameters(), 0.3)
        of_judge.step()
        of_maker.zero_grad()
        loss = softplus(-judge(made)).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(maker.parameters(), 0.1)
        of_maker.step()
        losses.append([total, loss.item()])
    return losses


def run(folder: Path, *words: str, workers: int = 2) -> dict[str, Any]:
    (folder / "train.py").write_text(PROGRAM)
    start = ("run", "--as", "deepspeed", "--workers", str(workers), "train.py", *words)
    code, output = programs.run(*PACELINE, *start, cwd=folder)
    assert code == 0, output
    (line,) = (line for line in output.splitlines() if line.startswith("found "))
    return json.loads(line.removeprefix("found "))


def require_close(found: dict[str, Any], expected: list[list[float]], rel: float = 1e-5) -> None:
    for ours, theirs in zip(found["losses"], expected, strict=True):
        assert ours == pytest.approx(theirs, rel=rel)


@pytest.mark.parametrize("stage", [0, 2])
def test_two_engines_that_train_in_turn_have_the_losses_of_whole_batches(tmp_path: Path, stage: int) -> None:
    require_close(run(tmp_path, "--stage", str(stage), "--steps", "5"), reference(5))


@pytest.mark.further
@pytest.mark.parametrize("stage", [1, 3])
def test_so_they_have_under_stages_1_and_3(tmp_path: Path, stage: int) -> None:
    require_close(run(tmp_path, "--stage", str(stage), "--steps", "5"), reference(5))


@pytest.mark.further
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_half_precision_their_losses_are_near(tmp_path: Path, precision: str) -> None:
    require_close(run(tmp_path, "--precision", precision), reference(3), rel=0.03)


@pytest.mark.further
def test_each_goes_on_from_its_own_checkpoint_on_other_workers_and_another_stage(tmp_path: Path) -> None:
    run(tmp_path, "--stage", "2", "--save")
    found = run(tmp_path, "--first", "3", "--steps", "2", workers=1)
    require_close(found, reference(5)[3:])


WITH_STATISTICS = """\
import torch
from torch import nn
import deepspeed

deepspeed.init_distributed()
rank = deepspeed.comm.get_rank()
torch.manual_seed(0)
maker, judge = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)), nn.Linear(4, 1)
config = {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
J, *_ = deepspeed.initialize(model=judge, model_parameters=judge.parameters(), config=config)
M, *_ = deepspeed.initialize(model=maker, model_parameters=maker.parameters(), config=config)
own = torch.zeros(4)
for step in range(3):
    made = maker(torch.randn(4, 2, generator=torch.Generator().manual_seed(2 * step + rank)))
    own = maker[1].running_mean.clone()
    J.backward(judge(made.detach()).square().mean())
    J.step()
    M.backward(judge(made).mean())
    M.step()
means = [torch.empty(4) for _ in range(2)]
torch.distributed.all_gather(means, own)
torch.testing.assert_close(maker[1].running_mean, (means[0] + means[1]) / 2)
print("found equal", rank)
"""


@pytest.mark.further
def test_running_statistics_are_the_mean_of_the_workers_and_a_waiting_graph_is_whole(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WITH_STATISTICS)
    code, output = programs.run(*PACELINE, "run", "--as", "deepspeed", "--workers", "2", "train.py", cwd=tmp_path)
    assert code == 0, output
    assert "found equal 0" in output


# Engines of one program, each beside a copy of its model that plain torch trains on whole batches.
BESIDE_TORCH = """\
import argparse
import copy
import json

import torch
from torch import nn

import deepspeed

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, default=0)
args = parser.parse_args()
deepspeed.init_distributed()
rank, world = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
torch.manual_seed(0)
x = torch.randn(4, 8, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.head, self.extra = nn.Linear(8, 2), nn.Linear(4, 2)

    def forward(self, x, *, has_extra):
        made = self.head(self.body(x))
        return made + self.extra(x) if has_extra else made


config = {
    "train_batch_size": 8,
    "gradient_clipping": 0.05,
    "zero_optimization": {"stage": args.stage},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1}},
}
nets = {name: Net() for name in ("thawed", "frozen", "outside", "hooked", "unused")}
nets["thawed"].body.requires_grad_(False)
nets["frozen"].requires_grad_(False)
ours, theirs = {}, {}
for name, net in nets.items():
    copied = copy.deepcopy(net)
    if name == "hooked":
        for one in (net, copied):
            one.head.bias.register_hook(lambda gradient: gradient + 1.0)
    given = [list((one.head if name == "outside" else one).parameters()) for one in (net, copied)]
    theirs[name] = copied, torch.optim.AdamW(given[1], lr=0.05, weight_decay=0.1)
    ours[name], *_ = deepspeed.initialize(model=net, model_parameters=given[0], config=config)
for step, batch in enumerate(x):
    own = batch.chunk(world)[rank]
    for name, engine in ours.items():
        has_extra = name != "unused" or step == 1
        copied, optimizer = theirs[name]
        for one in (engine.module, copied) if step == {"thawed": 2, "frozen": 0}.get(name) else ():
            one.requires_grad_(True)
        loss = engine(own, has_extra=has_extra).square().mean()
        engine.backward(loss)
        engine.step()
        copied.zero_grad()
        copied(batch, has_extra=has_extra).square().mean().backward()
        nn.utils.clip_grad_norm_(copied.parameters(), 0.05)
        optimizer.step()
found = {}
for name, engine in ours.items():
    held = engine.module_state_dict()
    if rank == 0:
        found[name] = max(float((held[key] - one).abs().max()) for key, one in theirs[name][0].state_dict().items())
if rank == 0:
    print("found " + json.dumps(found), flush=True)
"""


def require_weights_of_torch(folder: Path, stage: int) -> None:
    """Each engine's model gets the weights of torch's: thawed, hooked, unused, and outside of the optimizer."""
    (folder / "train.py").write_text(BESIDE_TORCH)
    start = ("run", "--as", "deepspeed", "--workers", "2", "train.py", "--stage", str(stage))
    code, output = programs.run(*PACELINE, *start, cwd=folder)
    assert code == 0, output
    (line,) = (line for line in output.splitlines() if line.startswith("found "))
    differences = json.loads(line.removeprefix("found "))
    assert len(differences) == 5
    assert differences == pytest.approx(dict.fromkeys(differences, 0.0), abs=1e-5)


@pytest.mark.parametrize("stage", [0, 2])
def test_what_is_thawed_hooked_unused_or_outside_of_the_optimizer_trains_as_in_torch(
    tmp_path: Path, stage: int
) -> None:
    require_weights_of_torch(tmp_path, stage)


@pytest.mark.further
@pytest.mark.parametrize("stage", [1, 3])
def test_so_it_does_under_stages_1_and_3(tmp_path: Path, stage: int) -> None:
    require_weights_of_torch(tmp_path, stage)


TIED_BEFORE = """\
import torch
from torch import nn

import deepspeed

first, second = nn.Linear(4, 4), nn.Linear(4, 4)
second.weight = first.weight
config = {
    "train_batch_size": 8,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}
deepspeed.initialize(model=first, model_parameters=first.parameters(), config=config)
deepspeed.initialize(model=second, model_parameters=second.parameters(), config=config)
"""


def test_a_weight_that_two_engines_had_before_it_was_sharded_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TIED_BEFORE)
    code, output = programs.run(*PACELINE, "run", "--as", "deepspeed", "--workers", "2", "train.py", cwd=tmp_path)
    assert code == 2, output
    assert "another engine that trains, whose weight is another engine's, too" in output
