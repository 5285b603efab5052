"""Programs with torch.distributed calls of their own, under `paceline run` as they are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import quick
from programs import PACELINE, run

STEPS = 4
WORKERS = 2

# What torch itself documents, in one program: each part prints one line of JSON on worker 0.
EVERYTHING = '''\
import datetime, json, os, sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def tell(name, value):
    if dist.get_rank() == 0:
        print("told " + json.dumps([name, value]), flush=True)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))


def data():
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    return x, (x.sum(dim=1) > 0).long()


def train(model, optim, *, own=True):
    """The mean losses of the steps; `own`: each worker has its half of the data."""
    x, y = data()
    half = slice(8 * dist.get_rank(), 8 * dist.get_rank() + 8) if own else slice(None)
    losses = []
    for _ in range(4):
        loss = F.cross_entropy(model(x[half]), y[half])
        loss.backward()
        optim.step()
        optim.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        losses.append(mean.item())
    return losses


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


torch.set_num_threads(3)
torch.manual_seed(7)
drawn = torch.rand(1).item()
torch.manual_seed(7)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
rank, world = dist.get_rank(), dist.get_world_size()
tell("own choices", [torch.get_num_threads(), torch.rand(1).item() == drawn])
torch.set_num_threads(1)
tell("world", [world, int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]), dist.get_backend()])

model = DDP(net())
tell("ddp", train(model, adam(model.parameters())))
hooked = DDP(net())
hooked.register_comm_hook(None, allreduce_hook)
tell("hook", train(hooked, ZeroRedundancyOptimizer(hooked.parameters(), torch.optim.AdamW, lr=1e-2)))

sharded = net()
fully_shard(sharded[0])
fully_shard(sharded)
tell("fully_shard", train(sharded, adam(sharded.parameters())))

mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
split = parallelize_module(net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
tell("tensor", train(split, adam(split.parameters()), own=False))

sampler = DistributedSampler(TensorDataset(*data()), shuffle=True)
seen = [None] * world
dist.all_gather_object(seen, [x.sum().item() for x, _ in DataLoader(TensorDataset(*data()), sampler=sampler)])
tell("sampler", sorted(seen[0] + seen[1]))

uneven = DDP(net())
with uneven.join():  # worker 0 has one batch more
    for _ in range(2 - rank):
        uneven(data()[0]).sum().backward()
with uneven.no_sync():
    uneven(data()[0]).sum().backward()
tell("join", True)

if rank == 0:
    dist.send(torch.arange(3.0), dst=1)
    back = torch.zeros(3)
    dist.recv(back, src=1)
    tell("send", back.tolist())
else:
    there = torch.zeros(3)
    dist.recv(there, src=0)
    dist.send(2 * there, dst=0)
pair = dist.new_group([0, 1], backend="gloo")
alone = dist.new_group([0])
one = torch.ones(1)
dist.all_reduce(one, group=pair)
tell("groups", [one.item(), dist.get_backend(pair), alone != dist.GroupMember.NON_GROUP_MEMBER])
objects = [{"from": rank}]
dist.broadcast_object_list(objects, src=1)
tell("objects", objects)
dist.monitored_barrier()

import torch.distributed.checkpoint as dcp

dcp.save({"model": sharded.state_dict()}, checkpoint_id="saved")
dcp.async_save({"model": sharded.state_dict()}, checkpoint_id="saved_too").result()
before = sharded[0].weight.full_tensor().sum().item()
state = {"model": sharded.state_dict()}
state["model"]["0.weight"].to_local().zero_()
dcp.load(state, checkpoint_id="saved")
tell("checkpoint", abs(state["model"]["0.weight"].full_tensor().sum().item() - before) < 1e-6)

store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, is_master=rank == 0)
store.set(f"came {rank}", "yes")
tell("store", store.get("came 1").decode())

dist.destroy_process_group()
was_there = dist.is_initialized()
dist.init_process_group(init_method="env://", world_size=world, rank=rank)
one = torch.ones(1)
dist.all_reduce(one)
tell("again", [was_there, one.item()])
'''


def told(output: str) -> dict[str, Any]:
    """What worker 0 of a program told, by name."""
    return dict(json.loads(found) for found in re.findall(r"^told (.*)$", output, re.MULTILINE))


def losses_of_one_process() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    y = (x.sum(dim=1) > 0).long()
    losses: list[float] = []
    for _ in range(STEPS):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def start(folder: Path, text: str, *words: str, workers: int = WORKERS, name: str = "train.py") -> tuple[int, str]:
    (folder / name).write_text(text)
    return run(
        *PACELINE, "run", name, "--workers", str(workers), "--run-dir", "run", "--no-tensorboard", *words, cwd=folder
    )


@pytest.mark.thorough
def test_a_program_has_all_of_torch_distributed_and_the_numbers_of_one_process(tmp_path: Path) -> None:
    code, output = start(tmp_path, EVERYTHING)
    assert code == 0, output
    found = told(output)
    one = losses_of_one_process()
    assert found["own choices"] == [3, True]
    assert found["world"] == [WORKERS, WORKERS, 0, "paceline"]
    for way in ("ddp", "hook", "fully_shard", "tensor"):
        assert found[way] == pytest.approx(one, abs=1e-5), way
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    assert found["sampler"] == pytest.approx(sorted(row.sum().item() for row in x), abs=1e-4)
    assert found["join"] is True
    assert found["send"] == [0.0, 2.0, 4.0]
    assert found["groups"] == [2.0, "gloo", True]
    assert found["objects"] == [{"from": 1}]
    assert found["checkpoint"] is True
    assert found["store"] == "yes"
    assert found["again"] == [False, 2.0]
    steps = rows(tmp_path / "run")
    assert [row["step"] for row in steps] == list(range(1, len(steps) + 1))
    assert len(steps) == 4 * STEPS
    assert [row["loss"] for row in steps[:STEPS]] == pytest.approx(one, abs=1e-5)  # the mean over the workers
    assert {row["lr"] for row in steps} == {1e-2}
    assert "samples" not in output.partition("finished at")[2]


SHORT = """\
import os, sys, time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

