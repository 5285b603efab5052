"""What a worker brings when it joins a run: its assignment, plan, device and recorder, and the names made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist

from paceline.comm.algorithm_selection import AllReduceSettings
from paceline.comm.flight_recorder import FlightRecorder
from paceline.events import Event
from paceline.plan import Gossip, ParameterServer, Plan
from paceline.plan.job import Assignment, Job
from paceline.worker.membership.preemption import PreemptionNotice
from paceline.worker.topology.device import TensorWay, tensor_way

__all__ = ["JoinContext", "allreduce_algorithm", "allreduce_settings", "host_name", "replica_name"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JoinContext:
    """A worker that has not joined the run yet."""

    assignment: Assignment
    job: Job
    plan: Plan  # resolved
    device: torch.device
    recorder: FlightRecorder
    store: dist.Store | None = None  # of workers that torchrun, srun or mpirun started
    notice: PreemptionNotice | None = None  # there: whether this worker is asked to leave
    tell: Callable[[Event], None]  # records an event of the run
    trains_itself: bool = False  # the program has a loop and process groups of its own: torch's default one is its own
    ends_alone: bool = False  # the program takes no common step: SIGTERM is its own, and each worker ends by itself

    @property
    def way(self) -> TensorWay:
        """How this worker's tensors travel to the others."""
        return tensor_way(self.device, self.job.device)

    @property
    def host_device(self) -> torch.device:
        """The device of the tensors that the groups below see: the host, where all tensors pass through it."""
        return torch.device("cpu") if self.way == "staged" else self.device


def allreduce_settings(context: JoinContext) -> AllReduceSettings:
    """How this worker takes part in all-reduces of gradients."""
    return AllReduceSettings(
        algorithm=allreduce_algorithm(context.plan),
        host=host_name(context.assignment),
        timeout_s=context.job.timeout_s,
        report=context.tell,
    )


def allreduce_algorithm(plan: Plan) -> str:
    """The plan's all-reduce algorithm between replicas; "auto" where servers or neighbors take the gradients."""
    return "auto" if isinstance(plan.sync, ParameterServer | Gossip) else plan.sync.algorithm


def host_name(assignment: Assignment) -> str:
    """A name of this host that no other host of the job has."""
    return f"{assignment.host_index} {assignment.host}"


def replica_name(context: JoinContext) -> str:
    """A name for this replica that earlier replicas of the same number did not have."""
    assignment, each = context.assignment, context.plan.layout.workers_each
    return f"_replica_{assignment.rank // each}_{assignment.incarnation}"
