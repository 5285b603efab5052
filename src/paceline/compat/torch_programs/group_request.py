"""What a program asks of `torch.distributed.init_process_group(...)`, and what the run gives it. Pure functions."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from paceline.comm.torch_backend.process_group import NAME
from paceline.errors import PlanError
from paceline.plan.job import Assignment

__all__ = ["GroupRequest", "backend_on", "read_request", "require_possible"]

SHARES_MEMORY = ("gloo", NAME)  # back ends of CPU tensors, in whose place the run's own stands
NOT_ON_CPU = {
    "nccl": "it is for GPUs",
    "xccl": "it is for GPUs of another kind",
    "ucc": "torch is rarely built with it",
    "mpi": "torch is rarely built with it",
}
WORLD = "give the number to the command, --workers {asked}, or leave world_size out"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroupRequest:
    """The arguments of one call."""

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None
    world_size: int = -1
    rank: int = -1
    store: Any = None
    device_id: Any = None
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])  # of later versions of torch


def read_request(make: Callable[..., None], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> GroupRequest:
    """Read the arguments of a call of `make`; TypeError where they do not fit it."""
    given = dict(inspect.signature(make).bind(*args, **kwargs).arguments)
    known = {field.name for field in dataclasses.fields(GroupRequest)} - {"others"}
    others = {name: value for name, value in given.items() if name not in known}
    fields = {name: value for name, value in given.items() if name in known and value is not None}
    if "backend" in fields:
        fields["backend"] = str(fields["backend"]).lower()
    return GroupRequest(**fields, others=others)


def require_possible(request: GroupRequest, assignment: Assignment) -> None:
    """Raise PlanError where the call asks for another world than the run is."""
    own = assignment.rank, assignment.workers
    if request.world_size not in (-1, own[1]):
        how = WORLD.format(asked=request.world_size)
        raise PlanError(
            f"init_process_group(world_size={request.world_size}) in a run of {own[1]} workers: {how}. For a part of "
            "the workers: dist.new_group(ranks), after init_process_group()."
        )
    if request.rank not in (-1, own[0]):
        raise PlanError(
            f"init_process_group(rank={request.rank}) on worker {own[0]}: read it from the variable RANK, or leave "
            "it out."
        )


def backend_on(device_type: str, request: GroupRequest) -> str | None:
    """The back end that the group gets on workers of this device; None: torch's choice. PlanError where it has none."""
    backend = request.backend
    if device_type != "cpu":
        return backend
    if request.device_id is not None and getattr(request.device_id, "type", "cuda") != "cpu":
        raise PlanError(
            f"init_process_group(device_id={request.device_id}): this run's workers compute on the CPU. Leave "
            "device_id out there, or start the run with --device cuda, on a host with a GPU for each worker."
        )
    chosen = NAME if backend is None else _of_cpu(backend)
    if chosen in SHARES_MEMORY:
        return NAME
    if chosen in NOT_ON_CPU:
        raise PlanError(
            f"init_process_group({backend!r}): this run's workers compute on the CPU, and {chosen} does not "
            f"({NOT_ON_CPU[chosen]}). Use 'gloo', which is shared memory here, or no name. With GPUs: --device cuda."
        )
    return backend


def _of_cpu(backend: str) -> str:
    """The back end of CPU tensors in "cpu:gloo,cuda:nccl"; the name itself where it is one."""
    parts = dict(part.strip().split(":", 1) for part in backend.split(",") if ":" in part)
    return parts.get("cpu", NAME) if parts else backend
