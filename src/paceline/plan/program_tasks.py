"""The tasks of a job whose program belongs to another framework, which distributes it by itself (`Job.run_for`).

Paceline starts, watches and restarts such a program. It takes none of its steps, so a job has no plan, and the fields
of a job that are about steps are refused.

The words are TensorFlow's: with parameter servers a *chief* drives *workers* and *servers*; without them all tasks are
workers. `Job.workers` counts the workers when the user says it. Once the job is settled it counts all tasks, because
each is a process with a place: rank 0 is the chief, then come the workers, then the servers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import PlanError
from paceline.plan.command_plan import CommandPlan
from paceline.plan.job import NO_CLUSTER, Job

__all__ = ["ENTRIES", "asked_workers", "refuse_plan", "settled_tasks", "task_name", "task_names", "tasks_text"]

ENTRIES = {"tensorflow": "paceline.compat.tensorflow.task"}  # module with `work`, by name: it is above this room


def task_names(processes: int, servers: int | None) -> tuple[str, ...]:
    """Return what the tasks of a settled job are called, by rank: "chief", "worker 0", "worker 1", "server 0".

    Example::

        task_names(4, 1)  # ("chief", "worker 0", "worker 1", "server 0")
    """
    if servers is None:
        return tuple(f"worker {rank}" for rank in range(processes))
    workers = processes - servers - 1
    return ("chief", *(f"worker {k}" for k in range(workers)), *(f"server {k}" for k in range(servers)))


def task_name(job: Job | Mapping[str, Any], rank: int) -> str:
    """Return what messages call the worker of this rank: "worker 3", or the task's name where a settled job has
    servers. `job` may be the fields that a run's record has of it.
    """
    fields = job if isinstance(job, Mapping) else {"workers": job.workers, "servers": job.servers}
    servers, processes = fields.get("servers"), fields.get("workers")
    if not isinstance(servers, int) or not isinstance(processes, int):
        return f"worker {rank}"
    names = task_names(processes, servers)
    return names[rank] if 0 <= rank < len(names) else f"worker {rank}"


def tasks_text(processes: int, servers: int | None) -> str:
    """Return "chief, 2 workers, 1 server", or "2 workers"."""
    workers = processes if servers is None else processes - servers - 1
    parts = [] if servers is None else ["chief"]
    parts.append(f"{workers} worker{'s' * (workers != 1)}")
    parts += [] if servers is None else [f"{servers} server{'s' * (servers != 1)}"]
    return ", ".join(parts)


def settled_tasks(job: Job) -> Job:
    """Return a job of another framework's program with all its tasks counted as `workers`; others are unchanged.

    Without a number there is one worker on each host. Raises PlanError where hosts would be left without a task.
    """
    if job.run_for is None:
        return job
    workers = job.workers or job.hosts
    processes = workers if job.servers is None else workers + job.servers + 1
    return dataclasses.replace(job, workers=processes, cluster=NO_CLUSTER)


def asked_workers(processes: int, servers: int | None) -> int:
    """Return the number that the user gives for `--workers`, from the tasks of a settled job."""
    return processes if servers is None else processes - servers - 1


def refuse_plan(job: Job, plan: CommandPlan, given: Sequence[str] = ()) -> None:
    """Raise PlanError where a plan, or a value of one, is given for a program that takes its steps by itself."""
    if job.run_for is None or plan == CommandPlan():
        return
    raise PlanError(
        f"The plan ({plan}) cannot be used: with --for {job.run_for} the program takes its steps by itself, and "
        "Paceline only starts, watches and restarts it. Leave --plan, --set plan... and the job file's plan out; how "
        "the work is divided is said in the program, by its tf.distribute strategy."
    )
