"""Which way a group's sums take: the one that the plan names, or, for "auto", the fastest for each size, measured once.
A named one is timed, too, so that the network is known.

Before the first sum the ways are timed with tensors of a few sizes, as far as a fraction of a second goes. That is not
far on slow links, nor do small tensors tell how large ones go there: a connection that rests, as between two rounds of
some algorithms, begins slowly again. So where nothing of about its size was timed a sum is put on trial: the first ones
of that size take one way each, one after the other, and all later ones the fastest of them. Nothing is sent for it.

All members decide alike. What is measured counts at the group's first member, which tells the others; it keeps the
table for each constellation of hosts, so that members who come back need not be measured again. Where all meet in one
host's memory there is nothing to choose, and on GPUs the back end chooses by itself.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from paceline.comm.allreduce.scheduled_group import BACKEND, ScheduledGroup, SelectedAlgorithm, backend_group_of
from paceline.comm.elastic.generation_group import GenerationGroup, connect_gloo
from paceline.comm.group import Group, SingleWorkerGroup, WorkerGroup
from paceline.comm.shared_memory.shared_group import shared_memory_unavailable, with_shared_memory
from paceline.errors import SyncError
from paceline.events import AllReduceChosen, Event, Note
from paceline.schedule.allreduce.build import FLAT
from paceline.schedule.allreduce.hierarchical import hosts_of

__all__ = [
    "BACKEND",
    "SIZES",
    "AlgorithmChoice",
    "AllReduceSettings",
    "TimingTable",
    "fastest_algorithm",
    "next_s",
    "with_selected_algorithm",
]

SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)  # timed in this order, 8 MB where the time suffices
BUDGET_S, LONGEST_S = 0.25, 0.5  # for all of them, and for smaller ones that go beyond it, once each way
NUM_RUNS = 3  # of each; one where that would take too long
NUM_BARRIERS = 3
SLOW_S = 0.01  # links where a barrier takes longer are not timed in advance
REACH, NEAR = 1.5, 4.0  # times as large as the largest size in the table, or as any other, a sum takes its way
ALIKE = 1.1  # sums that may differ so much are of one trial
MARGIN = 0.95  # of the back end's time: what is hardly faster is not worth a thread

TimingTable = Mapping[int, Mapping[str, float]]  # by bytes and algorithm: seconds


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AllReduceSettings:
    """What a worker wants of all groups that sum gradients, and what it has learnt."""

    algorithm: str  # as in the plan
    host: str  # of this worker: a name that no other host has
    timeout_s: float
    tell: Callable[[Event], None]
    known: dict[tuple[str, ...], TimingTable] = dataclasses.field(default_factory=dict)  # by the members' hosts

    def latest(self, size: int) -> TimingTable:
        """What was found last for a group of so many; empty where nothing was."""
        return next((table for hosts, table in reversed(self.known.items()) if len(hosts) == size), {})

    def learn(self, hosts: tuple[str, ...], table: TimingTable) -> None:
        """A group of workers of these hosts has been made, and its members know this."""
        self.known.pop(hosts, None)
        self.known[hosts] = table


def with_selected_algorithm(
    group: WorkerGroup,
    wanted: AllReduceSettings,
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
    over = backend_group_of(group)
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
        names: list[str] = over.gather_objects(wanted.host)
        hosts, near = tuple(map(list(dict.fromkeys(names)).index, names)), None
        if algorithm in ("auto", "hierarchical"):
            near = _near(over, hosts, wanted, ranks=ranks, store=store, check=check)
        is_timed = over.device.type == "cpu"
        choice = AlgorithmChoice(_candidates(algorithm, hosts) if is_timed else (algorithm,))
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
        if is_timed:
            timing = _SharedTimings(scheduled, tuple(names), choice.names, wanted, tells=tells)
            choice.table, choice.agree = timing.known_or_measured(), timing.agreed
    except SyncError:
        made.close()
        raise
    return scheduled


def _candidates(algorithm: str, hosts: Sequence[int]) -> tuple[str, ...]:
    """The ways that a sum may take."""
    if algorithm != "auto":
        return (algorithm,)
    return (BACKEND, *FLAT, *(["hierarchical"] if len(set(hosts)) < len(hosts) else []))


class AlgorithmChoice:
    """Which of several ways a sum of so many bytes takes: the fastest by the `table`, in which each trial's outcome
    comes; `agree(table)` returns the same one on all members. The first way until there is that."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.agree: Callable[[TimingTable], TimingTable] | None = None
        self.table: TimingTable = {}
        self._trials: dict[int, dict[str, float]] = {}  # under way, by bytes: seconds of the ways that have been tried

    def pick(self, num_bytes: int) -> SelectedAlgorithm:
        """Which one to take. All members must ask, for the same sizes in the same order."""
        first, *others = self.names
        if self.agree is None:
            return SelectedAlgorithm(first)
        size = max(num_bytes, min(SIZES))
        if (nearest := _nearest_size(self.table, size)) is not None:
            return SelectedAlgorithm(fastest_algorithm(self.table[nearest]) if others else first)
        tried = next((one for one in self._trials if max(one, size) <= ALIKE * min(one, size)), size)
        trial = self._trials.setdefault(tried, {})
        name = next(one for one in self.names if one not in trial)
        return SelectedAlgorithm(name, functools.partial(self._take, tried, name))

    def _take(self, tried: int, name: str, seconds: float) -> None:
        """A sum on trial has taken so long; all members must call after the last one."""
        trial = self._trials[tried]
        trial[name] = seconds
        if len(trial) == len(self.names) and self.agree is not None:
            self.table = self.agree({**self.table, tried: self._trials.pop(tried)})


