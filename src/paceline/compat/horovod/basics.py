"""Begin and end, ranks and sizes, and what Horovod would have been built with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from paceline.compat.horovod import progress
from paceline.compat.horovod import session as sessions
from paceline.compat.horovod.handles import forget_handles
from paceline.compat.horovod.process_sets import ProcessSet, initialize_process_sets
from paceline.compat.horovod.variables import allow_dynamic_process_sets
from paceline.runs.open_worker import open_worker
from paceline.worker.program_worker import program_place

__all__ = [
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the run, and open the session of all workers; all of them must call this.

    :param comm: ranks, if only these open it.
    :param process_sets: sets to add at once; "dynamic": `add_process_set` may add some later.
    :raises ValueError: an MPI communicator, process sets that occur twice, or such sets in an elastic run.
    """
    if comm is not None and not isinstance(comm, Iterable):
        raise ValueError(
            "hvd.init(comm) takes a list of ranks. MPI communicators need MPI, which Paceline does not use: it starts "
            "the workers itself, or joins those of mpirun, srun or torchrun."
        )
    sets: list[ProcessSet] = []
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(f"hvd.init(process_sets={process_sets!r}): it takes a list of process sets, or 'dynamic'.")
        allow_dynamic_process_sets()
    elif process_sets is not None:
        sets = list(process_sets)
    if sessions.is_open():
        return
    open_worker(ends_alone=True)
    if sets and program_place().consensus.elastic is not None:
        raise ValueError(
            "hvd.init(process_sets=[...]) takes no sets in an elastic run: a worker that comes later would wait for "
            'the others to add them. Use hvd.init(process_sets="dynamic"), and hvd.add_process_set() at the start of '
            "the function that hvd.elastic.run calls."
        )
    forget_handles()
    sessions.open_session(list(comm) if comm else None, count_steps=progress.count)
    try:
        initialize_process_sets(sets)
    except BaseException:
        sessions.close_session()  # on all workers alike: `init` may be called again
        raise


def shutdown() -> None:
    """Close the session. What other workers still want of this one fails there. `init` may be called again."""
    sessions.close_session()


def is_initialized() -> bool:
    """Return whether a session is open."""
    return sessions.is_open()


def rank() -> int:
    """Return this worker's number, from 0. Raises ValueError before `init`, as the other numbers do."""
    return sessions.current_session().rank


def size() -> int:
    """Return the number of workers."""
    return sessions.current_session().size


def local_rank() -> int:
    """Return this worker's number on its host."""
    return sessions.current_session().local_rank


def local_size() -> int:
    """Return the number of workers on this host."""
    return sessions.current_session().local_size


def cross_rank() -> int:
    """Return the number of this host."""
    return sessions.current_session().cross_rank


def cross_size() -> int:
    """Return the number of hosts."""
    return sessions.current_session().cross_size


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of workers."""
    return sessions.current_session().is_homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write what operations do to a file, as a trace for chrome://tracing; worker 0 writes it."""
    sessions.current_session().timeline.start(file_path, marks_cycles=mark_cycles)


def stop_timeline() -> None:
    """Finish the file that `start_timeline` began."""
    sessions.current_session().timeline.stop()


def mpi_threads_supported() -> bool:
    """Raises ValueError: there is no MPI here."""
    raise ValueError("Horovod MPI is not enabled; Please make sure it's installed and enabled.")


def mpi_enabled(verbose: bool = False) -> bool:
    """Return False: workers talk to each other over shared memory and sockets of Paceline's own."""
    return False


def mpi_built(verbose: bool = False) -> bool:
    """Return False: there is no MPI here."""
    return False


def gloo_enabled(verbose: bool = False) -> bool:
    """Return True: programs that ask take the way without MPI."""
    return True


def gloo_built(verbose: bool = False) -> bool:
    """Return True, as `gloo_enabled`."""
    return True


def nccl_built(verbose: bool = False) -> int:
    """Return 0: tensors on a GPU travel through host memory."""
    return 0


def ddl_built(verbose: bool = False) -> bool:
    """Return False."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """Return False."""
    return False


def cuda_built(verbose: bool = False) -> bool:
    """Return whether this torch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built(verbose: bool = False) -> bool:
    """Return whether this torch was built with ROCm."""
    hip: Any = getattr(torch.version, "hip", None)
    return hip is not None
