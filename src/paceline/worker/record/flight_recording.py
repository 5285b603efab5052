"""Collectives that the user's own code calls: `torch.distributed` notes them in the worker's ring while a run lasts.

The functions of COLLECTIVES are wrapped where users find them: as attributes of `torch.distributed`, and as names that
the program's own modules have imported from there. Calls by Paceline and torch themselves pass through. Not followed
are functional collectives (`torch.distributed._functional_collectives`, DTensor), point-to-point transfers, and
functions that were taken from `torch.distributed.distributed_c10d`.

An elastic run has no default process group that they could use, or only that of the workers of a replica: a member may
be lost in the middle of a call, when some have its result and others have not, and torch knows no vote by which all
would do it again. There they say what to call instead.

What makes a worker visible from outside while it runs: its ring, its stacks on demand, the user's own collectives.

A signal makes the interpreter write the training thread's Python stack into `stacks` in the worker's directory, also
where that thread is deep in C, or never lets go of the interpreter's lock. The stacks of other threads are left alone:
they may be running while they are read, and reading a stack that changes can crash the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from paceline.comm.call_site import is_user_code
from paceline.comm.flight_recorder import FILE_NAME, STACK_SIGNAL, STACKS_NAME, FlightRecorder
from paceline.errors import writing
from paceline.plan import Layout
from paceline.plan.job import Assignment, Job

__all__ = ["COLLECTIVES", "dump_stacks_on_signal", "recording_flight", "recording_user_collectives"]

# name -> (place of the tensor or list that has to be the same size everywhere, place of the group); None: there is none
COLLECTIVES: dict[str, tuple[int | None, int]] = {
    "all_reduce": (0, 2),
    "broadcast": (0, 2),
    "reduce": (0, 3),
    "all_gather": (1, 2),
    "all_gather_into_tensor": (1, 2),
    "all_gather_object": (None, 2),
    "gather": (0, 3),
    "gather_object": (None, 3),
    "scatter": (0, 3),
    "scatter_object_list": (None, 3),
    "broadcast_object_list": (None, 2),
    "reduce_scatter": (0, 3),
    "reduce_scatter_tensor": (0, 3),
    "all_to_all": (None, 2),
    "all_to_all_single": (None, 4),
    "barrier": (None, 0),
    "monitored_barrier": (None, 0),
}
# What else asks for the default group, and is refused where there is none.
OTHER_CALLS = ("new_group", "get_rank", "get_world_size", "send", "recv", "isend", "irecv", "batch_isend_irecv")
REPLACEMENTS = {
    "get_rank": "worker.rank",
    "get_world_size": "worker.workers",
    "barrier": "worker.wait()",
    "monitored_barrier": "worker.wait()",
    "all_reduce": "worker.average(x)",
    "broadcast": "worker.broadcast(x)",
    "broadcast_object_list": "worker.broadcast(x)",
}  # everything else: worker.gather(x)
KEYWORDS = {"all_gather_into_tensor": "input_tensor", "reduce_scatter": "output", "reduce_scatter_tensor": "output"}


@contextlib.contextmanager
def recording_user_collectives(
    recorder: FlightRecorder, function: Callable[..., Any], *, is_elastic: bool = False, is_split: bool = False
) -> Iterator[None]:
    """Note the user's own collectives in `recorder` while entered; `function` is the program's training function.

    In an elastic run they raise RuntimeError with the remedy instead, unless the program has made a group of its own;
    `is_split`: the default group is that of the workers of one replica.
    """
    wrappers: dict[str, tuple[Any, Any]] = {}
    for name in (*COLLECTIVES, *(OTHER_CALLS if is_elastic else ())):
        original = getattr(dist, name, None)
        if original is not None:
            wrapper = _refused(original, name, is_split=is_split) if is_elastic else _wrapped(original, name, recorder)
            wrappers[name] = (original, wrapper)
    places: list[dict[str, Any]] = [dist.__dict__, *_programs_names(function)]
    put: list[tuple[dict[str, Any], str, Any, Any]] = []
    for names in places:
        for key, value in list(names.items()):
            for original, wrapper in wrappers.values():
                if value is original:
                    names[key] = wrapper
                    put.append((names, key, original, wrapper))
    try:
        yield
    finally:
        for names, key, original, wrapper in put:
            if names.get(key) is wrapper:  # otherwise somebody has put something else there
                names[key] = original


def _refused(original: Callable[..., Any], name: str, *, is_split: bool) -> Callable[..., Any]:
    what = "reaches the workers of this replica alone" if is_split else "has no process group here"

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        # See `_wrapped` for the frame.
        is_own = is_user_code(sys._getframe(1).f_code.co_filename)  # pyright: ignore[reportPrivateUsage]  # documented, and named so for what it costs in other Pythons
        if not is_own or (dist.is_initialized() and not is_split):
            return original(*args, **kwargs)
        raise RuntimeError(
            f"torch.distributed.{name}() {what}: in a run whose workers may come and go "
            f"(Layout(replicas=(least, most))) a call that a worker is lost in would be half done. Use "
            f"{REPLACEMENTS.get(name, 'worker.gather(x)')}, which is done again with those who are left, or a fixed "
            "number, Layout(replicas=n)"
        )

    return call


def _wrapped(original: Callable[..., Any], name: str, recorder: FlightRecorder) -> Callable[..., Any]:
    kind = f"torch.distributed.{name}"
    at, group_at = COLLECTIVES[name]
    keyword = KEYWORDS.get(name, "tensor")

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        # The only way to the caller's file at the cost of an attribute; `inspect` reads source, for milliseconds.
        if not is_user_code(sys._getframe(1).f_code.co_filename):  # pyright: ignore[reportPrivateUsage]  # documented, and named so for what it costs in other Pythons
            return original(*args, **kwargs)
        joined = _join(recorder, args[group_at] if len(args) > group_at else kwargs.get("group"))
        if joined is None:
            return original(*args, **kwargs)  # which says what is wrong
        tensor = None if at is None else args[at] if len(args) > at else kwargs.get(keyword)
        dtype, numel = (tensor.dtype, tensor.numel()) if isinstance(tensor, Tensor) else (None, 0)
        serial = recorder.enter(kind, "", dtype=dtype, numel=numel, group=joined)
        if kwargs.get("async_op"):
            return original(*args, **kwargs)
        recorder.wait(serial)
        try:
            return original(*args, **kwargs)
        finally:
            recorder.leave()

    return call


def _join(recorder: FlightRecorder, group: dist.ProcessGroup | None) -> str | None:
    """The name under which the ring knows a group; None where this worker is in no such group."""
    if not dist.is_initialized():
        return None
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        return None
    name = f"torch group {group.group_name}"
    if not recorder.is_in(name):
        recorder.join(name, dist.get_process_group_ranks(group))
    return name


def _programs_names(function: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """The names of the program's own modules, where it may have imported collectives to."""
    seen: set[int] = set()
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(module, ModuleType) and isinstance(path, str) and is_user_code(path):
            seen.add(id(module.__dict__))
            yield module.__dict__
    inner = function.func if isinstance(function, functools.partial) else function
    names = getattr(inner, "__globals__", None)
    if isinstance(names, dict) and id(names) not in seen:
        yield names


def dump_stacks_on_signal(worker_dir: str) -> None:
    """From now on the signal makes this process write its first thread's stack; also where it stays in C for ever.

    The system gives a signal that is meant for a process to its first thread, unless that one blocks it.
    """
    if signal.getsignal(STACK_SIGNAL) != signal.SIG_DFL:
        return  # the program has a use of its own for it
    path = Path(worker_dir) / STACKS_NAME
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "ab", buffering=0)  # noqa: SIM115  # faulthandler keeps it
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=False, chain=False)


@contextlib.contextmanager
def recording_flight(
    assignment: Assignment, job: Job, function: Callable[..., Any], *, layout: Layout
) -> Iterator[FlightRecorder]:
    """Keep this worker's ring, and follow what `function` and its program do with torch.distributed themselves."""
    path = Path(assignment.worker_dir) / FILE_NAME
    dump_stacks_on_signal(assignment.worker_dir)
    with writing(path):
        recorder = FlightRecorder.create(path, worker=assignment.rank, limit_s=job.timeout_s)
    recorder.begin("starting", 0)
    with recording_user_collectives(recorder, function, is_elastic=layout.is_elastic, is_split=layout.workers_each > 1):
        yield recorder
