"""Chooses the all-reduce algorithm of a group: the one that the plan names, or, for "auto", the fastest for each size.

Before the first sum the algorithms are timed with tensors of a few sizes, within a fraction of a second. On slow links
that is too short, and small tensors do not predict large ones: a connection that rests, as between rounds of some
algorithms, starts slowly again. So a sum of a size that was not timed becomes a trial. The first sums of that size use
one algorithm each, in turn, and all later ones the fastest. Trials send nothing extra. A named algorithm is timed too,
so that the network's speed is known.

All members decide alike: the first member's measurements count, and it sends them to the others. It keeps the table for
each constellation of hosts, so returning members need not be measured again. If all members share one host's memory
there is no choice, and on GPUs the back end chooses by itself.
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
from paceline.comm.elastic.generation_group import GenerationGroup, connect_backend
from paceline.comm.group import Group, SingleWorkerGroup, WorkerGroup
from paceline.comm.peer_sockets.process_group import listening_address
from paceline.comm.shared_memory.setup import shared_memory_unavailable, with_shared_memory
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
BUDGET_S, LONGEST_S = 0.25, 0.5  # for all sizes; for one run of a size below the largest that exceeds the budget
NUM_RUNS = 3  # of each algorithm and size; one if three would take too long
NUM_BARRIERS = 3
SLOW_S = 0.01  # links where a barrier takes longer are not timed in advance
MAX_RATIO_ABOVE, MAX_RATIO = 1.5, 4.0  # a timed size decides for sizes within this ratio; ABOVE: beyond the largest
ALIKE = 1.1  # sizes within this ratio share a trial
MARGIN = 0.95  # of the back end's time: a smaller gain is not worth a thread

TimingTable = Mapping[int, Mapping[str, float]]  # by bytes and algorithm: seconds


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AllReduceSettings:
    """A worker's settings for all groups that sum gradients, and the timings it has measured."""

    algorithm: str  # as in the plan
    host: str  # of this worker: a name that no other host has
    timeout_s: float
    report: Callable[[Event], None]
    known: dict[tuple[str, ...], TimingTable] = dataclasses.field(default_factory=dict)  # by the members' hosts

    def latest(self, size: int) -> TimingTable:
        """Return the newest timings of a group of this size; empty if there are none."""
        return next((table for hosts, table in reversed(self.known.items()) if len(hosts) == size), {})

    def learn(self, hosts: tuple[str, ...], table: TimingTable) -> None:
        """Store the timings of a group of workers on these hosts."""
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
    reports: bool = False,
) -> WorkerGroup:
    """Return the group with the wanted algorithm; it may be `group` itself. All members must call; blocks.

    `store` is for this group alone, and for this one use. `check`, called while waiting, raises if the group has ended;
    `lost` is raised if a peer was lost. `reports`: this worker reports for the group. After an error the group is
    closed.
    """
    algorithm = wanted.algorithm
    if group.size == 1 or (algorithm in ("auto", "hierarchical") and group.shares_memory):
        return group
    transport = backend_group_of(group)
    if algorithm == "auto" and transport.device.type != "cpu":
        return group
    if group.shares_memory and reports:
        wanted.report(
            Note(
                text=f"AllReduce(algorithm={algorithm!r}): these workers send each other over the loopback network "
                "what they could sum in the memory that they share, which is faster; algorithm='auto' does that"
            )
        )
    check, made = check or _nothing, group
    try:
        names: list[str] = transport.gather_objects(wanted.host)
        hosts, host_group = tuple(map(list(dict.fromkeys(names)).index, names)), None
        if algorithm in ("auto", "hierarchical"):
            host_group = _host_group(transport, hosts, wanted, ranks=ranks, store=store, check=check)
        is_timed = transport.device.type == "cpu"
        choice = AlgorithmChoice(_candidates(algorithm, hosts) if is_timed else (algorithm,))
        made = scheduled = ScheduledGroup(
            group,
            choose=choice.pick,
            hosts=hosts,
            ranks=ranks,
            timeout_s=wanted.timeout_s,
            check=check,
            lost=lost,
            host_group=host_group,
        )
        if is_timed:
            timing = _SharedTimings(scheduled, tuple(names), choice.names, wanted, reports=reports)
            choice.table, choice.agree = timing.known_or_measured(), timing.agreed
    except SyncError:
        made.close()
        raise
    return scheduled


def _candidates(algorithm: str, hosts: Sequence[int]) -> tuple[str, ...]:
    """Return the algorithms that a sum may use."""
    if algorithm != "auto":
        return (algorithm,)
    return (BACKEND, *FLAT, *(["hierarchical"] if len(set(hosts)) < len(hosts) else []))


