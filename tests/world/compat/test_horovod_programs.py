"""Programs that import `horovod`, run by the command: they start, end, and go on after a lost worker."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import quick
from programs import run

PROGRAM = """
import sys

import horovod
import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.mpi_ops import Sum, synchronize

try:
    hvd.rank()
except ValueError as error:
    print("before:", error)
hvd.init()
hvd.start_timeline(sys.argv[1])
sums = synchronize(hvd.allreduce_async(torch.ones(2), op=Sum, name="ones"))
hvd.stop_timeline()
assert issubclass(HorovodInternalError, RuntimeError) and hvd.HorovodInternalError is HorovodInternalError
print(horovod.__version__, hvd.rank(), hvd.size(), hvd.local_rank(), sums.tolist(), hvd.gloo_enabled(), hvd.mpi_built())
print("run:", horovod.run(lambda one: one + hvd.rank(), args=(5,), np=2))
try:
    import horovod.tensorflow
except ModuleNotFoundError as error:
    print("elsewhere:", error)
"""

ELASTIC = """
import json, os, pathlib, signal, sys

import horovod.torch as hvd
import torch

hvd.init()
torch.manual_seed(1)
data = torch.arange(48.0)
model = torch.nn.Linear(1, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))
folder = pathlib.Path(sys.argv[1])


@hvd.elastic.run
def train(state):
    print(f"begins at {state.batch}")
    for indices in torch.utils.data.DataLoader(range(48), batch_size=2, sampler=state.sampler):
        optimizer.zero_grad()
        model(data[indices].view(-1, 1)).square().mean().backward()
        optimizer.step()
        state.seen += hvd.allgather(indices).tolist()
        state.sampler.record_batch(state.batch, 2)
        state.batch += 1
        if state.batch % 4 == 0:
            state.commit()
        if state.batch == 6 and hvd.rank() == 1 and not (folder / "lost").exists():
            while not any(folder.glob("**/horovod_commit.*.pt")):
                pass
            (folder / "lost").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return state.seen


state = hvd.elastic.TorchState(
    model=model, optimizer=optimizer, sampler=hvd.elastic.ElasticSampler(range(48)), batch=0, seen=[]
)
seen = train(state)
if hvd.rank() == 0:
    (folder / "result").write_text(json.dumps([model.weight.item(), seen]))
"""

TWO_FUNCTIONS = """
import os, pathlib, signal, sys

import horovod.torch as hvd
import torch

hvd.init()
folder = pathlib.Path(sys.argv[1])


def go_through(name, state):
    print(f"{name} begins at {state.batch} with {state.model.weight.item()}")
    while state.batch < 4:
        state.batch += 1
        with torch.no_grad():
            state.model.weight.add_(1.0)
        state.commit()
        if name == "second" and state.batch == 2 and not (folder / "lost").exists():
            state.settle_file()
            hvd.barrier()
            if hvd.rank() == 1:
                (folder / "lost").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.barrier()


@hvd.elastic.run
def first(state):
    go_through("first", state)


@hvd.elastic.run
def second(state):
    go_through("second", state)


for function, begin in ((first, 0.0), (second, 10.0)):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, begin)
    function(hvd.elastic.TorchState(model=model, batch=0))
    print(f"weight {model.weight.item()}")
"""

CHANGING = """
import json, os, pathlib, signal, subprocess, sys, time

import horovod.torch as hvd
import torch

hvd.init()
folder, victim = pathlib.Path(sys.argv[1]), sys.argv[2]
worker = os.environ["HOROVOD_RANK"]
torch.manual_seed(1)
data = torch.linspace(0.0, 1.0, 60)
model = torch.nn.Linear(1, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))
SIZES = {4: 2, 6: 3, 8: 1}  # batch -> workers, for which it waits


def await_size(state):
    wanted = SIZES.get(state.batch, hvd.size())
    if wanted != hvd.size() and hvd.rank() == 0 and state.batch > 4:
        paceline = [sys.executable, "-m", "paceline"]
        subprocess.run([*paceline, "resize", folder / "run", str(wanted)], check=True, stdout=subprocess.DEVNULL)
    while wanted != hvd.size():
        state.commit()
        time.sleep(0.01)


