"""Checkpoints that DeepSpeed itself has written: each tensor is read, and a program goes on from them here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import programs
from deepspeed_runs import LIMIT_S, under_deepspeed, under_paceline
from paceline.compat.deepspeed_files.checkpoint_reading import read_deepspeed_checkpoint
from programs import PACELINE

pytest.importorskip("deepspeed")

SAVED_AT, STEPS = 4, 7

# The model has what checkpoints treat apart: a frozen parameter, tied ones, odd sizes, and buffers that are no floats.
MODEL = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, frozen=True):
        super().__init__()
        self.first = nn.Linear(6, 11)
        self.norm = nn.LayerNorm(11)
        self.fixed = nn.Linear(11, 11)
        self.back = nn.Linear(11, 11, bias=False)
        self.again = nn.Linear(11, 11, bias=False)
        self.again.weight = self.back.weight
        self.last = nn.Linear(11, 3)
        self.register_buffer("counted", torch.arange(3))
        self.fixed.requires_grad_(not frozen)

    def forward(self, x):
        x = self.norm(self.first(x).tanh())
        return self.last(self.again(self.back(self.fixed(x)).tanh()).tanh()) + 0 * self.counted


def groups(net, count):
    trained = [one for one in net.parameters() if one.requires_grad]
    if count == 1:
        return trained
    flat = {"params": [one for one in trained if one.dim() == 1], "weight_decay": 0.0}
    return [{"params": [one for one in trained if one.dim() > 1], "weight_decay": 0.1}, flat]
"""

PROGRAM = """\
import argparse
import json

import torch
from torch import nn

import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from model import Net, groups

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--stage", type=int, default=0)
parser.add_argument("--kind", default="net")
parser.add_argument("--half", default="")
parser.add_argument("--sums", default="")
parser.add_argument("--groups", type=int, default=1)
parser.add_argument("--parts", type=int, default=0)
parser.add_argument("--steps", type=int, default=0)
parser.add_argument("--save", default="")
parser.add_argument("--load", default="")
parser.add_argument("--thawed", action="store_true")
args = parser.parse_args()
deepspeed.init_distributed(dist_backend="gloo")
rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
torch.manual_seed(0)
table = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4 if args.kind == "net" else 8,
    # In a pipeline of stage 0 DeepSpeed takes the norm of the first stage's gradients alone.
    "gradient_clipping": 0.5 if args.kind == "net" or args.stage else 0.0,
    "optimizer": {"type": "Adam", "params": {"lr": 0.02, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 6}},
    "zero_optimization": {"stage": args.stage},
    "zero_allow_untested_optimizer": True,
}
if args.parts:
    table["zero_optimization"]["sub_group_size"] = args.parts
if args.sums:
    table["data_types"] = {"grad_accum_dtype": args.sums}
if args.half:
    table[args.half] = {"enabled": True}
x = torch.randn(400, 6)
y = x[:, :3].argmax(dim=1)


def out(layer, inputs):
    return inputs @ layer.weight[:, :3]


if args.kind == "net":
    net = Net(frozen=not args.thawed)
    given = groups(net, args.groups)
else:
    tied = args.kind == "tied"
    spec = LayerSpec(nn.Linear, 6, 6, bias=False)
    layers = [
        TiedLayerSpec("ends", nn.Linear, 6, 6, bias=False) if tied else spec,
        nn.Tanh(),
        LayerSpec(nn.Linear, 6, 9),
        nn.LayerNorm(9),
        LayerSpec(nn.Linear, 9, 6),
        nn.Tanh(),
        TiedLayerSpec("ends", nn.Linear, 6, 6, bias=False, forward_fn=out) if tied else LayerSpec(nn.Linear, 6, 3),
    ]
    net = PipelineModule(layers, num_stages=2, loss_fn=nn.CrossEntropyLoss(), partition_method="uniform")
    given = [one for one in net.parameters() if one.requires_grad]
engine, *_ = deepspeed.initialize(model=net, model_parameters=given, config=table)
note = None
if args.load:
    _, note = engine.load_checkpoint(args.load)
    note = note["note"]
own = next(one for one in engine.module.parameters()).dtype


def micro(number):
    return x[number : number + table["train_micro_batch_size_per_gpu"]].to(own), y[
        number : number + table["train_micro_batch_size_per_gpu"]
    ]


def step():
    start = engine.global_steps * 16
    if args.kind != "net":
        return engine.train_batch(iter([micro(start), micro(start + 8)])).item()
    losses = []
    for part in range(2):
        inputs, target = micro(start + (part * world + rank) * 4)
        loss = nn.functional.cross_entropy(engine(inputs).float(), target)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    mean = torch.stack(losses).mean().double()
    torch.distributed.all_reduce(mean)
    return mean.item() / world


def state_of(parameter):
    if args.stage or (args.half == "bf16" and args.kind != "net"):
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        found = [safe_get_full_fp32_param(parameter)]
        found += [safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")]
        return [one.detach().clone() for one in found]
    inner, master = engine.optimizer, parameter
    if args.half:
        inner, copies, rounded = inner.optimizer, inner.fp32_groups, inner.fp16_groups
        pairs = [pair for a, b in zip(rounded, copies) for pair in zip(a, b)]
        master = next(copy for value, copy in pairs if value is parameter)
    return [master.detach().clone(), *(inner.state[master][key].clone() for key in ("exp_avg", "exp_avg_sq"))]


losses = []
while engine.global_steps < args.steps:
    losses.append(step())
    if args.save and engine.global_steps == SAVED_AT:
        engine.save_checkpoint(args.save, client_state={"note": "kept"})
        if getattr(engine.optimizer, "_hp_optimizer_states_linked", False):
            engine.optimizer._hp_optimizer_states_linked = False  # it was done when one group of several had a state
            engine.optimizer._lazy_init_hp_params_optimizer_state()
        kept = {name: state_of(one) for name, one in engine.module.named_parameters() if one.requires_grad}
        torch.save(kept, f"{args.save}_{rank}.pt")
found = {"losses": losses, "rates": engine.get_lr(), "steps": engine.global_steps, "note": note}
if rank == 0:
    print("found " + json.dumps(found | {"samples": engine.global_samples}), flush=True)
"""