class AlgorithmChoice:
    """Chooses the fastest algorithm for a number of bytes from the `table`, to which each trial adds its result.

    `agree(table)` returns the same table on all members. Until there are timings, the first algorithm is used.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.agree: Callable[[TimingTable], TimingTable] | None = None
        self.table: TimingTable = {}
        self._trials: dict[int, dict[str, float]] = {}  # unfinished, by bytes: seconds of the algorithms tried so far

    def pick(self, num_bytes: int) -> SelectedAlgorithm:
        """Return the algorithm to use. All members must ask, for the same sizes in the same order."""
        first, *others = self.names
        if self.agree is None:
            return SelectedAlgorithm(first)
        size = max(num_bytes, min(SIZES))
        if (nearest := _nearest_size(self.table, size)) is not None:
            return SelectedAlgorithm(fastest_algorithm(self.table[nearest]) if others else first)
        tried = next((one for one in self._trials if max(one, size) <= ALIKE * min(one, size)), size)
        trial = self._trials.setdefault(tried, {})
        name = next(one for one in self.names if one not in trial)
        return SelectedAlgorithm(name, functools.partial(self._record, tried, name))

    def _record(self, tried: int, name: str, seconds: float) -> None:
        """Record the time of a trial; all members must call after the last one."""
        trial = self._trials[tried]
        trial[name] = seconds
        if len(trial) == len(self.names) and self.agree is not None:
            self.table = self.agree({**self.table, tried: self._trials.pop(tried)})


def _nearest_size(table: TimingTable, size: int) -> int | None:
    """Return the size in the table that is host_group enough to decide for `size` bytes; None if there is none."""
    largest = max(table, default=0)
    if size > largest:  # for very large tensors only bandwidth matters
        return largest if max(SIZES) <= largest or size <= MAX_RATIO_ABOVE * largest else None
    nearest = min(table, key=lambda one: abs(math.log(size / one)))
    return nearest if nearest <= MAX_RATIO * size and size <= MAX_RATIO * nearest else None


def fastest_algorithm(row: Mapping[str, float]) -> str:
    """Return the fastest algorithm, or the back end's own unless another one is clearly faster."""
    best = min(row, key=lambda name: row[name])
    return best if row[best] < MARGIN * row[BACKEND] else BACKEND


@dataclasses.dataclass(frozen=True, slots=True)
class _SharedTimings:
    """The first member's timings: known from an earlier group on these hosts, or measured."""

    group: ScheduledGroup
    hosts: tuple[str, ...]
    names: Sequence[str]  # of the candidate algorithms
    wanted: AllReduceSettings
    reports: bool

    def known_or_measured(self) -> TimingTable:
        """Return the table to begin with; all members must call."""
        known = self.group.broadcast_object(self.wanted.known.get(self.hosts))
        if known is not None:
            self.wanted.learn(self.hosts, known)
            return known
        began = time.perf_counter()
        table = measure_algorithms(self.group, self.names)
        self._learn(table, took_s=time.perf_counter() - began)
        return table

    def agreed(self, table: TimingTable) -> TimingTable:
        """Return the first member's table after a trial; all members must call."""
        table = self.group.broadcast_object(table)
        self._learn(table, took_s=0.0)
        return table

    def _learn(self, table: TimingTable, *, took_s: float) -> None:
        self.wanted.learn(self.hosts, table)
        if self.reports and any(len(row) > 1 for row in table.values()):
            chosen = AllReduceChosen(
                members=self.group.size,
                hosts=len(set(self.hosts)),
                took_s=took_s,
                table={str(size): dict(table[size]) for size in sorted(table)},
                chosen={str(size): fastest_algorithm(table[size]) for size in sorted(table)},
            )
            self.wanted.report(chosen)


def measure_algorithms(group: ScheduledGroup, names: Sequence[str]) -> TimingTable:
    """Time each algorithm at some sizes within the time budget; all members must call, and get the first one's numbers.

    On slow links only a barrier is timed, which gives the back end's latency.
    """
    began = time.perf_counter()
    barriers_s: list[float] = []
    for _ in range(NUM_BARRIERS):
        before = time.perf_counter()
        group.barrier()
        barriers_s.append(time.perf_counter() - before)
    barrier_s = group.broadcast_object(min(barriers_s[1:]))  # the first barrier waits for late members
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
    """Estimate one run of all algorithms at the next size, by extrapolation from the last two sizes."""
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


def _host_group(
    transport: Group,
    hosts: Sequence[int],
    wanted: AllReduceSettings,
    *,
    ranks: Sequence[int],
    store: dist.Store,
    check: Callable[[], None],
) -> WorkerGroup | None:
    """Return the shared-memory group of this host's workers; None unless every host with several workers has one."""
    members = next(members for members in hosts_of(hosts) if transport.index in members)
    found: WorkerGroup = SingleWorkerGroup()
    if len(members) > 1 and transport.device.type == "cpu":
        backend = connect_backend(
            dist.PrefixStore(f"host_{members[0]}", store),
            index=members.index(transport.index),
            size=len(members),
            timeout_s=wanted.timeout_s,
            check=check,
            address=listening_address(),  # workers of one host may be in containers of their own
        )
        found = GenerationGroup(backend, device=transport.device, check=check, timeout_s=wanted.timeout_s)
    try:
        if found.size > 1:
            found, reason = with_shared_memory(
                found, timeout_s=wanted.timeout_s, check_peers=check, ranks=[ranks[one] for one in members]
            )
            if (
                reason is not None and found.index == 0 and len(set(hosts)) > 1
            ):  # on a single host it is reported already
                wanted.report(shared_memory_unavailable("workers of one host sum gradients", reason))
        without = torch.tensor([len(members) > 1 and not found.shares_memory], dtype=torch.int64)
        transport.all_reduce(without, what="whether hosts share memory").wait()
    except SyncError:
        found.close()
        raise
    if not int(without):
        return found
    found.close()
    return None


def _nothing() -> None:
    """The default check: only the transfer itself ends a wait."""