{before}
dist.init_process_group({arguments})
rank = dist.get_rank()
model = DDP(torch.nn.Linear(4, 2))
optim = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 7):
    model(torch.ones(2, 4)).sum().backward()
    optim.step()
    if step == 3 and rank == 1:
        {third}
"""


def short(third: str = "pass", *, arguments: str = "", before: str = "") -> str:
    return SHORT.format(third=third, arguments=arguments, before=before)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (short(arguments='"nccl"'), "this run's workers compute on the CPU, and nccl does not"),
        (short(arguments="world_size=4, rank=0"), "init_process_group(world_size=4) in a run of 2 workers"),
        quick.further(short(arguments="rank=5"), "init_process_group(rank=5) on worker"),
    ],
)
@pytest.mark.thorough
def test_a_group_that_the_run_cannot_give_is_refused_by_name(tmp_path: Path, text: str, says: str) -> None:
    code, output = start(tmp_path, text)
    assert code == 2, output
    assert says in output
    assert output.count("Traceback") == 0


def test_a_worker_that_leaves_early_is_named_and_its_end_is_no_crash_of_the_others(tmp_path: Path) -> None:
    code, output = start(tmp_path, short("sys.exit(0)"))
    assert code == 1, output
    assert "worker 1 left the program after step 3, others are in it" in output
    assert "SIGSEGV" not in output
    assert "] At:" not in output


@pytest.mark.thorough
def test_a_killed_worker_ends_the_others_in_one_sentence_and_all_start_again_if_told(tmp_path: Path) -> None:
    text = short("os.environ['TORCHELASTIC_RESTART_COUNT'] != '0' or os.kill(os.getpid(), 9)")
    code, output = start(tmp_path, text)
    assert code == 76, output
    assert re.search(r"worker 1 \(.*\) was killed by signal 9", output)
    assert "worker 0 stopped because of it" in output
    code, output = start(tmp_path, text, "--run-dir", "again", "--restart-lost")
    assert code == 0, output
    assert "all start again, and the program goes on from what it has saved" in output


@pytest.mark.thorough
def test_the_first_traceback_is_shown_alone(tmp_path: Path) -> None:
    code, output = start(tmp_path, short("raise ValueError('no more')"))
    assert code == 1, output
    summary = output.partition("worker 1 (")[2]
    assert "failed after step 3: ValueError: no more" in summary
    assert summary.count("Traceback") == 1
    assert "worker 0 stopped because of it" in summary


@pytest.mark.further
def test_a_hang_names_the_collective_its_line_and_where_the_other_worker_is(tmp_path: Path) -> None:
    code, output = start(tmp_path, short("time.sleep(600)"), "--timeout-s", "12")
    assert code == 1, output
    assert re.search(r"worker 1 .*has not entered all_reduce \d+ \(called at train.py:13, step 4\)", output)
    assert "it is at train.py:16" in output


SPAWNED = """\
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def main(rank, world):
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method="tcp://127.0.0.1:29999")
    one = torch.ones(1)
    dist.all_reduce(one)
    print("told " + repr([rank, one.item()]).replace("'", '"'), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, args=(int(sys.argv[1]),), nprocs=int(sys.argv[1]))