ALL = {
    "0": ("--stage", "0", "--thawed"),
    "0 bf16": ("--stage", "0", "--half", "bf16"),
    "0 groups": ("--stage", "0", "--thawed", "--groups", "2"),
    "1": ("--stage", "1"),
    "1 bf16": ("--stage", "1", "--half", "bf16", "--groups", "2"),
    "1 bf16, sums in fp32": ("--stage", "1", "--half", "bf16", "--sums", "fp32"),
    "2 groups": ("--stage", "2", "--groups", "2"),
    "2 bf16": ("--stage", "2", "--half", "bf16"),
    "3 groups": ("--stage", "3", "--groups", "2"),
    "3 bf16": ("--stage", "3", "--half", "bf16", "--groups", "2", "--parts", "60"),
    "pipeline 0": ("--kind", "pipeline"),
    "pipeline 0 bf16": ("--kind", "pipeline", "--half", "bf16"),
    "pipeline 1": ("--kind", "pipeline", "--stage", "1"),
    "tied pipeline 1": ("--kind", "tied", "--stage", "1"),
    "tied pipeline 1 bf16": ("--kind", "tied", "--stage", "1", "--half", "bf16"),
}
NEAR = 0.1  # relative, of losses: DeepSpeed computes in bf16, and here autocast does


def write(folder: Path) -> None:
    (folder / "model.py").write_text(MODEL)
    (folder / "train.py").write_text(PROGRAM.replace("SAVED_AT", str(SAVED_AT)))


def kept_by(folder: Path) -> dict[str, list[torch.Tensor]]:
    """What the live engines had, by name: a pipeline's stages have parameters of their own."""
    found: dict[str, list[torch.Tensor]] = {}
    for path in sorted(folder.glob("saved_*.pt")):
        found |= {name: value for name, value in torch.load(path).items() if name not in found}
    return found


