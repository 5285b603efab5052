"""One program under DeepSpeed itself and under Paceline has the same losses; DeepSpeed's checkpoints are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_runs import under_deepspeed, under_paceline
from paceline.compat.deepspeed_files.checkpoint_reading import read_deepspeed_checkpoint

pytest.importorskip("deepspeed")

PROGRAM = """\
import argparse
import json
import sys

import torch
from torch import nn

import deepspeed
from deepspeed.utils import RepeatingLoader

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--save", default="")
args = parser.parse_args()
deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
x = torch.randn(200, 6)
data = torch.utils.data.TensorDataset(x, x[:, :3].argmax(dim=1))
net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Sequential(nn.Linear(12, 12), nn.Tanh()), nn.Linear(12, 3))
parameters = [one for one in net.parameters() if one.requires_grad]
engine, _, loader, _ = deepspeed.initialize(args=args, model=net, model_parameters=parameters, training_data=data)
micros = iter(RepeatingLoader(loader))
losses, rates, norms = [], [], []
for _ in range(8):
    for _ in range(engine.gradient_accumulation_steps()):
        inputs, target = next(micros)
        loss = nn.functional.cross_entropy(engine(inputs), target)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    rates.append(engine.get_lr()[0])
assert engine.global_steps == 8
if args.save:
    engine.save_checkpoint(args.save, client_state={"note": "kept"})
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    kept = {}
    for name, one in net.named_parameters():
        whole = one.detach() if engine.zero_optimization_stage() == 0 else safe_get_full_fp32_param(one)
        state = engine.optimizer.state[one]["exp_avg"] if engine.zero_optimization_stage() == 0 else None
        state = safe_get_full_optimizer_state(one, "exp_avg") if state is None else state
        kept[name] = (whole.clone(), state.clone())
    if engine.global_rank == 0:
        torch.save(kept, args.save + ".pt")
if engine.global_rank == 0:
    print("found " + json.dumps({"losses": losses, "rates": rates}), flush=True)
"""

SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_max_lr": 0.02, "warmup_num_steps": 4},
    "WarmupDecayLR": {"warmup_max_lr": 0.02, "warmup_num_steps": 3, "total_num_steps": 6, "warmup_type": "linear"},
    "WarmupCosineLR": {"warmup_num_steps": 3, "total_num_steps": 6},
    "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.05, "cycle_first_step_size": 3, "decay_step_size": 1},
    "LRRangeTest": {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 3, "lr_range_test_staircase": True},
}


CONFIGURED = ("--deepspeed_config", "ds.json")


def write(folder: Path, stage: int, schedule: str) -> None:
    table = {
        "train_batch_size": 24,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.3,
        "optimizer": {"type": "Adam", "params": {"lr": 0.02, "torch_adam": True, "weight_decay": 0.01}},
        "scheduler": {"type": schedule, "params": SCHEDULES[schedule]},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    (folder / "ds.json").write_text(json.dumps(table))
    (folder / "train.py").write_text(PROGRAM)


@pytest.mark.parametrize(("stage", "schedule"), list(zip((0, 1, 2, 3, 0), SCHEDULES, strict=True)))
def test_an_unmodified_program_has_the_losses_that_it_has_under_deepspeed(
    tmp_path: Path, stage: int, schedule: str
) -> None:
    write(tmp_path, stage, schedule)
    theirs, ours = under_deepspeed(tmp_path, *CONFIGURED), under_paceline(tmp_path, *CONFIGURED)
    assert ours["rates"] == pytest.approx(theirs["rates"], rel=1e-9)
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_checkpoint_of_deepspeed_is_read_to_the_last_bit(tmp_path: Path, stage: int) -> None:
    write(tmp_path, stage, "WarmupLR")
    under_deepspeed(tmp_path, *CONFIGURED, "--save", "saved")
    found = read_deepspeed_checkpoint(tmp_path / "saved")
    kept = torch.load(tmp_path / "saved.pt")
    assert set(kept) == set(found.weights) == set(found.optimizer)
    for name, (weight, moment) in kept.items():
        assert torch.equal(found.weights[name], weight), name
        assert torch.equal(found.optimizer[name]["exp_avg"], moment), name
    assert (found.step, found.stage, found.client_state["note"]) == (8, stage, "kept")
