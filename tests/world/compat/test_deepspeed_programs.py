"""Programs of DeepSpeed over the run's own steps, started as users do; the oracle is a loop of plain torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import programs
from programs import PACELINE

PROGRAM = """\
import argparse
import json

import torch
from torch import nn

import paceline.compat.deepspeed as deepspeed
from deepspeed.accelerator import get_accelerator

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--save", default="")
parser.add_argument("--load", default="")
parser.add_argument("--by-loss", action="store_true")
args = deepspeed.add_config_arguments(parser).parse_args()

deepspeed.init_distributed()
rank, world = deepspeed.comm.get_rank(), torch.distributed.get_world_size()
torch.distributed.barrier()
torch.manual_seed(0)
x = torch.randn(96, 6)
y = x[:, :3].argmax(dim=1)
net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Sequential(nn.Linear(12, 12), nn.Tanh()), nn.Linear(12, 3))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.02)
engine, optimizer, _, schedule = deepspeed.initialize(args=args, model=net, optimizer=optimizer)
assert engine.local_rank == rank and engine.world_size == world == engine.dp_world_size
step = 0
if args.load:
    path, client = engine.load_checkpoint(args.load)
    step = client["step"]
    assert engine.global_steps == step, engine.global_steps
micro, count = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
losses = []
for step in range(step, step + args.steps):
    for number in range(count):
        assert engine.is_gradient_accumulation_boundary() == (number == count - 1)
        at = (step * engine.train_batch_size() + (number * world + rank) * micro) % 96
        data = x[at : at + micro].to(get_accelerator().device_name(engine.local_rank))
        loss = nn.functional.cross_entropy(engine(data), y[at : at + micro])
        losses.append(loss.item())
        if args.by_loss:
            loss.backward()
        else:
            engine.backward(loss)
        engine.step()
    assert engine.was_step_applied()
mean = torch.tensor(losses, dtype=torch.float64).view(args.steps, count).mean(dim=1)
torch.distributed.all_reduce(mean)
if args.save:
    engine.save_checkpoint(args.save, client_state={"step": step + 1})
engine.eval()
with torch.no_grad():
    outputs = engine(x)
if rank == 0:
    found = {"losses": (mean / world).tolist(), "norm": engine.get_global_grad_norm(), "rate": engine.get_lr()}
    print("found " + json.dumps(found), flush=True)
"""

PIPELINE = """\
import json
import sys

import torch
from torch import nn

import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule

torch.manual_seed(0)
x = torch.randn(96, 6)
data = torch.utils.data.TensorDataset(x, x[:, :3].argmax(dim=1))
layers = [LayerSpec(nn.Linear, 6, 12), torch.tanh, nn.Linear(12, 12), lambda found: found * 2, nn.Linear(12, 3)]
net = PipelineModule(layers=layers, num_stages=int(sys.argv[1]), loss_fn=nn.functional.cross_entropy)
config = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 6, "gradient_clipping": 0.5}
config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), training_data=data, config=config)
losses = [engine.train_batch().item() for _ in range(3)]
micros = iter(torch.utils.data.DataLoader(data, batch_size=6))
held_out = engine.eval_batch(micros).item()
if engine.global_rank == 0:
    print("found " + json.dumps({"losses": losses, "held_out": held_out}), flush=True)
"""

TRAIN_AND_EVALUATE = """\
import json

import torch

import paceline.compat.deepspeed as deepspeed
from deepspeed.pipe import PipelineModule

seen = []


def loss_fn(outputs, labels):
    seen.append(int(labels[0]))
    return outputs.square().mean() * (1e6 if 40 <= labels[0] < 44 else 1.0)


data = [(torch.ones(2), number) for number in range(64)]
net = PipelineModule([torch.nn.Linear(2, 1)], num_stages=1, loss_fn=loss_fn)
config = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 1e-3}}}
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), training_data=data, config=config)
held_out = [(torch.ones(4, 2), torch.full((4,), -1))]
engine.eval_batch(iter(held_out))
applied = []
for _ in range(12):
    engine.train_batch()
    applied.append(engine.was_step_applied())
    engine.eval_batch(iter(held_out))
