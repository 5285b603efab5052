"""What the members of a new generation tell each other, and how a newcomer gets the run's state from one of them."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from paceline.comm.elastic.generation_group import ElasticGroup
from paceline.comm.group import Disrupted
from paceline.errors import SyncError

__all__ = ["MemberProgress", "StateHolder", "operation_counts", "transfer_state"]


@dataclasses.dataclass(frozen=True, slots=True)
class MemberProgress:
    """How far a member is when a new generation begins."""

    position: int | None  # operations that it has completed; None: a newcomer
    holds_result: bool  # of the next one
    step: int


class StateHolder(Protocol):
    """The owner of the state that is equal on all members: the worker's `ElasticState`."""

    @property
    def step(self) -> int: ...

    def snapshot(self) -> Any:
        """The whole state, to be sent to a newcomer."""

    def fill(self, state: Any) -> None:
        """Take over what `snapshot` returned on another member."""

    def regrouped(self) -> None:
        """The members have changed."""

    def settle(self) -> None:
        """Save, and wait until the checkpoint is complete; on all members."""

    @property
    def wants_save(self) -> bool:
        """Whether the time for a save has come, as this member sees it."""
        ...

    def save(self) -> None:
        """Save, and go on while the checkpoint is written; on all members."""


def operation_counts(progress: list[MemberProgress], position: int | None, holds_result: bool) -> bool:
    """Whether the interrupted operation counts: a member is past it, or all members that were in it have its result."""
    if position is None:
        return False
    others = [one for one in progress if one.position is not None]
    if any(one.position is not None and one.position > position for one in others):
        if not holds_result:
            raise SyncError("a member has completed an operation whose result another one does not have")
        return True
    return all(one.holds_result for one in others if one.position == position)


def transfer_state(
    members: ElasticGroup,
    progress: list[MemberProgress],
    *,
    rank: int,
    workers_each: int,
    holder: StateHolder | None,
    servers_have_state: bool,
) -> tuple[int, Any] | None:
    """Send the run's state to the newcomers of a generation, one after the other; return what this worker received.

    A worker of a replica needs the state of the workers at the same index of other replicas, so the first of those that
    has the newest state sends it. `servers_have_state`: members need none from each other.
    """
    newcomers = [index for index, one in enumerate(progress) if one.position is None]
    if not newcomers or holder is None:
        return None
    positions = [one.position for one in progress if one.position is not None]
    if not positions and servers_have_state:
        return None
    if not positions:
        raise Disrupted("none of the members that met has the run's state")
    ranks, newest = members.ranks, max(positions)
    peers = [index for index in range(len(progress)) if ranks[index] % workers_each == rank % workers_each]
    source = next(index for index in peers if progress[index].position == newest)
    own = progress[members.index]
    if members.index == source:
        state = (newest + operation_counts(progress, own.position, own.holds_result), holder.snapshot())
        for index in peers:
            if index in newcomers:
                members.send_object(state, to=index)
    elif own.position is None:
        return members.receive_object(source=source)
    return None