"""


def test_a_program_that_spawns_its_workers_is_called_in_each_of_the_runs(tmp_path: Path) -> None:
    code, output = start(tmp_path, SPAWNED, "2", "--show", "all")
    assert code == 0, output
    assert sorted(re.findall(r"told \[(\d), 2\.0\]", output)) == ["0", "1"]
    code, output = start(tmp_path, SPAWNED, "3", "--fresh")
    assert code == 2, output
    assert "The program starts 3 workers by itself (torch.multiprocessing.spawn), and this run has 2" in output


BARRIERS = """\
import os, time

import torch.distributed as dist

for turn in range(2):
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        time.sleep(0.3)
        open(f"came_{turn}", "w").close()
    dist.monitored_barrier()
    if dist.get_rank() == 1:
        print("told " + str(os.path.exists(f"came_{turn}")), flush=True)
    dist.destroy_process_group()
"""


@pytest.mark.further
def test_a_monitored_barrier_waits_in_a_second_process_group_as_in_the_first(tmp_path: Path) -> None:
    code, output = start(tmp_path, BARRIERS, "--show", "all")
    assert code == 0, output
    assert re.findall(r"told (\w+)", output) == ["True", "True"]


@pytest.mark.thorough
def test_a_program_with_an_option_for_its_local_rank_gets_it(tmp_path: Path) -> None:
    text = """\
import argparse
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
local_rank = parser.parse_args().local_rank
dist.init_process_group("gloo")
print(f"rank {dist.get_rank()} has {local_rank}", flush=True)
"""
    code, output = start(tmp_path, text, "--show", "all")
    assert code == 0, output
    assert "rank 0 has 0" in output
    assert "rank 1 has 1" in output


def test_plans_and_programs_that_cannot_be_are_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text("import torch\nprint(torch.ones(1))\n")
    code, output = run(*PACELINE, "run", "alone.py", "--workers", "2", cwd=tmp_path)
    assert code == 2, output
    assert "alone.py trains in one process" in output
    (tmp_path / "train.py").write_text(short())
    for plan, says in (("replicas=2-4", "workers come and go"), ("shard=2", "this program does that by itself")):
        code, output = run(*PACELINE, "run", "train.py", "--plan", plan, cwd=tmp_path)
        assert code == 2, output
        assert says in output
    assert not (tmp_path / "runs").exists()
