"""Which workers a session has, in which order: all of the run, or those that are present in an elastic one.

In an elastic run (`--plan replicas=1-4`) workers are lost, leave and come. Between two sessions those that are present
agree on the next one's members. Workers whose state counts come first, in the order in which they got it: rank 0 gives
its state to the others (`State.sync`), so it must not be one that has just come.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from paceline.comm.group import Disrupted
from paceline.errors import SyncError
from paceline.worker.membership.consensus import Consensus
from paceline.worker.program_worker import ProgramPlace, program_place

__all__ = [
    "ADDED",
    "REMOVED",
    "SessionMembers",
    "announced_change",
    "exit_code_of_stop",
    "has_newcomers_only",
    "has_state",
    "may_skip_sync",
    "number_of_changes",
    "open_among_present",
    "plan_sync",
    "undo",
    "why_over",
]

T = TypeVar("T")
REMOVED, ADDED = 1, 2  # Horovod's numbers for what becomes of hosts; both: 3
NEVER = math.inf

_num_opened = 0  # sessions that this process has tried to open in an elastic run
_state_since = NEVER  # the generation in which this worker first had the state of all
_needs_sync = True  # this worker waits for the others in `State.sync` when the next session is open
_present: tuple[PresentWorker, ...] = ()  # those of the newest session of an elastic run


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SessionMembers:
    """The members of one session, and this worker's place among them and on its host."""

    name: str  # that no other session of the run has
    ranks: tuple[int, ...]  # of the run's workers, by their rank in the session
    rank: int  # of this worker, in the session
    local_rank: int
    local_size: int
    cross_rank: int  # of this host
    cross_size: int  # hosts
    is_homogeneous: bool  # all hosts have the same number of workers

    @classmethod
    def fixed(cls, place: ProgramPlace, ranks: Sequence[int] | None, number: int) -> SessionMembers:
        """All workers of a run, or these. Raises ValueError where this worker is not one of them."""
        assignment = place.assignment
        members = tuple(ranks or range(assignment.workers))
        if assignment.rank not in members:
            raise ValueError(f"worker {assignment.rank} is not one of the ranks {list(members)} of hvd.init(comm)")
        rank, is_one_host = members.index(assignment.rank), assignment.hosts == 1
        return cls(
            name=f"{number}/{'-'.join(map(str, members))}",
            ranks=members,
            rank=rank,
            local_rank=rank if is_one_host else assignment.local_rank,
            local_size=len(members) if is_one_host else assignment.local_workers,
            cross_rank=assignment.host_index,
            cross_size=assignment.hosts,
            is_homogeneous=is_one_host or assignment.local_workers * assignment.hosts == assignment.workers,
        )

    @classmethod
    def among(cls, present: Sequence[PresentWorker], own: int, *, generation: int) -> SessionMembers:
        """Those that are present; `own`: this worker's rank in the run."""
        ordered = sorted(present, key=lambda one: (one.state_since, one.rank))
        hosts, rank = [one.host for one in ordered], [one.rank for one in ordered].index(own)
        sizes = Counter(hosts)  # in the order in which they come first
        return cls(
            name=f"generation_{generation}/{max(one.num_opened for one in present)}",
            ranks=tuple(one.rank for one in ordered),
            rank=rank,
            local_rank=hosts[:rank].count(hosts[rank]),
            local_size=sizes[hosts[rank]],
            cross_rank=list(sizes).index(hosts[rank]),
            cross_size=len(sizes),
            is_homogeneous=len(set(sizes.values())) == 1,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PresentWorker:
    """What a worker tells the others before a session."""

    rank: int  # in the run
    host: int
    state_since: float  # the generation in which it first had the state of all; NEVER: it has not got it
    num_opened: int
    generation: int  # of which it is a member while it tells this
    planned: int  # the generation that it knows to be next; -1: none
    needs_sync: bool  # it waits for the others in `State.sync` when the session is open
    is_newcomer: bool  # it was started when others were at work


def has_state() -> None:
    """Take note that this worker has the state of all: it keeps its rank before those that come later."""
    global _state_since, _needs_sync
    _needs_sync = False
    consensus = program_place().consensus
    if consensus.elastic is not None:
        _state_since = min(_state_since, float(consensus.generation))
        consensus.committed()


def plan_sync(is_needed: bool) -> None:
    """Set whether this worker waits for the others in `State.sync` when the next session is open. Where one of them
    does, all have to."""
    global _needs_sync
    _needs_sync = is_needed


def may_skip_sync() -> bool:
    """Return whether no worker of the newest session waits for the others in `State.sync`."""
    return not any(one.needs_sync for one in _present)


def has_newcomers_only() -> bool:
    """Return whether all workers of the newest session were started when others were at work, and none of them has had
    the state of all: it was lost with those others."""
    return bool(_present) and all(one.is_newcomer and one.state_since == NEVER for one in _present)


def undo(steps: int) -> None:
    """Take note that this worker has gone back by so many steps."""
    program_place().consensus.undo(steps)


def number_of_changes() -> int:
    """Return a number that grows whenever the members of the run change."""
    return program_place().consensus.generation


def announced_change() -> int:
    """Return what the next generation brings, as far as this worker knows: workers that come (2), that go (1), both
    (3), or nothing (0)."""
    consensus = program_place().consensus
    planned = consensus.planned
    if planned is None:
        return 0
    before, after = set(consensus.ranks), set(planned.members)
    return ADDED * bool(after - before) + REMOVED * bool(before - after) or ADDED


def exit_code_of_stop() -> int | None:
    """Return the exit code with which all are to leave, once their state is kept; None: they go on."""
    finish = program_place().consensus.finish
    return None if finish is None else finish.exit_code


def why_over(consensus: Consensus) -> str:
    """Return why the present session is over though none of its connections has failed; "" where it is not. Threads of
    a session may ask while the program ends, when `program_place` is gone already."""
    try:
        consensus.check()
    except Disrupted as disruption:
        return str(disruption)
    return ""


class ProgramStateHolder:
    """Stands in for the state of the run (the `StateHolder` of its consensus): a program's state travels with
    `State.sync`, and is kept by its commits. `steps()` counts those of the program."""

    wants_save = False

    def __init__(self, steps: Callable[[], int]) -> None:
        self._steps = steps

    @property
    def step(self) -> int:
        return self._steps()

    def snapshot(self) -> None:
        """Nothing: newcomers take part in the next `State.sync`."""

    def fill(self, state: object) -> None:
        """Nothing comes."""

    def regrouped(self) -> None:
        """The next session is one of the members of now."""

    def settle(self) -> None:
        """What counts was committed."""

    def save(self) -> None:
        """Commits are the program's own."""


def open_among_present(
    place: ProgramPlace, open_one: Callable[[SessionMembers], T], *, count_steps: Callable[[], int]
) -> T:
    """Open a session of the workers that are present, and return it; all of them call this. `count_steps()`: those that
    this worker has taken.

    Where one is lost meanwhile, the others begin again. Blocks a worker that has come later until the others reset
    their session, and all while there are fewer than the plan's least. Raises CleanExit where the run ends, or goes on
    without this worker.
    """
    global _num_opened
    consensus = place.consensus
    if _num_opened == 0:
        consensus.attach(ProgramStateHolder(count_steps))
        consensus.begin_steps()  # a newcomer becomes a member here
    while True:
        _num_opened += 1
        try:
            return open_one(_present_members(place))
        except SyncError as error:
            reason = str(error)
        # Outside of `except`: the error holds what was opened, and this may wait for long.
        consensus.drop(Disrupted(reason))


def _present_members(place: ProgramPlace) -> SessionMembers:
    global _present
    consensus, assignment = place.consensus, place.assignment

    def tell() -> list[PresentWorker]:
        planned = consensus.planned
        return place.group.gather_objects(
            PresentWorker(
                rank=assignment.rank,
                host=assignment.host_index,
                state_since=_state_since,
                num_opened=_num_opened,
                generation=consensus.generation,
                planned=-1 if planned is None else planned.generation,
                needs_sync=_needs_sync,
                is_newcomer=assignment.joins,
            )
        )

    while True:
        consensus.hold()
        present = consensus.run(tell)
        is_over = any(one.generation != consensus.generation for one in present)
        if consensus.holds or is_over or {one.rank for one in present} != set(consensus.ranks):
            continue  # the members have formed again after all had told
        if max(one.planned for one in present) > consensus.generation:
            consensus.change_over()  # where one knows of it, the others hear of it at any moment
            continue
        _present = tuple(present)
        return SessionMembers.among(present, assignment.rank, generation=consensus.generation)
