"""Programs with torch.distributed calls of their own, unmodified: they join the run where they make a process group.

The program's process group is torch's own, with the run's key-value store to meet in, and the run's back end in place
of gloo. The run keeps a group of its own beside it. So `destroy_process_group()`, a second group, sub-groups and meshes
are what torch makes of them. What such a program reads in its environment is set as torchrun sets it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from paceline import environment
from paceline.comm.torch_backend.process_group import NAME, record_groups, register_backend
from paceline.compat.torch_programs.group_request import (
    GroupRequest,
    backend_on,
    read_request,
    require_possible,
)
from paceline.compat.torch_programs.monitored_barrier import monitored_barrier_by_store
from paceline.compat.torch_programs.own_processes import called_in_place, require_own_process
from paceline.events import Note
from paceline.plan import Plan
from paceline.plan.job import Assignment
from paceline.plan.program_check import require_fixed_replicas
from paceline.plan.program_text import ProgramText
from paceline.worker.program_worker import join_as_program, program_place, program_worker
from paceline.worker.run_member import parts_of

__all__ = ["prepare_program"]

BACKSTOP_S = 15.0  # beyond Job.timeout_s: the supervisor can report more of a hang than the worker that waits
UNUSED = ("save_every", "save_every_s", "save_at_end", "keep", "remote_dir", "max_steps", "balance")  # about our loop
_joined_here: list[int] = []  # the process that this module has joined as a worker, once it has


@dataclasses.dataclass(slots=True)
class _GroupsMade:
    """How often this program has made its default group. torch's names of groups begin anew with each one."""

    number: int = 0


def prepare_program(assignment: Assignment) -> None:
    """Before the program of this worker begins: set what it reads, and have it join where it makes its group. A script
    that gives a function to `paceline.run` is left as it is: libraries in it would take RANK for a launcher's."""
    text = ProgramText.of(Path(assignment.job.program))
    if text.calls_run:
        return
    environment.enter_torch_world(assignment)
    torch.set_num_threads(assignment.job.threads or environment.default_threads(assignment.local_workers))
    option = text.local_rank_option
    if option is not None and not any(word.split("=")[0] == option for word in sys.argv[1:]):
        sys.argv.append(f"{option}={assignment.local_rank}")  # as torch.distributed.launch does
    made = _GroupsMade()
    _replace(dist.init_process_group, _joining(dist.init_process_group, assignment, os.getpid(), made))
    _replace(dist.destroy_process_group, _sparing_the_run(dist.destroy_process_group))
    _replace(dist.monitored_barrier, _monitoring(dist.monitored_barrier, made))
    if text.makes_groups:
        _replace(torch.multiprocessing.spawn, called_in_place(torch.multiprocessing.spawn, assignment))


def _joining(make: Callable[..., None], assignment: Assignment, pid: int, made: _GroupsMade) -> Callable[..., None]:
    @functools.wraps(make)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        caller = sys._getframe(1).f_globals.get("__name__", "")  # pyright: ignore[reportPrivateUsage]  # documented
        asked = read_request(make, args, kwargs)
        if caller.startswith("paceline.worker.") or asked.backend == "fake":
            make(*args, **kwargs)
            return
        if dist.is_initialized():
            if program_worker() is None or _joined_here:
                make(*args, **kwargs)  # one too many, which torch refuses
            return  # another framework has joined, and the run's group is there
        require_own_process(pid, os.getpid())
        require_fixed_replicas(assignment.plan.over(None).resolve(assignment.workers))
        require_possible(asked, assignment)
        device_type, limit_s = _join(asked, assignment)
        backend = backend_on(device_type, asked)
        if backend == NAME:
            register_backend()
        store = asked.store or dist.PrefixStore(f"program/{made.number}", program_place().shared)
        hook = sys.excepthook
        make(
            backend,
            store=store,
            rank=assignment.rank,
            world_size=assignment.workers,
            timeout=asked.timeout or timedelta(seconds=limit_s),
            device_id=None if device_type == "cpu" else asked.device_id,
            **asked.others,
        )
        made.number += 1
        sys.excepthook = hook  # torch puts the rank before each line, which the run's records say already

    return init_process_group


def _join(asked: GroupRequest, assignment: Assignment) -> tuple[str, float]:
    """Join the run, unless this process has joined it; returns the type of the worker's device, and how long its
    groups may wait."""
    worker = program_worker()
    if worker is None:
        fields = {} if asked.timeout is None else {"timeout_s": asked.timeout.total_seconds()}
        threads = torch.get_num_threads()  # the program may have chosen
        worker = join_as_program(assignment, fields=fields, trains_itself=True)
        torch.set_num_threads(threads)
        _joined_here[:] = [os.getpid()]
        record_groups(program_place().recorder)
        _note_unused(assignment)
    return worker.device.type, parts_of(worker).timeout_s + BACKSTOP_S


def _note_unused(assignment: Assignment) -> None:
    """Say which options of the command have no effect."""
    worker = program_worker()
    idle = [f"--{name.replace('_', '-')}" for name in UNUSED if name in assignment.given]
    plan = assignment.plan.over(None)
    if plan != Plan(layout=plan.layout):
        idle.append(f"all of the plan {plan} but its replicas")
    if idle and worker is not None and worker.rank == 0:
        text = f"{', '.join(idle)}: not used, as this program has a loop and checkpoints of its own"
        parts_of(worker).files.emit(Note(text=text))


def _sparing_the_run(destroy: Callable[..., None]) -> Callable[..., None]:
    """Where another framework's package has joined the run, the default group is the run's: it stays to the end."""

    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        caller = sys._getframe(1).f_globals.get("__name__", "")  # pyright: ignore[reportPrivateUsage]  # documented
        is_runs_own = program_worker() is not None and not _joined_here
        is_default = group is None or group is dist.group.WORLD
        if is_runs_own and is_default and not caller.startswith("paceline."):
            return
        destroy(group)

    return destroy_process_group


def _monitoring(barrier: Callable[..., None], made: _GroupsMade) -> Callable[..., None]:
    calls = collections.Counter[str]()  # by group

    @functools.wraps(barrier)
    def monitored_barrier(group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        one: Any = dist.group.WORLD if group is None else group
        if not isinstance(one, dist.ProcessGroup) or dist.get_backend(one) != NAME:
            barrier(group, timeout, wait_all_ranks)
            return
        worker = program_worker()
        limit_s = BACKSTOP_S + (parts_of(worker).timeout_s if worker is not None else 0.0)
        name = f"program/{made.number}/{one.group_name}"
        store = dist.PrefixStore(f"{name}/monitored_barrier/{calls[name]}", program_place().shared)
        calls[name] += 1
        monitored_barrier_by_store(
            one, store, timeout=timeout or timedelta(seconds=limit_s), wait_all_ranks=wait_all_ranks
        )

    return monitored_barrier


def _replace(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Put `new` in the place of torch's `old`, in each module of torch that has its name."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "torch":
            for key in [key for key, value in vars(module).items() if value is old]:
                setattr(module, key, new)
