"""Flight recording of one worker: its call record in shared memory, its stack on demand, and user collectives.

User collectives are those that the user's own code calls. The functions of COLLECTIVES are wrapped where users find
them: as attributes of `torch.distributed`, and as names that the program's own modules have imported from there. Calls
by Paceline and torch themselves pass through. Not recorded are functional collectives
(`torch.distributed._functional_collectives`, DTensor), point-to-point transfers, and functions that were imported from
`torch.distributed.distributed_c10d`.

In an elastic run user collectives raise an error that names the replacement. There is no default process group for
them, or only that of one replica's workers. A member may be lost in the middle of a call, when some members have its
result and others do not, and torch has no vote by which all would do it again.

A signal makes the interpreter write the training thread's Python stack into `stacks` in the worker's directory, even
where that thread is deep in C, or never releases the interpreter's lock. The stacks of other threads are not written:
they may change while they are read, which can crash the process.
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
from paceline.comm.recorded_calls import is_recorded
from paceline.errors import writing
from paceline.plan import Layout
from paceline.plan.job import Assignment, Job

__all__ = ["COLLECTIVES", "dump_stacks_on_signal", "recording_flight", "recording_user_collectives"]

# name -> (position of the tensor or list that must have the same size everywhere, position of the group); None: none
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
# Other calls that use the default group, and are refused where there is none.
OTHER_CALLS = ("new_group", "get_rank", "get_world_size", "send", "recv", "isend", "irecv", "batch_isend_irecv")
REPLACEMENTS = {
    "get_rank": "worker.rank",
    "get_world_size": "worker.workers",
    "barrier": "worker.wait()",
    "monitored_barrier": "worker.wait()",
    "all_reduce": "worker.average(x)",
    "broadcast": "worker.gather(x)[0]",
    "broadcast_object_list": "worker.gather(x)[0]",
}  # everything else: worker.gather(x)
KEYWORDS = {"all_gather_into_tensor": "input_tensor", "reduce_scatter": "output", "reduce_scatter_tensor": "output"}


@contextlib.contextmanager
def recording_user_collectives(
    recorder: FlightRecorder, function: Callable[..., Any], *, is_elastic: bool = False, is_split: bool = False
) -> Iterator[None]:
    """Record user collectives in `recorder` while entered; `function` is the program's training function.

    In an elastic run they raise RuntimeError with the remedy instead, unless the program has made a default group.
    `is_split`: the default group is that of the workers of one replica.
    """
    wrappers: dict[str, tuple[Any, Any]] = {}
    for name in (*COLLECTIVES, *(OTHER_CALLS if is_elastic else ())):
        original = getattr(dist, name, None)
        if original is not None:
            wrapper = _refused(original, name, is_split=is_split) if is_elastic else _wrapped(original, name, recorder)
            wrappers[name] = (original, wrapper)
    namespaces: list[dict[str, Any]] = [dist.__dict__, *_user_namespaces(function)]
    replaced: list[tuple[dict[str, Any], str, Any, Any]] = []
    for names in namespaces:
        for key, value in list(names.items()):
            for original, wrapper in wrappers.values():
                if value is original:
                    names[key] = wrapper
                    replaced.append((names, key, original, wrapper))
    try:
        yield
    finally:
        for names, key, original, wrapper in replaced:
            if names.get(key) is wrapper:  # otherwise other code has replaced it
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
            f"(Layout(replicas=(least, most))) a call in which a worker is lost would be half done. Use "
            f"{REPLACEMENTS.get(name, 'worker.gather(x)')}, which is done again with the members left, or a fixed "
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
        group = args[group_at] if len(args) > group_at else kwargs.get("group")
        if is_recorded(dist.group.WORLD if group is None else group):
            return original(*args, **kwargs)
        joined = _join(recorder, group)
        if joined is None:
            return original(*args, **kwargs)  # which raises the error
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
    """The name of a group in the flight recorder; None where this worker is not in the group."""
    if not dist.is_initialized():
        return None
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        return None
    name = f"torch group {group.group_name}"
    if not recorder.is_in(name):
        recorder.join(name, dist.get_process_group_ranks(group))
    return name


def _user_namespaces(function: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """The namespaces of the user's own modules, into which collectives may have been imported."""
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
    """From now on the signal makes this process write its first thread's stack, even where that thread never leaves C.

    The system delivers a process's signal to its first thread, unless that one blocks it.
    """
    if signal.getsignal(STACK_SIGNAL) != signal.SIG_DFL:
        return  # the program handles it
    path = Path(worker_dir) / STACKS_NAME
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "ab", buffering=0)  # noqa: SIM115  # faulthandler keeps it
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=False, chain=False)


@contextlib.contextmanager
def recording_flight(
    assignment: Assignment, job: Job, function: Callable[..., Any], *, layout: Layout
) -> Iterator[FlightRecorder]:
    """Keep this worker's flight recorder, and record the user collectives of `function` and its program."""
    path = Path(assignment.worker_dir) / FILE_NAME
    dump_stacks_on_signal(assignment.worker_dir)
    with writing(path):
        recorder = FlightRecorder.create(path, worker=assignment.rank, limit_s=job.timeout_s)
    recorder.begin("starting", 0)
    with recording_user_collectives(recorder, function, is_elastic=layout.is_elastic, is_split=layout.workers_each > 1):
        yield recorder