@hvd.elastic.run
def train(state):
    print(f"begins at {state.batch} of {hvd.size()}: worker {worker}, rank {hvd.rank()}, process {os.getpid()}")
    await_size(state)
    for indices in torch.utils.data.DataLoader(range(60), batch_size=2, sampler=state.sampler):
        optimizer.zero_grad()
        loss = (model(data[indices].view(-1, 1)).view(-1) - 3 * data[indices]).square().mean()
        loss.backward()
        optimizer.step()
        if state.batch == 3 and worker == victim and not (folder / "lost").exists():
            (folder / "lost").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        mean = hvd.allreduce(loss.detach()).item()
        state.steps.append((hvd.size(), mean, hvd.allgather(indices).tolist()))
        state.sampler.record_batch(state.batch, 2)
        state.batch += 1
        state.commit()
        await_size(state)
    return state.steps


state = hvd.elastic.TorchState(
    model=model, optimizer=optimizer, sampler=hvd.elastic.ElasticSampler(range(60)), batch=0, steps=[]
)
state.register_reset_callbacks([lambda: print(f"reset: {hvd.size()}")])
steps = train(state)
(folder / "result").write_text(json.dumps([model.weight.item(), model.bias.item(), steps]))
"""


ORPHAN = """
import os, pathlib, signal, sys, time

import horovod.torch as hvd
import torch

from paceline.compat.horovod import elastic_state

hvd.init()
folder = pathlib.Path(sys.argv[1])
is_newcomer = (folder / "lost").exists()
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.constant_(model.weight, 0.0)


def end_itself(*_, **__):
    if hvd.size() > 1:
        os.kill(os.getpid(), signal.SIGKILL)


@hvd.elastic.run
def train(state):
    print(f"begins at {state.batch} of {hvd.size()} with {model.weight.item()}")
    while state.batch < 8:
        if state.batch == 4 and not is_newcomer:
            if os.environ["HOROVOD_RANK"] == "1":
                (folder / "lost").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            state.settle_file()
            elastic_state.broadcast_parameters = end_itself
            while True:  # until worker 1 is lost, and until its replacement has come
                state.check_host_updates()
                time.sleep(0.01)
        state.batch += 1
        with torch.no_grad():
            model.weight.add_(1.0)
        state.commit()


