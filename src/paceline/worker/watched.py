"""What makes a worker visible from outside while it runs: its ring, its stacks on demand, the user's own collectives.

A signal makes the interpreter write the training thread's Python stack into `stacks` in the worker's directory, also
where that thread is deep in C, or never lets go of the interpreter's lock. The stacks of other threads are left alone:
they may be running while they are read, and reading a stack that changes can crash the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.comm.ring import FILE_NAME, STACK_SIGNAL, STACKS_NAME, Ring
from paceline.errors import writing
from paceline.plan import Layout
from paceline.plan.job import Assignment, Job
from paceline.worker.foreign import followed

__all__ = ["answer_stacks", "watched"]


def answer_stacks(worker_dir: str) -> None:
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
def watched(assignment: Assignment, job: Job, function: Callable[..., Any], *, layout: Layout) -> Iterator[Ring]:
    """Keep this worker's ring, and follow what `function` and its program do with torch.distributed themselves."""
    path = Path(assignment.worker_dir) / FILE_NAME
    answer_stacks(assignment.worker_dir)
    with writing(path):
        ring = Ring.create(path, worker=assignment.rank, limit_s=job.timeout_s)
    ring.begin("starting", 0)
    with followed(ring, function, is_elastic=layout.is_elastic, is_split=layout.workers_each > 1):
        yield ring