found = {"seen": [one for one in seen if one >= 0], "applied": applied, "skipped": engine.skipped_steps}
print("found " + json.dumps(found), flush=True)
"""

CONFIG: dict[str, Any] = {
    "train_batch_size": 24,
    "train_micro_batch_size_per_gpu": 6,
    "gradient_clipping": 0.2,
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 3, "warmup_type": "linear"}},
}


def found_by(output: str) -> dict[str, Any]:
    lines = [line for line in output.splitlines() if line.startswith("found ")]
    assert len(lines) == 1, output
    return json.loads(lines[0].removeprefix("found "))


def run(folder: Path, *words: str, workers: int = 2, stage: int = 0, **more: Any) -> dict[str, Any]:
    """What the program found on so many workers."""
    name = f"{workers}_{stage}"
    (folder / f"{name}.json").write_text(json.dumps({**CONFIG, "zero_optimization": {"stage": stage}, **more}))
    (folder / "train.py").write_text(PROGRAM)
    config = ("--deepspeed_config", f"{name}.json")
    command = (*PACELINE, "run", "--workers", str(workers), "train.py", *config, *words)
    code, output = programs.run(*command, cwd=folder)
    assert code == 0, output
    return found_by(output)


def reference(steps: int, *, saves: Path | None = None) -> dict[str, Any]:
    """The same in plain torch, with whole batches; `saves`: where to put what DeepSpeed would have saved in the end."""
    torch.manual_seed(0)
    x = torch.randn(96, 6)
    y = x[:, :3].argmax(dim=1)
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Sequential(nn.Linear(12, 12), nn.Tanh()), nn.Linear(12, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.0, weight_decay=0.02)
    losses: list[float] = []
    norm = torch.zeros(())
    for step in range(steps):
        at = step * 24 % 96
        optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, max(0, step - 1) / 3)
        loss = nn.functional.cross_entropy(net(x[at : at + 24]), y[at : at + 24])
        losses.append(loss.item())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
    if saves is not None:
        optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, (steps - 1) / 3)  # as its schedule has set it by now
        counts = {"global_steps": steps, "global_samples": 24 * steps, "skipped_steps": 0, "step": steps}
        schedule = {"last_batch_iteration": steps - 1}
        state = {"module": net.state_dict(), "optimizer": optimizer.state_dict(), "lr_scheduler": schedule, **counts}
        (saves / "last").mkdir(parents=True)
        torch.save(state, saves / "last" / "mp_rank_00_model_states.pt")
        (saves / "latest").write_text("last")
    return {"losses": losses, "norm": norm.item(), "rate": [0.1 * min(1.0, (steps - 1) / 3)]}


def require_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["norm"] == pytest.approx(expected["norm"], rel=1e-4)
    assert found["rate"] == pytest.approx(expected["rate"])


@pytest.mark.parametrize("stage", [0, 3])
def test_a_programs_loop_has_the_losses_of_whole_batches(tmp_path: Path, stage: int) -> None:
    require_equal(run(tmp_path, stage=stage), reference(3))


@pytest.mark.further
@pytest.mark.parametrize("stage", [1, 2])
def test_so_it_has_under_stages_1_and_2(tmp_path: Path, stage: int) -> None:
    require_equal(run(tmp_path, "--by-loss", stage=stage), reference(3))


@pytest.mark.further
def test_a_checkpoint_goes_on_with_other_workers_and_another_stage(tmp_path: Path) -> None:
    run(tmp_path, "--save", "saved", stage=3)
    assert (tmp_path / "saved" / "latest").read_text() == "global_step3"
    found = run(tmp_path, "--load", "saved", workers=1, stage=0)
    expected = reference(6)
    require_equal(found, {**expected, "losses": expected["losses"][3:]})


def test_a_checkpoint_of_deepspeed_itself_goes_on(tmp_path: Path) -> None:
    reference(3, saves=tmp_path / "theirs")
    found, expected = run(tmp_path, "--load", "theirs", stage=3), reference(6)
    require_equal(found, {**expected, "losses": expected["losses"][3:]})
    assert not list((tmp_path / "runs").glob("*/.deepspeed_*"))


@pytest.mark.further
def test_a_pipeline_takes_the_steps_of_one_worker(tmp_path: Path) -> None:
    (tmp_path / "pipe.py").write_text(PIPELINE)
    found: list[dict[str, Any]] = []
    for workers, stages in ((1, 1), (2, 2)):
        words = ("run", "--as", "deepspeed", "--workers", str(workers), "pipe.py", str(stages))
        code, output = programs.run(*PACELINE, *words, cwd=tmp_path)
        assert code == 0, output
        found.append(found_by(output))
    assert found[1]["losses"] == pytest.approx(found[0]["losses"], rel=1e-5)
    assert found[1]["held_out"] == pytest.approx(found[0]["held_out"], rel=1e-5)


@pytest.mark.further
def test_a_pipeline_trains_on_its_own_data_after_an_evaluation_and_counts_a_spike_as_skipped(tmp_path: Path) -> None:
    (tmp_path / "pipe.py").write_text(TRAIN_AND_EVALUATE)
    plan = "replicas=1+batch(size=4,micro=4)+guard(on_spike=skip,window=8)"
    code, output = programs.run(*PACELINE, "run", "--workers", "1", "--plan", plan, "pipe.py", cwd=tmp_path)
    assert code == 0, output
    found = found_by(output)
    assert found["seen"] == list(range(0, 48, 4))
    assert found["applied"] == [number != 10 for number in range(12)]
    assert found["skipped"] == 1


@pytest.mark.further
def test_balance_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pipe.py").write_text(TRAIN_AND_EVALUATE)
    code, output = programs.run(*PACELINE, "run", "--workers", "1", "--balance", "pipe.py", cwd=tmp_path)
    assert code != 0
    assert "--balance gives a slower worker fewer micro-batches" in output


@pytest.mark.further
def test_a_bare_program_is_a_run_of_one_worker_and_a_skipped_step_is_counted(tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text(
        "import torch\n"
        "import paceline.compat.deepspeed as deepspeed\n"
        "net = torch.nn.Linear(2, 1)\n"
        "before = net.weight.detach().clone()\n"
        "config = {'train_batch_size': 4, 'optimizer': {'type': 'SGD', 'params': {'lr': 0.1}}}\n"
        "engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)\n"
        "for factor in (float('inf'), 1.0):\n"
        "    engine.backward(engine(torch.ones(4, 2)).mean() * factor)\n"
        "    engine.step()\n"
        "    print('applied', engine.was_step_applied(), engine.skipped_steps, bool((net.weight == before).all()))\n"
    )
    code, output = programs.run(sys.executable, "bare.py", cwd=tmp_path)
    assert code == 0, output
    assert "applied False 1 True" in output
    assert "applied True 1 False" in output


REFUSALS = """\
import torch