state = hvd.elastic.TorchState(model=model, batch=0)
train(state)
(folder / "result").write_text(f"{state.batch} {model.weight.item()}")
"""


def one_process(steps: list[Any]) -> tuple[list[float], float, float]:
    """The losses and weights of one process that takes the same steps."""
    torch.manual_seed(1)
    data = torch.linspace(0.0, 1.0, 60)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for parameter in model.parameters():  # as Horovod does to make a state that can be sent: Adam counts it
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    losses: list[float] = []
    for _, _, indices in steps:
        optimizer.zero_grad()
        loss = (model(data[indices].view(-1, 1)).view(-1) - 3 * data[indices]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.weight.item(), model.bias.item()


def paceline(folder: Path, *words: str | Path) -> str:
    status, output = run(sys.executable, "-m", "paceline", "run", "--show", "all", "--run-dir", folder / "run", *words)
    assert status == 0, output
    return output


def test_a_program_finds_its_modules_and_writes_a_timeline(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    timeline = tmp_path / "timeline.json"
    output = paceline(tmp_path, "--as", "horovod", tmp_path / "program.py", "--workers", "2", timeline)
    assert "before: Horovod has not been initialized; use hvd.init()." in output
    assert "0.28.1 0 2 0 [2.0, 2.0] True False" in output
    assert "0.28.1 1 2 1 [2.0, 2.0] True False" in output
    assert output.count("run: [5, 6]") == 2
    assert "elsewhere: horovod.tensorflow is not provided" in output
    events = json.loads(timeline.read_text())
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE"} <= {event["name"] for event in events}
    assert any(event.get("args", {}).get("name") == "allreduce.ones" for event in events)


@pytest.mark.thorough
def test_an_elastic_program_goes_on_from_its_last_commit(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(ELASTIC)
    found: list[list[Any]] = []
    for name in ("undisturbed", "lost"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "lost").touch() if name == "undisturbed" else None
        output = paceline(folder, "--as", "horovod", tmp_path / "program.py", "--workers", "2", folder)
        assert output.count("begins at 4") == (0 if name == "undisturbed" else 2)
        found.append(json.loads((folder / "result").read_text()))
        assert not list((folder / "run").glob("horovod_commit*"))
    assert found[0] == found[1]
    assert sorted(found[0][1]) == list(range(48))  # each sample once


@pytest.mark.thorough
def test_each_elastic_function_of_a_program_goes_on_from_its_own_commit(tmp_path: Path) -> None:
    """A worker is lost in the second one: the first has ended then, and has no commit."""
    (tmp_path / "program.py").write_text(TWO_FUNCTIONS)
    output = paceline(tmp_path, "--as", "horovod", tmp_path / "program.py", "--workers", "2", tmp_path)
    begins = re.findall(r"(first|second) begins at (\d) with ([\d.]+)", output)
    first, second, again = ("first", "0", "0.0"), ("second", "0", "10.0"), ("second", "2", "12.0")
    assert Counter(begins) == {first: 4, second: 2, again: 2}, output  # lines of two workers come in any order
    assert output.count("weight 14.0") == 2
    assert not list((tmp_path / "run").glob("horovod_commit*"))


@pytest.mark.thorough
@pytest.mark.parametrize("victim", [0, quick.further(1)])
def test_workers_that_are_lost_come_and_go_leave_the_others_in_their_processes(tmp_path: Path, victim: int) -> None:
    """2 -> 1 (kill -9) -> 2 (its replacement) -> 3 -> 1 (resized), within an epoch: each sample once, and the losses
    and weights of one process."""
    (tmp_path / "program.py").write_text(CHANGING)
    output = paceline(
        tmp_path,
        *("--as", "horovod", tmp_path / "program.py", "--workers", "2", "--plan", "replicas=1-3"),
        *("--", tmp_path, str(victim)),
    )
    weight, bias, steps = json.loads((tmp_path / "result").read_text())
    assert [size for size, _, _ in steps][:9] == [2, 2, 2, 1, 2, 2, 3, 3, 1]
    assert sorted(index for _, _, indices in steps for index in indices) == list(range(60))
    losses, wanted_weight, wanted_bias = one_process(steps)
    assert [loss for _, loss, _ in steps] == pytest.approx(losses, rel=1e-4)
    assert (weight, bias) == pytest.approx((wanted_weight, wanted_bias), rel=1e-4)
    begins = re.findall(r"begins at (\d+) of (\d): worker (\d), rank (\d), process (\d+)", output)
    survivor = [row for row in begins if row[2] == str(1 - victim)]
    assert len({row[4] for row in survivor}) == 1
    assert [row[:2] for row in survivor][:4] == [("0", "2"), ("3", "1"), ("4", "2"), ("6", "3")]
    assert [row[3] for row in survivor][1:4] == ["0", "0", "0"]  # it has the state, whatever its number
    assert "1 worker goes on, steps lost 1" in output


@pytest.mark.thorough
def test_a_newcomer_that_is_left_alone_before_it_has_the_state_begins_from_the_last_commit(tmp_path: Path) -> None:
    """Worker 1 is lost, and then worker 0 while it sends its state to the replacement."""
    (tmp_path / "program.py").write_text(ORPHAN)
    output = paceline(
        tmp_path,
        *("--as", "horovod", tmp_path / "program.py", "--workers", "2", "--plan", "replicas=1-2"),
        *("--", tmp_path),
    )
    begins = re.findall(r"begins at (\d) of (\d) with ([\d.]+)", output)
    both, alone = ("0", "2", "0.0"), ("4", "1", "4.0")  # lines of a worker that was lost may come behind the next ones
    assert begins.count(both) == 2 and begins.count(alone) >= 2 and set(begins) == {both, alone}, output
    assert (tmp_path / "result").read_text() == "8 8.0"


@pytest.mark.further
def test_a_horovodrun_command_line_runs_a_module(tmp_path: Path) -> None:
    (tmp_path / "own_module.py").write_text("import horovod.torch as hvd\nhvd.init()\nprint('size', hvd.size())\n")
    status, output = run(
        *(sys.executable, "-m", "paceline.compat.horovod.horovodrun", "-np", "2", "--gloo"),
        *("-H", "localhost:2", "python", "-m", "own_module"),
        cwd=tmp_path,
    )
    assert status == 0, output
    assert "--gloo has no effect" in output
    assert "size 2" in output
