"""What a program's `init_process_group(...)` asks for, and what the run gives it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.compat.torch_programs.group_request import GroupRequest, backend_on, read_request, require_possible
from paceline.errors import PlanError
from paceline.plan import Job, Plan
from paceline.plan.job import Assignment
from paceline.plan.program_check import require_fixed_replicas

PLACE = Assignment(
    rank=1,
    workers=2,
    local_rank=1,
    local_workers=2,
    host="a",
    host_index=0,
    hosts=1,
    address="127.0.0.1",
    run_dir="run",
    attempt=1,
    worker_dir="run/attempt_1/worker_1",
    channel_fd=-1,
    command_started=0.0,
    job=Job(program="train.py"),
)


def test_arguments_are_read_by_place_and_by_name() -> None:
    read = read_request(dist.init_process_group, ("GLOO", None, timedelta(seconds=9)), {"rank": 1, "group_name": "g"})
    assert (read.backend, read.timeout, read.rank, read.world_size) == ("gloo", timedelta(seconds=9), 1, -1)
    assert read.others == {"group_name": "g"}
    with pytest.raises(TypeError):
        read_request(dist.init_process_group, (), {"no_such": 1})


@pytest.mark.parametrize(
    ("backend", "given"),
    [(None, "paceline"), ("gloo", "paceline"), ("cpu:gloo,cuda:nccl", "paceline"), ("paceline", "paceline")],
)
def test_cpu_workers_get_shared_memory_for_gloo_and_for_no_name(backend: str | None, given: str) -> None:
    assert backend_on("cpu", GroupRequest(backend=backend)) == given
    assert backend_on("cuda", GroupRequest(backend=backend)) == backend


@pytest.mark.parametrize("backend", ["nccl", "mpi", "ucc", "cpu:mpi"])
def test_back_ends_that_cpu_workers_lack_are_refused_by_name(backend: str) -> None:
    with pytest.raises(PlanError, match=backend.partition(":")[2] or backend):
        backend_on("cpu", GroupRequest(backend=backend))
    assert backend_on("cpu", GroupRequest(backend="mine")) == "mine"  # torch says whether it knows it


def test_a_bound_gpu_is_refused_on_the_cpu_and_a_bound_cpu_is_not() -> None:
    with pytest.raises(PlanError, match="device_id=cuda:0"):
        backend_on("cpu", GroupRequest(device_id=torch.device("cuda", 0)))
    assert backend_on("cpu", GroupRequest(device_id=torch.device("cpu"))) == "paceline"


@pytest.mark.parametrize(
    ("asked", "says"),
    [({"world_size": 3}, r"world_size=3.* in a run of 2 workers.*--workers 3"), ({"rank": 0}, r"rank=0.* on worker 1")],
)
def test_another_world_is_refused(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        require_possible(GroupRequest(**asked), PLACE)
    require_possible(GroupRequest(world_size=2, rank=1), PLACE)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ("replicas=2-4", "workers come and go"),
        ("shard=2", "this program does that by itself"),
        ("localsgd(every=4)", "this program does that by itself"),
    ],
)
def test_a_plan_that_is_no_number_of_replicas_is_refused(plan: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        require_fixed_replicas(Plan.parse(plan))
    require_fixed_replicas(Plan.parse("replicas=2+batch(size=8)"))