def _nearest_size(table: TimingTable, size: int) -> int | None:
    """The size in the table whose way a sum of `size` bytes takes; None: none is near."""
    largest = max(table, default=0)
    if size > largest:  # of very large ones the rate alone counts
        return largest if max(SIZES) <= largest or size <= REACH * largest else None
    nearest = min(table, key=lambda one: abs(math.log(size / one)))
    return nearest if nearest <= NEAR * size and size <= NEAR * nearest else None


def fastest_algorithm(row: Mapping[str, float]) -> str:
    """The algorithm that takes the least time, where it is clearly less than the back end's own."""
    best = min(row, key=lambda name: row[name])
    return best if row[best] < MARGIN * row[BACKEND] else BACKEND


@dataclasses.dataclass(frozen=True, slots=True)
class _SharedTimings:
    """What is known of members on these hosts, or else what is measured: that of the first member."""

    group: ScheduledGroup
    hosts: tuple[str, ...]
    names: Sequence[str]  # of the ways that there are
    wanted: AllReduceSettings
    tells: bool

    def known_or_measured(self) -> TimingTable:
        """The table to begin with; all members must call."""
        known = self.group.broadcast_object(self.wanted.known.get(self.hosts))
        if known is not None:
            self.wanted.learn(self.hosts, known)
            return known
        began = time.perf_counter()
        table = measure_algorithms(self.group, self.names)
        self._learn(table, took_s=time.perf_counter() - began)
        return table

    def agreed(self, table: TimingTable) -> TimingTable:
        """The first member's table after a trial; all members must call."""
        table = self.group.broadcast_object(table)
        self._learn(table, took_s=0.0)
        return table

    def _learn(self, table: TimingTable, *, took_s: float) -> None:
        self.wanted.learn(self.hosts, table)
        if self.tells and any(len(row) > 1 for row in table.values()):
            chosen = AllReduceChosen(
                members=self.group.size,
                hosts=len(set(self.hosts)),
                took_s=took_s,
                table={str(size): dict(table[size]) for size in sorted(table)},
                chosen={str(size): fastest_algorithm(table[size]) for size in sorted(table)},
            )
            self.wanted.tell(chosen)


def measure_algorithms(group: ScheduledGroup, names: Sequence[str]) -> TimingTable:
    """Time each way at some sizes, as far as the time goes; all members must call, and all get the first one's
    numbers. On slow links only a barrier is timed, which says what the back end takes for what is small."""
    began = time.perf_counter()
    barriers_s: list[float] = []
    for _ in range(NUM_BARRIERS):
        before = time.perf_counter()
        group.barrier()
        barriers_s.append(time.perf_counter() - before)
    barrier_s = group.broadcast_object(min(barriers_s[1:]))  # the first one waits for whoever comes late
    if barrier_s > SLOW_S:
        return {min(SIZES): {BACKEND: barrier_s}}
    table: dict[int, dict[str, float]] = {}
    spent_s, num_runs = 0.0, NUM_RUNS
    for size in SIZES:
        left_s, run_s = BUDGET_S - spent_s, next_s(table)
        num_runs = NUM_RUNS if NUM_RUNS * run_s <= left_s else 1
        if run_s > (left_s if size == max(SIZES) else LONGEST_S):
            break
        tensor = torch.zeros(size // 4)
        row = {name: statistics.median(_timed(group, name, tensor) for _ in range(num_runs)) for name in names}
        table[size], spent_s = group.broadcast_object((row, time.perf_counter() - began))
    return table


def next_s(table: TimingTable) -> float:
    """What one run of all ways at the next size would take: as much more as from the last but one to the last."""
    rows_s = [sum(row.values()) for row in table.values()]
    number = len(rows_s)
    if number < 2:
        return sum(rows_s)
    slope = max(0.0, rows_s[-1] - rows_s[-2]) / (SIZES[number - 1] - SIZES[number - 2])
    return rows_s[-1] + slope * (SIZES[number] - SIZES[number - 1])


def _timed(group: ScheduledGroup, name: str, tensor: torch.Tensor) -> float:
    began = time.perf_counter()
    group.begin(name, tensor, what="the timing of all-reduce").wait()
    return time.perf_counter() - began


def _near(
    over: Group,
    hosts: Sequence[int],
    wanted: AllReduceSettings,
    *,
    ranks: Sequence[int],
    store: dist.Store,
    check: Callable[[], None],
) -> WorkerGroup | None:
    """The workers of this host, who meet in memory; None where that is not so on every host with several."""
    team = next(team for team in hosts_of(hosts) if over.index in team)
    found: WorkerGroup = SingleWorkerGroup()
    if len(team) > 1 and over.device.type == "cpu":
        backend = connect_gloo(
            dist.PrefixStore(f"host_{team[0]}", store),
            index=team.index(over.index),
            size=len(team),
            timeout_s=wanted.timeout_s,
            check=check,
        )
        found = GenerationGroup(backend, device=over.device, check=check, timeout_s=wanted.timeout_s)
    try:
        if found.size > 1:
            found, reason = with_shared_memory(
                found, timeout_s=wanted.timeout_s, is_lost=check, ranks=[ranks[one] for one in team]
            )
            if reason is not None and found.index == 0 and len(set(hosts)) > 1:  # of a single host it is told already
                wanted.tell(shared_memory_unavailable("workers of one host sum gradients", reason))
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
