"""Loops of an Accelerate program in every order that programs have, in one process: gradients and kinds of loops."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.environment import PROCESSES
from programs import run

BEGIN = """
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.compat.accelerate import Accelerator

accelerator = Accelerator(cpu=True, mixed_precision=os.environ.get("PRECISION"))
torch.manual_seed(0)
data = TensorDataset(torch.randn(16, 4), torch.randn(16, 2))
model = nn.Linear(4, 2)
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=4)
)


def loss_of(batch):
    return F.mse_loss(model(batch[0]), batch[1])


def expected(*numbers):
    losses = [loss_of([values[4 * n : 4 * n + 4] for values in data.tensors]) for n in numbers]
    return torch.autograd.grad(sum(losses) / len(losses), model.weight)[0]
"""

FIRST_ZEROED = """
due = [expected(0, 1), None]
for number, batch in enumerate(loader):
    optimizer.zero_grad()
    accelerator.backward(loss_of(batch))
    if number == 1:
        assert torch.allclose(model.weight.grad, due[0], atol=1e-6)
    optimizer.step()
    if number == 1:
        due[1] = expected(2, 3)
assert torch.allclose(model.weight.grad, due[1], atol=1e-6), (model.weight.grad, due[1])

accelerator.gradient_accumulation_steps = 2  # a step is the whole epoch, and the second has nothing of the first
for epoch in range(2):
    due = expected(0, 1, 2, 3)
    for batch in loader:
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            accelerator.backward(loss_of(batch))
            optimizer.step()
assert torch.allclose(model.weight.grad, due, atol=1e-6), (model.weight.grad, due)
print("all was as due")
"""


def run_text(folder: Path, text: str, **environment: str) -> None:
    """Run a program of one process; it must come to its end."""
    (folder / "program.py").write_text(BEGIN + text)
    code, output = run(sys.executable, "program.py", cwd=folder, environment=environment)
    assert "all was as due" in output, output
    assert code == 0, output


@pytest.mark.thorough
def test_gradients_that_are_removed_before_a_batch_do_not_come_back_where_a_worker_runs_two_processes(
    tmp_path: Path,
) -> None:
    run_text(tmp_path, FIRST_ZEROED, **{PROCESSES: "2"})


LEFT = """
state = Path("state")
first = next(iter(loader))  # a look at a batch
assert torch.equal(first[0], data.tensors[0][:4])
with pytest.raises(RuntimeError, match="A loop that was left"):
    accelerator.backward(loss_of(first))
for batch in loader:  # the samples are counted, in train mode
    pass
assert not accelerator._flat.in_pass


def train(most):
    count = 0
    for batch in loader:
        if count == most:
            break
        accelerator.backward(loss_of(batch))
        optimizer.step()
        optimizer.zero_grad()
        count += 1
    return count


assert train(9) == 4
assert sum(len(x) for x, y in loader) == 16  # beside a stream that has trained
assert train(2) == 2  # left with a batch that has no backward
accelerator.save_state(state)
accelerator.project_configuration.automatic_checkpoint_naming = True
assert [Path(accelerator.save_state()).name for _ in range(2)] == ["checkpoint_0", "checkpoint_1"]
assert train(9) == 4

accelerator.gradient_accumulation_steps = 2
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(batch))
        break
assert model.weight.grad is None
accelerator.gradient_accumulation_steps = 1

# An evaluation in train mode does not end the loop around it, once the loader is known to evaluate.
test = accelerator.prepare(DataLoader(data, batch_size=8))
assert [len(accelerator.gather_for_metrics(y)) for x, y in test] == [8, 8]
count = 0
for batch in loader:
    accelerator.backward(loss_of(batch))
    optimizer.step()
    count += 1
    assert [len(y) for x, y in test] == [8, 8]
assert count == 4
print("all was as due")
"""


@pytest.mark.thorough
def test_a_loop_that_is_left_or_gets_no_backward_changes_no_later_one(tmp_path: Path) -> None:
    run_text(tmp_path, LEFT)


READ = """
begun = []


def collate(samples):
    return [torch.stack(values) for values in zip(*samples)], list(begun)