def require_equal(folder: Path, saved: Path) -> None:
    """Each weight and moment of a checkpoint is the live engines', to the last bit."""
    found, kept = read_deepspeed_checkpoint(saved), kept_by(folder)
    names = {name: name.replace("tied_modules.ends.", "0.") for name in kept}
    names = {name: one if one in found.weights else name for name, one in names.items()}
    assert set(found.optimizer) == set(names.values())
    for name, (weight, mean, square) in kept.items():
        state = found.optimizer[names[name]]
        assert torch.equal(found.weights[names[name]], weight), name
        assert torch.equal(state["exp_avg"], mean), name
        assert torch.equal(state["exp_avg_sq"], square), name
        assert float(state["step"]) in (SAVED_AT, SAVED_AT + 1)  # some begin with a step without gradients
    assert (found.step, found.client_state["note"], found.samples) == (SAVED_AT, "kept", 16 * SAVED_AT)
    assert sorted(one for group in found.groups for one in group["params"]) == sorted(found.optimizer)


def require_gone_on(ours: dict[str, Any], theirs: dict[str, Any], *, rel: float) -> None:
    assert ours["losses"] == pytest.approx(theirs["losses"][SAVED_AT:], rel=rel)
    assert ours["rates"] == pytest.approx(theirs["rates"], rel=1e-9)
    assert (ours["steps"], ours["samples"], ours["note"]) == (STEPS, 16 * STEPS, "kept")


@pytest.mark.parametrize("words", list(ALL.values()), ids=list(ALL))
def test_a_program_goes_on_from_a_checkpoint_of_deepspeed(tmp_path: Path, words: tuple[str, ...]) -> None:
    write(tmp_path)
    theirs = under_deepspeed(tmp_path, *words, "--save", "saved", "--steps", str(STEPS))
    require_equal(tmp_path, tmp_path / "saved")
    ours = under_paceline(tmp_path, *words, "--load", "saved", "--steps", str(STEPS))
    require_gone_on(ours, theirs, rel=NEAR if "bf16" in words else 1e-5)


@pytest.mark.parametrize("name", ["1", "2 groups", "3 groups", "pipeline 1", "tied pipeline 1"])
def test_so_it_does_from_a_universal_one(tmp_path: Path, name: str) -> None:
    write(tmp_path)
    theirs = under_deepspeed(tmp_path, *ALL[name], "--save", "saved", "--steps", str(STEPS))
    tag = f"global_step{SAVED_AT}"
    make = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    folders = ["--input_folder", f"saved/{tag}", "--output_folder", f"universal/{tag}"]
    done = subprocess.run(
        [*make, *folders],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=programs.child_environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "universal" / "latest").write_text(tag)
    require_equal(tmp_path, tmp_path / "universal")
    ours = under_paceline(tmp_path, *ALL[name], "--load", "universal", "--steps", str(STEPS))
    require_gone_on(ours, theirs, rel=1e-5)


OURS = """\
import torch
from torch import nn

import paceline
from model import Net, groups


def train(worker):
    torch.manual_seed(0)
    x = torch.randn(400, 6)
    net = Net()
    model = worker.prepare(net)
    trained = groups(net, 2)
    optim = worker.prepare(torch.optim.AdamW(trained, lr=0.02))
    step = worker.stepper(model, optim, nn.functional.cross_entropy, clip_norm=0.5)
    data = torch.utils.data.TensorDataset(x, x[:, :3].argmax(dim=1))
    for batch in worker.batches(data, epochs=1):
        worker.report(loss=step(batch))


if __name__ == "__main__":
    paceline.run(train, workers=2, plan="batch(size=16)")
"""


def test_paceline_import_begins_a_run_with_one(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "ours.py").write_text(OURS)
    under_deepspeed(tmp_path, *ALL["3 groups"], "--save", "saved", "--steps", str(SAVED_AT))
    code, output = programs.run(
        *PACELINE, "import", "saved", "--script", "ours.py", "--run-dir", "runs/a", cwd=tmp_path, limit_s=LIMIT_S
    )
    assert code == 0, output
    assert "taken  state of 7 parameters for optimizer (exp_avg, exp_avg_sq, step)" in output
    code, output = programs.run(*PACELINE, "run", "ours.py", "--run-dir", "runs/a", cwd=tmp_path, limit_s=LIMIT_S)
    assert code == 0, output
    rows = [json.loads(line) for line in (tmp_path / "runs" / "a" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["step"] == SAVED_AT + 1
