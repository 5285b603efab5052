"""Process sets: parts of the workers that run operations among themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from paceline.compat.horovod import session as sessions
from paceline.compat.horovod.errors import HorovodInternalError, not_initialized
from paceline.compat.horovod.pending_op import PendingOp
from paceline.compat.horovod.requests import Kind, OpRequest
from paceline.compat.horovod.variables import HorovodVariables

__all__ = [
    "ProcessSet",
    "add_process_set",
    "global_process_set",
    "initialize_process_sets",
    "members_of",
    "remove_process_set",
]


class ProcessSet:
    """Some ranks, which run operations together. `process_set_id`: its number; None before it is added, and after it
    was removed."""

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        """Raises ValueError for what is not a list of ranks: there are no MPI communicators here."""
        self.process_set_id: int | None = None
        self.mpi_comm: Any = None
        ranks: list[Any] = list(ranks_or_comm) if isinstance(ranks_or_comm, Iterable) else [ranks_or_comm]
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError(
                f"ProcessSet({ranks_or_comm!r}): it takes a list of ranks, such as [0, 2]. MPI communicators need MPI, "
                "which Paceline does not use"
            )
        self.ranks: list[int] | None = sorted(ranks)

    def size(self) -> int | None:
        """Return how many ranks there are; None where it was not added."""
        return None if self.process_set_id is None else len(_ranks_of(self.process_set_id))

    def rank(self) -> int | None:
        """Return this worker's place in the set; None where it was not added. Raises ValueError for other workers."""
        if self.process_set_id is None:
            return None
        ranks, own = _ranks_of(self.process_set_id), sessions.current_session().rank
        if own not in ranks:
            raise ValueError("Process is not part of provided process set.")
        return ranks.index(own)

    def included(self) -> bool | None:
        """Return whether this worker is in the set."""
        return None if self.ranks is None else sessions.current_session().rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    def invalidate(self) -> None:
        """Forget the number: the set is not one of the session any more."""
        self.process_set_id = None


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def initialize_process_sets(wanted: Sequence[ProcessSet]) -> None:
    """Add the sets that `init()` is given. Raises ValueError for one that is there already."""
    global_process_set.ranks = list(sessions.current_session().sets[0])
    for place, one in enumerate(wanted):
        one.process_set_id = _add(one.ranks or [])
        if one.process_set_id is None:
            raise ValueError(
                f"Horovod could not be initialized because process_sets entry number {place} is a duplicate: {one}"
            )


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Add a process set and return it; all workers must call this, with the same ranks.

    Raises ValueError where there is one of these ranks, or no such rank, and unless `init(process_sets="dynamic")` or
    HOROVOD_DYNAMIC_PROCESS_SETS=1 allows it.
    """
    one = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    _require_dynamic("adding")
    number = _add(one.ranks or [])
    if number is None:
        raise ValueError(f"Attempted to add a duplicate process set: {one}")
    one.process_set_id = number
    return one


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set, and return whether it was there; all workers must call this. The global one stays."""
    number = process_set.process_set_id
    if not number:
        return False
    _require_dynamic("removing")
    process_set.invalidate()
    session = sessions.current_session()
    name = session.name_for(Kind.REMOVE_SET, None, 0)
    op = PendingOp(request=OpRequest(name=name, kind=Kind.REMOVE_SET, root=number))
    session.submit(op, is_urgent=True)
    removed = int(op.wait())
    if removed >= 0:
        session.sets.pop(number, None)
    return removed >= 0


def _require_dynamic(what: str) -> None:
    if not (sessions.current_session().variables.has_dynamic_sets or HorovodVariables.read().has_dynamic_sets):
        raise ValueError(
            f"Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow {what} process sets after Horovod initialization."
        )


def _add(ranks: Sequence[int]) -> int | None:
    """Add a set of these ranks; returns its number, or None where there is one."""
    session = sessions.current_session()
    unknown = [rank for rank in ranks if not 0 <= rank < session.size]
    if unknown or not ranks or len(set(ranks)) < len(ranks):
        raise ValueError(
            f"A process set has ranks {list(ranks)}; it needs different ones, from 0 to {session.size - 1}"
        )
    name = session.name_for(Kind.ADD_SET, None, 0)
    op = PendingOp(request=OpRequest(name=name, kind=Kind.ADD_SET, ranks=tuple(ranks)))
    session.submit(op, is_urgent=True)
    number = int(op.wait())
    if number < 0:
        return None
    session.sets[number] = tuple(ranks)
    return number


def _ranks_of(number: int) -> tuple[int, ...]:
    ranks = sessions.current_session().sets.get(number)
    if ranks is None:
        raise ValueError("Process set does not exist or has not been registered.")
    return ranks


def members_of(process_set: ProcessSet) -> tuple[int, ...]:
    """Return the ranks of a set that this worker uses. Raises ValueError where it was not added, or for one that this
    worker is not in, and HorovodInternalError before `init()`."""
    if not sessions.is_open():
        raise HorovodInternalError(not_initialized())
    if process_set.process_set_id is None:
        raise ValueError(f"{process_set} was not added: use hvd.add_process_set() or hvd.init(process_sets=[...])")
    process_set.rank()
    return _ranks_of(process_set.process_set_id)