read = DataLoader(data, batch_size=8, num_workers=2, worker_init_fn=begun.append, collate_fn=collate)
read = accelerator.prepare(read)
found = []
for batch, numbers in read:
    accelerator.backward(loss_of(batch))
    optimizer.step()
    found.append(numbers)
assert found == [[0], [1]], found  # in each process that reads, with its number
assert not begun
print("all was as due")
"""


@pytest.mark.further
def test_processes_that_read_begin_as_the_loader_says(tmp_path: Path) -> None:
    run_text(tmp_path, READ)


SIDE_BY_SIDE = """
model.eval()
is_double = lambda: torch.get_default_dtype() is torch.float64
tests = accelerator.prepare(DataLoader(data, batch_size=8), DataLoader(data, batch_size=4))
for number, (a, b) in enumerate(zip(*tests)):
    assert is_double() and (len(a[0]), len(b[0])) == (8, 4)
assert number == 1 and not is_double()  # the second loop is closed last
for batches in zip(*reversed(tests)):
    break
assert not is_double()
for batch in tests[0]:
    assert is_double()
assert not is_double()
print("all was as due")
"""


@pytest.mark.thorough
def test_evaluations_side_by_side_leave_no_precision_behind(tmp_path: Path) -> None:
    run_text(tmp_path, SIDE_BY_SIDE, PRECISION="fp64")


HALF = """
import copy

from paceline.compat.accelerate.utils import AutocastKwargs

is_half = lambda: torch.is_autocast_enabled("cpu")
inside = []
model.register_forward_hook(lambda module, args, output: inside.append(output.dtype))
square = torch.eye(4)


def look(x):
    assert not is_half() and (square @ square).dtype is torch.float32
    before = model(x)
    assert before.dtype is torch.float32 and inside.pop() is torch.float32
    assert torch.equal(before, before.bfloat16().float()), "it was computed in half precision"
    with accelerator.autocast():
        assert (square @ square).dtype is torch.bfloat16
        with accelerator.autocast(AutocastKwargs(enabled=False)):
            assert (square @ square).dtype is torch.float32
    return before


for x, y in loader:
    loss = F.mse_loss(look(x), y)
    assert loss.dtype is torch.float32
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
model.eval()
for x, y in accelerator.prepare(DataLoader(data, batch_size=8)):
    with torch.no_grad():
        look(x)

copied = copy.deepcopy(model)
with torch.no_grad():
    copied.weight.zero_()
    copied.bias.zero_()
assert not copied(x).any() and model(x).any(), "a copy computes with its own weights"
print("all was as due")
"""


@pytest.mark.thorough
def test_only_forwards_of_prepared_models_are_in_half_precision(tmp_path: Path) -> None:
    run_text(tmp_path, HALF, PRECISION="bf16")


HOOKS = """
saved, loaded = [], []


def before_save(models, weights, directory):
    saved.append((len(models), [sorted(one) for one in weights]))
    (Path(directory) / "own.txt").write_text("beside the state")
    weights.pop()


def before_load(models, directory):
    loaded.append((Path(directory) / "own.txt").read_text())
    with torch.no_grad():
        models.pop().weight.zero_()


handle = accelerator.register_save_state_pre_hook(before_save)
accelerator.register_load_state_pre_hook(before_load)
weight = model.weight.detach().clone()
accelerator.save_state("state")
assert saved == [(1, [["bias", "weight"]])], saved
handle.remove()
accelerator.save_state("another")
assert len(saved) == 1 and not Path("another/own.txt").exists()
accelerator.load_state("state")
assert loaded == ["beside the state"]
assert torch.equal(model.weight, weight), "the state has the model, whatever the hooks did"

assert accelerator.trackers == [] and accelerator.scaler is None
accelerator.get_tracker("tensorboard", unwrap=True).add_images("samples", torch.zeros(1), 0)
print("all was as due")
"""


@pytest.mark.thorough
def test_hooks_of_states_are_called_beside_what_the_run_saves(tmp_path: Path) -> None:
    run_text(tmp_path, HOOKS)