import paceline.compat.deepspeed as deepspeed


def said(call):
    try:
        call()
    except Exception as error:
        print("said " + str(error).replace("\\n", " "))


net = torch.nn.Linear(2, 1)
config = {"train_batch_size": 8, "gradient_accumulation_steps": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
x = torch.ones(4, 2)
said(lambda: engine.step())
said(lambda: engine.no_sync())
said(lambda: engine.some_thing)
other = torch.nn.Linear(2, 1)
others = {"model": other, "model_parameters": other.parameters()}
said(lambda: deepspeed.initialize(**others, config={**config, "bf16": {"enabled": True}}))
tied = torch.nn.Sequential(net)
said(lambda: deepspeed.initialize(model=tied, model_parameters=tied.parameters(), config=config))
engine.backward(engine(x).mean())
said(lambda: engine.save_16bit_model("saved"))
engine.save_checkpoint("saved", tag="within", client_state={"steps": engine.global_steps})
said(lambda: engine.backward(net.weight.sum()))
engine.step()
engine.backward(engine(x).mean())
said(lambda: engine(x))
engine.step()
said(lambda: deepspeed.initialize(**others, config=config))
said(lambda: engine.load_checkpoint("saved"))
said(lambda: engine.save_checkpoint("saved", client_state={"file": open(__file__)}))
said(lambda: deepspeed.init_inference(net))
engine.backward(engine(x).mean())
engine.save_checkpoint("saved", tag="last")
"""


@pytest.mark.further
def test_what_a_loop_may_not_do_is_said(tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text(REFUSALS)
    code, output = programs.run(sys.executable, "bare.py", cwd=tmp_path)
    assert code == 0, output
    said = [line.removeprefix("said ") for line in output.splitlines() if line.startswith("said ")]
    expected = [
        "engine.step() comes after engine.backward(loss)",
        "engine.no_sync is not here: gradients are averaged once",
        "the engine has no 'some_thing', nor has its Linear",
        "A run has one plan: give both configurations the same zero_optimization",
        "whose 0.weight is another engine's, too",
        "within a step: call it after the engine.step() that ends one",
        "backward() came twice for one forward",
        "was not taken: call the engine's step() after each backward()",
        "after the first step had begun: make all engines before it",
        "must come before the first forward that trains",
        "cannot store file: <_io.TextIOWrapper>",
        "deepspeed.init_inference is not here: inference is not here",
    ]
    assert len(said) == len(expected), output
    for text, line in zip(expected, said, strict=True):
        assert text in line
    # What is saved within a step is saved at its end; of a step that does not end, the state before it.
    assert [one.name for one in sorted(tmp_path.glob("saved/*/step_*"))] == ["step_00000001", "step_00000001"]
