"""Which way a group's sums take: the one that the plan names, or, for "auto", the fastest for each size, measured once.

On slow links the time is up before large tensors were timed, and small ones do not tell how large ones go there: a
connection that rests, as between two rounds of some algorithms, begins slowly again. So what is larger than all that
was timed is timed at its own size, when the first sum of it is due.

All members decide alike. What is measured counts at the group's first member, which tells the others; it keeps the
table for each constellation of hosts, so that members who come back need not be measured again. Where all meet in one
host's memory there is nothing to choose, and on GPUs the back end chooses by itself.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from paceline.comm.generation import GenerationGroup, assemble
from paceline.comm.group import Alone, Group, WorkerGroup
from paceline.comm.scheduled import BACKEND, ScheduledGroup, straight_of
from paceline.comm.shared import share, without_memory
from paceline.errors import SyncError
from paceline.events import AllReduceChosen, Event, Note
from paceline.schedule.allreduce.build import FLAT
from paceline.schedule.allreduce.hierarchical import hosts_of

__all__ = ["BACKEND", "Choice", "Table", "Wanted", "fastest", "on_its_way"]

SIZES = (4 << 10, 1 << 20, 64 << 10, 8 << 20)  # in this order, until the time is up; the first two always
BUDGET_S = 0.25
NUM_RUNS = 3  # of each; one on links where a message takes longer than this:
SLOW_S = 0.01
REACH = 1.5  # times the largest size that was timed may take its way
MARGIN = 0.95  # of the back end's time: what is hardly faster is not worth a thread

Table = Mapping[int, Mapping[str, float]]  # by bytes and algorithm: seconds


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What a worker wants of all groups that sum gradients, and what it has learnt."""

    algorithm: str  # as in the plan
    host: str  # of this worker: a name that no other host has
    timeout_s: float
    tell: Callable[[Event], None]
    known: dict[tuple[str, ...], Table] = dataclasses.field(default_factory=dict)  # by the members' hosts

    def latest(self) -> Table:
        """What was measured, or found, for the group that was made last; empty where nothing was."""
        return next(reversed(self.known.values()), {})

    def learn(self, hosts: tuple[str, ...], table: Table) -> None:
        """A group of workers of these hosts has been made, and its members know this."""
        self.known.pop(hosts, None)
        self.known[hosts] = table


def on_its_way(
    group: WorkerGroup,
    wanted: Wanted,
    *,
    ranks: Sequence[int],
    store: dist.Store,
    check: Callable[[], None] | None = None,
    lost: type[SyncError] = SyncError,
    tells: bool = False,
) -> WorkerGroup:
    """Return the group whose sums take the wanted way; it may be `group` itself. All members must call; blocks.

    `store` is for this group alone, and for this once. `check`, asked while waiting, raises where the group is over;
    `lost` is raised where a peer has gone. `tells`: this worker may speak for the group. After an error the group is
    closed.
    """
    algorithm = wanted.algorithm
    if group.size == 1 or (algorithm in ("auto", "hierarchical") and group.shares_memory):
        return group
    over = straight_of(group)
    if algorithm == "auto" and over.device.type != "cpu":
        return group
    if group.shares_memory and tells:
        wanted.tell(
            Note(
                text=f"AllReduce(algorithm={algorithm!r}): these workers send each other over the loopback network "
                "what they could sum in the memory that they share, which is faster; algorithm='auto' does that"
            )
        )
    check, made = check or _nothing, group
    try:
        hosts: tuple[int, ...] = tuple(range(group.size))
        names: list[str] = []
        near: WorkerGroup | None = None
        if algorithm in ("auto", "hierarchical"):
            names = over.gather_objects(wanted.host)
            hosts = tuple(map(list(dict.fromkeys(names)).index, names))
            near = _near(over, hosts, wanted, ranks=ranks, store=store, check=check)
        choice = Choice(algorithm)
        made = scheduled = ScheduledGroup(
            group,
            choose=choice.pick,
            hosts=hosts,
            ranks=ranks,
            timeout_s=wanted.timeout_s,
            check=check,
            lost=lost,
            near=near,
        )
        if algorithm == "auto":
            timing = _Timing(scheduled, tuple(names), wanted, tells=tells)
            choice.table, choice.look = timing.known_or_measured(), timing.look
    except SyncError:
        made.close()
        raise
    return scheduled


