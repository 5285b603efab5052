"""How the workers of a replica drop what is under way: all of them at the same place, or none.

Where replicas of several workers come and go, a transfer between replicas may be broken off at one worker, and not at
the next one of the same replica, which goes on to something that only they do together (a gather of rows, a sum of
partial results, a stage's output), and waits there for ever. Inside a living replica nothing is ever broken off: who
loses one worker is out as a whole. So the workers of a replica compare, inside of it, at places that all of them come
to: after each operation of the whole run. Between these a failure is kept, and nothing more is sent between replicas.

`LockstepGroup` is the group of the whole run, `CrossReplicaGroup` one of those who are at the same place of each
replica. Replicas of one worker need neither: there is nobody to compare with.
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
    """Knows whether something failed here, and asks the others of the `replica`, all of whom come to each question."""

    def __init__(self, replica: WorkerGroup | None = None) -> None:
        self._replica: WorkerGroup = SingleWorkerGroup() if replica is None else replica
        self._failure: Disrupted | None = None  # of which the others may not know
        self._is_told = False  # all know, and are on their way out of the operation

    @property
    def failure(self) -> Disrupted | None:
        """What failed here since the last question."""
        return self._failure

    def note(self, failure: Disrupted) -> None:
        """Keep a failure for the next question; the first one is the cause of the others."""
        self._failure = self._failure or failure

    def settle(self) -> None:
        """Return where nothing has failed on any worker of the replica; raise Disrupted on all of them elsewhere."""
        failure = self._failure
        if self.all_say(failure is None):
            return
        self._failure, self._is_told = None, True
        raise failure or Disrupted("another worker of this replica knows that a member was lost")

    def part(self, failure: Disrupted) -> None:
        """Make sure that all workers of the replica leave the operation under way, as this one does."""
        if not self._is_told:
            self.note(failure)
            with contextlib.suppress(Disrupted):
                self.settle()
        self._failure, self._is_told = None, False

    def all_say(self, yes: bool) -> bool:
        """Whether all workers of the replica say yes."""
        against = torch.zeros(1) if yes else torch.ones(1)
        self._replica.all_reduce(against, what="whether the replica goes on").wait()
        return not float(against)


class LockstepGroup(ElasticGroup):
    """The group of the whole run: each operation ends well on all workers of a replica, or on none of them."""

    def __init__(self, lockstep: Lockstep, *, recorder: FlightRecorder) -> None:
        super().__init__(None, generation=-1, recorder=recorder)
        self._lockstep = lockstep

    def all_reduce(self, tensor: Tensor, *, what: str) -> Transfer:
        if self.is_newcomer:
            return CompletedTransfer()
        return _LockstepTransfer(
            _begun(self._lockstep, lambda: super(LockstepGroup, self).all_reduce(tensor, what=what)), self._lockstep
        )

    def begin_all_gather(self, tensor: Tensor, out: Tensor, *, what: str) -> Transfer:
        if self.is_newcomer:
            return super().begin_all_gather(tensor, out, what=what)
        return _LockstepTransfer(
            _begun(self._lockstep, lambda: super(LockstepGroup, self).begin_all_gather(tensor, out, what=what)),
            self._lockstep,
        )

    def begin_all_to_all(self, rows: Tensor, out: Tensor, *, what: str) -> Transfer:
        if self.is_newcomer:
            return super().begin_all_to_all(rows, out, what=what)
        return _LockstepTransfer(
            _begun(self._lockstep, lambda: super(LockstepGroup, self).begin_all_to_all(rows, out, what=what)),
            self._lockstep,
        )

    def broadcast(self, tensor: Tensor, *, source: int = 0, what: str = "broadcast") -> None:
        self._settled(lambda: super(LockstepGroup, self).broadcast(tensor, source=source, what=what))

    def gather_objects(self, value: Any) -> list[Any]:
        return self._settled(lambda: super(LockstepGroup, self).gather_objects(value))

    def broadcast_object(self, value: Any, *, source: int = 0) -> Any:
        return self._settled(lambda: super(LockstepGroup, self).broadcast_object(value, source=source))

    def barrier(self) -> None:
        self._settled(super().barrier)

    def _settled(self, operation: Callable[[], T]) -> T:
        """Do a blocking operation, and compare how it ended; a newcomer is alone, and has nobody to lose."""
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
    """A group between replicas. A sum that fails is kept for the next operation of the whole run, and says nothing:
    who waits for it may have something to do inside the replica before that. Anything else raises Disrupted at once.
    """

    def __init__(self, lockstep: Lockstep, *, recorder: FlightRecorder) -> None:
        super().__init__(None, generation=-1, recorder=recorder)
        self._lockstep = lockstep
        self._joined = ""  # under which name the ring knows it

    def take(self, group: WorkerGroup, generation: int, *, ranks: Sequence[int]) -> None:
        self._recorder.part(self._joined)
        self._name = self._joined = f"across {ranks[0]}-{ranks[-1]}, generation {generation}"
        self._recorder.join(self._joined, ranks)
        super().take(group, generation, ranks=ranks)

    def all_reduce(self, tensor: Tensor, *, what: str) -> Transfer:
        return _DeferredFailureTransfer(
            _begun(self._lockstep, lambda: super(CrossReplicaGroup, self).all_reduce(tensor, what=what)), self._lockstep
        )

    def begin_all_gather(self, tensor: Tensor, out: Tensor, *, what: str) -> Transfer:
        return _DeferredFailureTransfer(
            _begun(self._lockstep, lambda: super(CrossReplicaGroup, self).begin_all_gather(tensor, out, what=what)),
            self._lockstep,
        )

    def begin_all_to_all(self, rows: Tensor, out: Tensor, *, what: str) -> Transfer:
        return _DeferredFailureTransfer(
            _begun(self._lockstep, lambda: super(CrossReplicaGroup, self).begin_all_to_all(rows, out, what=what)),
            self._lockstep,
        )

    def all_to_all(self, parts: Sequence[Tensor], out: Sequence[Tensor], *, what: str) -> None:
        self._noting(lambda: super(CrossReplicaGroup, self).all_to_all(parts, out, what=what))

    def broadcast(self, tensor: Tensor, *, source: int = 0, what: str = "broadcast") -> None:
        self._noting(lambda: super(CrossReplicaGroup, self).broadcast(tensor, source=source, what=what))

    def gather_objects(self, value: Any) -> list[Any]:
        return self._noting(lambda: super(CrossReplicaGroup, self).gather_objects(value))

    def broadcast_object(self, value: Any, *, source: int = 0) -> Any:
        return self._noting(lambda: super(CrossReplicaGroup, self).broadcast_object(value, source=source))

    def barrier(self) -> None:
        self._noting(super().barrier)

    def _noting(self, operation: Callable[[], T]) -> T:
        if self._lockstep.failure is not None:
            raise self._lockstep.failure
        try:
            return operation()
        except Disrupted as failure:
            self._lockstep.note(failure)
            raise


def _begun(lockstep: Lockstep, begin: Callable[[], Transfer]) -> Transfer | None:
    """A transfer under way; None where something has failed, also this."""
    if lockstep.failure is not None:
        return None
    try:
        return begin()
    except Disrupted as failure:
        lockstep.note(failure)
        return None


class _DeferredFailureTransfer:
    """A transfer whose failure is kept; its tensor is of no use then."""

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
    """A transfer at whose end the replica's workers compare."""

    _is_settled = False

    def wait(self) -> None:
        if not self._is_settled:
            self._is_settled = True
            super().wait()
            self._lockstep.settle()
