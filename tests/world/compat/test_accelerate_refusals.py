"""What a program of Accelerate is told where it does what no run can: the sentence, and the way that there is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from accelerate_programs import run_program, write_accelerate_program
from paceline.environment import PROCESSES
from programs import PACELINE, run

ALONE = """
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.compat.accelerate import Accelerator, skip_first_batches
from paceline.errors import PlanError

with pytest.raises(PlanError, match="--plan shard=4"):
    Accelerator(fsdp_plugin=object())
with pytest.raises(PlanError, match="Compute.precision is 'int3'|precision='int3'"):
    Accelerator(mixed_precision="int3")
accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == 1 and accelerator.is_main_process and accelerator.process_index == 0
assert not hasattr(accelerator, "join_uneven_inputs")
with pytest.raises(AttributeError, match="clip_grad_value_ is not in Paceline: accelerator.worker.clip_gradients"):
    accelerator.clip_grad_value_
with pytest.raises(PlanError, match="gradient_accumulation_steps is 0"):
    accelerator.gradient_accumulation_steps = 0

data = TensorDataset(torch.randn(20, 4), torch.randint(2, (20,)))
model, loader = nn.Linear(4, 2), DataLoader(data, batch_size=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
mine = model.weight
assert accelerator.prepare(model) is model
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
assert accelerator.unwrap_model(model).weight is mine
with pytest.raises(TypeError, match="a loader that was prepared"):
    skip_first_batches(DataLoader(data), 1)

# A loop without a backward evaluates, whichever mode the model is in, and the loader evaluates from then on.
model.train()
test = accelerator.prepare(DataLoader(data, batch_size=3))
seen = [len(accelerator.gather_for_metrics(target)) for inputs, target in test if model(inputs) is not None]
assert seen == [3, 3, 3, 3, 3, 3, 2], seen

model.eval()
with pytest.raises(RuntimeError, match=r"call model.train\\(\\) before it"):
    for inputs, target in loader:
        accelerator.backward(F.cross_entropy(model(inputs), target))
model.train()
for inputs, target in loader:
    loss = F.cross_entropy(model(inputs), target)
    accelerator.backward(loss)
    with pytest.raises(RuntimeError, match="called twice for one batch"):
        accelerator.backward(F.cross_entropy(model(inputs), target))
    optimizer.step()
    optimizer.zero_grad()
    break

# Left in the middle, and begun again: an epoch from its first batch on, whose gradients add up until zero_grad().
count = 0
for inputs, target in loader:
    accelerator.backward(F.cross_entropy(model(inputs), target))
    count += 1
    norm = model.weight.grad.norm().item()
total = model.weight.grad.clone()
expected = torch.zeros_like(total)
for inputs, target in zip(data.tensors[0].split(4), data.tensors[1].split(4)):
    expected += torch.autograd.grad(F.cross_entropy(model(inputs), target), model.weight)[0]
assert count == 5 and torch.allclose(total, expected, atol=1e-6)
with pytest.raises(RuntimeError, match="after the program has begun to train"):
    accelerator.load_state("nowhere")
optimizer.step()
print("all was refused")
"""


@pytest.mark.thorough
def test_a_lone_program_is_told_what_it_may_not_do(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(ALONE)
    code, output = run(sys.executable, "alone.py", cwd=tmp_path)
    assert "all was refused" in output, output
    assert code == 0, output


@pytest.mark.further
@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ("stages=2", "under Layout(stages=2)"),
        ("parameterserver", "under ParameterServer(...)"),
        ("replicas=1-2", "under an elastic layout"),
    ],
)
def test_plans_that_such_a_loop_cannot_have_are_refused_before_a_step(tmp_path: Path, plan: str, says: str) -> None:
    program = write_accelerate_program(tmp_path)
    code, output = run(*PACELINE, "run", program, "--workers", "2", "--plan", plan, cwd=tmp_path)
    assert code == 2, output
    assert says in output


@pytest.mark.further
def test_a_worker_for_two_processes_cannot_accumulate_by_hand(tmp_path: Path) -> None:
    program = write_accelerate_program(tmp_path)
    with pytest.raises(AssertionError, match="a program that counts batches itself needs a worker for each process"):
        run_program(program, "--loop", "manual", "--accumulate", "4", workers=1, environment={PROCESSES: "2"})


@pytest.mark.further
def test_more_workers_than_processes_are_refused(tmp_path: Path) -> None:
    program = write_accelerate_program(tmp_path)
    with pytest.raises(AssertionError, match="1 would have none"):
        run_program(program, workers=2, environment={PROCESSES: "1"})