class Choice:
    """The algorithm for a size; BACKEND until there is a table. `look(bytes)` times a larger size than all that are in
    it, the same one on all members, and returns the table with it."""

    def __init__(self, algorithm: str) -> None:
        self._algorithm = algorithm
        self.table: Table = {}
        self.look: Callable[[int], Table] | None = None

    def pick(self, num_bytes: int) -> str:
        """Which one to take. All members must ask, for the same sizes in the same order; may block."""
        if self._algorithm != "auto":
            return self._algorithm
        if not self.table:
            return BACKEND
        size = min(num_bytes, max(SIZES))
        if self.look is not None and size > REACH * max(self.table):
            self.table = self.look(size)
        nearest = min(self.table, key=lambda size: abs(math.log(max(num_bytes, 1) / size)))
        return fastest(self.table[nearest])


def fastest(row: Mapping[str, float]) -> str:
    """The algorithm that takes the least time, where it is clearly less than the back end's own."""
    best = min(row, key=lambda name: row[name])
    return best if row[best] < MARGIN * row[BACKEND] else BACKEND


@dataclasses.dataclass(frozen=True, slots=True)
class _Timing:
    """What is known of members on these hosts, or else what is measured: that of the first member."""

    group: ScheduledGroup
    hosts: tuple[str, ...]
    wanted: Wanted
    tells: bool

    def known_or_measured(self) -> Table:
        """The table to begin with; all members must call."""
        known = self.group.broadcast_object(self.wanted.known.get(self.hosts))
        if known is None:
            return self._with({}, SIZES)
        self.wanted.learn(self.hosts, known)
        return known

    def look(self, num_bytes: int) -> Table:
        """Time one size more, that of a sum which is due; all members must call."""
        return self._with(self.wanted.known[self.hosts], (num_bytes // 4 * 4,))

    def _with(self, known: Table, sizes: Sequence[int]) -> Table:
        began, num_hosts = time.perf_counter(), len(set(self.hosts))
        names = [BACKEND, *FLAT, *(["hierarchical"] if num_hosts < self.group.size else [])]
        table = {**known, **measured(self.group, names, sizes)}
        self.wanted.learn(self.hosts, table)
        if self.tells:
            self.wanted.tell(
                AllReduceChosen(
                    members=self.group.size,
                    hosts=num_hosts,
                    took_s=time.perf_counter() - began,
                    table={str(size): dict(table[size]) for size in sorted(table)},
                    chosen={str(size): fastest(table[size]) for size in sorted(table)},
                )
            )
        return table


def measured(group: ScheduledGroup, names: Sequence[str], sizes: Sequence[int] = SIZES) -> Table:
    """Time each algorithm at each size, as far as the time goes; all members must call, and all get the first one's
    numbers."""
    began = time.perf_counter()
    group.barrier()
    before = time.perf_counter()
    group.barrier()
    num_runs = group.broadcast_object(1 if time.perf_counter() - before > SLOW_S else NUM_RUNS)
    table: dict[int, dict[str, float]] = {}
    for number, size in enumerate(sizes):
        tensor = torch.zeros(size // 4)
        row = {name: statistics.median(_timed(group, name, tensor) for _ in range(num_runs)) for name in names}
        table[size], spent_s = group.broadcast_object((row, time.perf_counter() - began))
        if number > 0 and spent_s > BUDGET_S:
            break
    return table


def _timed(group: ScheduledGroup, name: str, tensor: torch.Tensor) -> float:
    began = time.perf_counter()
    what = "the timing of all-reduce"
    flight = group.base.all_reduce(tensor, what=what) if name == BACKEND else group.walk(name, tensor, what=what)
    flight.wait()
    return time.perf_counter() - began


def _near(
    over: Group,
    hosts: Sequence[int],
    wanted: Wanted,
    *,
    ranks: Sequence[int],
    store: dist.Store,
    check: Callable[[], None],
) -> WorkerGroup | None:
    """The workers of this host, who meet in memory; None where that is not so on every host with several."""
    team = next(team for team in hosts_of(hosts) if over.index in team)
    found: WorkerGroup = Alone()
    if len(team) > 1 and over.device.type == "cpu":
        backend = assemble(
            dist.PrefixStore(f"host_{team[0]}", store),
            index=team.index(over.index),
            size=len(team),
            timeout_s=wanted.timeout_s,
            check=check,
        )
        found = GenerationGroup(backend, device=over.device, check=check, timeout_s=wanted.timeout_s)
    try:
        if found.size > 1:
            found, reason = share(found, timeout_s=wanted.timeout_s, is_lost=check, ranks=[ranks[one] for one in team])
            if reason is not None and found.index == 0 and len(set(hosts)) > 1:  # of a single host it is told already
                wanted.tell(without_memory("workers of one host sum gradients", reason))
        without = torch.tensor([len(team) > 1 and not found.shares_memory], dtype=torch.int64)
        over.all_reduce(without, what="who shares the memory of a host").wait()
    except SyncError:
        found.close()
        raise
    if not int(without):
        return found
    found.close()
    return None


def _nothing() -> None:
    """Nobody knows more than the transfer itself."""
