"""A program with two engines, a maker and a judge, has the losses here that it has under DeepSpeed itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspeed_runs import under_deepspeed, under_paceline

pytest.importorskip("deepspeed")

STEPS = 6

# The judge has two micro-batches a step; the maker's loss goes through the judge, and has one.
PROGRAM = """\
import argparse
import json

import torch
from torch import nn
from torch.nn.functional import softplus

import deepspeed

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--stage", type=int, default=0)
parser.add_argument("--clipping-unsaid", action="store_true")
args = parser.parse_args()
deepspeed.init_distributed(dist_backend="gloo")
rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
torch.manual_seed(0)
x, noise = torch.randn(400, 4), torch.randn(400, 2)
maker = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))
judge = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def config(rate, clip, parts, **more):
    optimizer = {"type": "Adam", "params": {"lr": rate, "torch_adam": True}}
    sizes = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": parts}
    sizes |= {} if args.clipping_unsaid else {"gradient_clipping": clip}
    zero = {"zero_optimization": {"stage": args.stage}, "zero_allow_untested_optimizer": True}
    return {**sizes, **zero, "optimizer": optimizer, **more}


warm = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 4, "warmup_type": "linear"}}
of_judge, of_maker = config(0.02, 0.5, 2, scheduler=warm), config(0.05, 0.1, 1)
J, *_ = deepspeed.initialize(model=judge, model_parameters=judge.parameters(), config=of_judge)
M, *_ = deepspeed.initialize(model=maker, model_parameters=maker.parameters(), config=of_maker)
factor = 30.0 if args.clipping_unsaid else 1.0  # norms above the 1.0 to which is clipped then
losses = []
for step in range(STEPS):
    for part in range(2):
        at = ((step * 2 + part) * world + rank) * 4
        made = M(noise[at : at + 4])
        loss = softplus(-J(x[at : at + 4])).mean() + softplus(J(made.detach())).mean()
        J.backward(factor * loss)
        J.step()
        losses.append(loss.item())
    judge.requires_grad_(False)
    loss = softplus(-judge(M(noise[at : at + 4]))).mean()
    M.backward(factor * loss)
    M.step()
    judge.requires_grad_(True)
    losses.append(loss.item())
norms = [float(one.get_global_grad_norm() or 0) for one in (J, M)]
if rank == 0:
    print("found " + json.dumps({"losses": losses, "norms": norms, "rates": J.get_lr() + M.get_lr()}), flush=True)
"""


@pytest.mark.parametrize(("stage", "more"), [(0, ()), (1, ()), (2, ()), (0, ("--clipping-unsaid",))])
def test_two_engines_have_the_losses_that_they_have_under_deepspeed(
    tmp_path: Path, stage: int, more: tuple[str, ...]
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM.replace("STEPS", str(STEPS)))
    words = ("--stage", str(stage), *more)
    theirs, ours = under_deepspeed(tmp_path, *words), under_paceline(tmp_path, *words)
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
    assert ours["rates"] == pytest.approx(theirs["rates"], rel=1e-9)
    if stage:  # at stage 0 in fp32 DeepSpeed does not keep the norm
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-4)
