"""Keeps the workers of a replica in lockstep in an elastic run: all of them abort an operation, or none does.

In elastic runs with several workers per replica, a transfer between replicas may fail for one worker and not for the
next one of the same replica. That one would go on to a collective within the replica (a gather of rows, a sum of
partial results, a stage's output), and wait there forever. Within a live replica no transfer is ever aborted, because a
replica that loses a worker is lost as a whole. So the workers of a replica compare, within it, after each operation of
the whole run, which all of them reach. In between, a failure is kept, and nothing more is sent between replicas.

`LockstepGroup` is the group of the whole run. `CrossReplicaGroup` is the group of the workers with the same position in
each replica. Replicas of one worker need neither.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.comm.elastic.generation_group import ElasticGroup
from paceline.comm.flight_recorder import FlightRecorder
from paceline.comm.group import CompletedTransfer, Disrupted, SingleWorkerGroup, Transfer, WorkerGroup

__all__ = ["CrossReplicaGroup", "Lockstep", "LockstepGroup"]

T = TypeVar("T")


class Lockstep:
    """Keeps a failure of this worker, and compares with the other workers of the `replica`, all of which must call."""

    def __init__(self, replica: WorkerGroup | None = None) -> None:
        self._replica: WorkerGroup = SingleWorkerGroup() if replica is None else replica
        self._failure: Disrupted | None = None  # the others may not know of it
        self._all_know = False  # all know of the failure, and are leaving the operation

    @property
    def failure(self) -> Disrupted | None:
        """What failed here since the last comparison."""
        return self._failure

    def note(self, failure: Disrupted) -> None:
        """Keep a failure for the next comparison; the first one is the cause of the others."""
        self._failure = self._failure or failure

    def settle(self) -> None:
        """Return if nothing has failed on any worker of the replica; otherwise raise Disrupted on all of them."""
        failure = self._failure
        if self.all_agree(failure is None):
            return
        self._failure, self._all_know = None, True
        raise failure or Disrupted("another worker of this replica knows that a member was lost")

    def abort(self, failure: Disrupted) -> None:
        """Make sure that all workers of the replica leave the current operation, as this one does."""
        if not self._all_know:
            self.note(failure)
            with contextlib.suppress(Disrupted):
                self.settle()
        self._failure, self._all_know = None, False

    def all_agree(self, yes: bool) -> bool:
        """Whether `yes` is true on all workers of the replica."""
        against = torch.zeros(1) if yes else torch.ones(1)
        self._replica.all_reduce(against, what="whether the replica goes on").wait()
        return not float(against)


class LockstepGroup(ElasticGroup):
    """The group of the whole run: each operation succeeds on all workers of a replica, or on none of them."""

    def __init__(self, lockstep: Lockstep, *, recorder: FlightRecorder) -> None:
        super().__init__(None, generation=-1, recorder=recorder)
        self._lockstep = lockstep

    def all_reduce(self, tensor: Tensor, *, what: str) -> Transfer:
        if self.is_newcomer:
            return CompletedTransfer()
        return _LockstepTransfer(
            _begin(self._lockstep, lambda: super(LockstepGroup, self).all_reduce(tensor, what=what)), self._lockstep
        )

    def begin_all_gather(self, tensor: Tensor, out: Tensor, *, what: str) -> Transfer:
        if self.is_newcomer:
            return super().begin_all_gather(tensor, out, what=what)
        return _LockstepTransfer(
            _begin(self._lockstep, lambda: super(LockstepGroup, self).begin_all_gather(tensor, out, what=what)),
            self._lockstep,
        )

    def begin_all_to_all(self, rows: Tensor, out: Tensor, *, what: str) -> Transfer:
        if self.is_newcomer:
            return super().begin_all_to_all(rows, out, what=what)
        return _LockstepTransfer(
            _begin(self._lockstep, lambda: super(LockstepGroup, self).begin_all_to_all(rows, out, what=what)),
            self._lockstep,
        )

    def broadcast(self, tensor: Tensor, *, source: int = 0, what: str = "broadcast") -> None:
        self._run_in_lockstep(lambda: super(LockstepGroup, self).broadcast(tensor, source=source, what=what))

    def gather_objects(self, value: Any) -> list[Any]:
        return self._run_in_lockstep(lambda: super(LockstepGroup, self).gather_objects(value))

    def broadcast_object(self, value: Any, *, source: int = 0) -> Any:
        return self._run_in_lockstep(lambda: super(LockstepGroup, self).broadcast_object(value, source=source))

    def barrier(self) -> None:
        self._run_in_lockstep(super().barrier)

    def settle(self) -> None:
        """Raise Disrupted on all workers of the replica where something has failed on any of them: here, or between
        replicas. A newcomer is alone."""
        if not self.is_newcomer:
            _settle(self._lockstep, super().settle)
            self._lockstep.settle()

    def _run_in_lockstep(self, operation: Callable[[], T]) -> T:
        """Run a blocking operation, and compare how it ended; a newcomer is alone and need not compare."""
        if self.is_newcomer:
            return operation()
        found: list[T] = []
        if self._lockstep.failure is None:
            try:
                found.append(operation())
            except Disrupted as failure:
                self._lockstep.note(failure)
        self._lockstep.settle()
        return found[0]


class CrossReplicaGroup(ElasticGroup):
    """A group between replicas. A failed sum is kept for the next operation of the whole run, and raises nothing,
    because its caller may have collectives within the replica before that. Anything else raises Disrupted at once.
    """

    def __init__(self, lockstep: Lockstep, *, recorder: FlightRecorder) -> None:
        super().__init__(None, generation=-1, recorder=recorder)
        self._lockstep = lockstep
        self._joined = ""  # its name in the flight recorder

    def take(self, group: WorkerGroup, generation: int, *, ranks: Sequence[int]) -> None:
        self._recorder.part(self._joined)
        self._name = self._joined = f"across {ranks[0]}-{ranks[-1]}, generation {generation}"
        self._recorder.join(self._joined, ranks)
        super().take(group, generation, ranks=ranks)

    def all_reduce(self, tensor: Tensor, *, what: str) -> Transfer:
        return _DeferredFailureTransfer(
            _begin(self._lockstep, lambda: super(CrossReplicaGroup, self).all_reduce(tensor, what=what)), self._lockstep
        )

    def begin_all_gather(self, tensor: Tensor, out: Tensor, *, what: str) -> Transfer:
        return _DeferredFailureTransfer(
            _begin(self._lockstep, lambda: super(CrossReplicaGroup, self).begin_all_gather(tensor, out, what=what)),
            self._lockstep,
        )

    def begin_all_to_all(self, rows: Tensor, out: Tensor, *, what: str) -> Transfer:
        return _DeferredFailureTransfer(
            _begin(self._lockstep, lambda: super(CrossReplicaGroup, self).begin_all_to_all(rows, out, what=what)),
            self._lockstep,
        )

    def all_to_all(self, parts: Sequence[Tensor], out: Sequence[Tensor], *, what: str) -> None:
        self._keep_failure(lambda: super(CrossReplicaGroup, self).all_to_all(parts, out, what=what))

    def broadcast(self, tensor: Tensor, *, source: int = 0, what: str = "broadcast") -> None:
        self._keep_failure(lambda: super(CrossReplicaGroup, self).broadcast(tensor, source=source, what=what))

    def gather_objects(self, value: Any) -> list[Any]:
        return self._keep_failure(lambda: super(CrossReplicaGroup, self).gather_objects(value))

    def broadcast_object(self, value: Any, *, source: int = 0) -> Any:
        return self._keep_failure(lambda: super(CrossReplicaGroup, self).broadcast_object(value, source=source))

    def barrier(self) -> None:
        self._keep_failure(super().barrier)

    def settle(self) -> None:
        """Return when what was sent here has ended; a failure is kept for the next operation of the whole run."""
        _settle(self._lockstep, super().settle)

    def _keep_failure(self, operation: Callable[[], T]) -> T:
        if self._lockstep.failure is not None:
            raise self._lockstep.failure
        try:
            return operation()
        except Disrupted as failure:
            self._lockstep.note(failure)
            raise


def _begin(lockstep: Lockstep, begin: Callable[[], Transfer]) -> Transfer | None:
    """Begin a transfer; return None if this or something before has failed."""
    if lockstep.failure is not None:
        return None
    try:
        return begin()
    except Disrupted as failure:
        lockstep.note(failure)
        return None


def _settle(lockstep: Lockstep, settle: Callable[[], None]) -> None:
    """Settle a group where nothing has failed before, and keep its failure."""
    if lockstep.failure is None:
        try:
            settle()
        except Disrupted as failure:
            lockstep.note(failure)


class _DeferredFailureTransfer:
    """A transfer whose failure is kept; its tensor is invalid then."""

    def __init__(self, transfer: Transfer | None, lockstep: Lockstep) -> None:
        self._transfer, self._lockstep = transfer, lockstep

    def wait(self) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is None or self._lockstep.failure is not None:
            return
        try:
            transfer.wait()
        except Disrupted as failure:
            self._lockstep.note(failure)


class _LockstepTransfer(_DeferredFailureTransfer):
    """A transfer after which the replica's workers compare."""

    _is_settled = False

    def wait(self) -> None:
        if not self._is_settled:
            self._is_settled = True
            super().wait()
            self._lockstep.settle()
