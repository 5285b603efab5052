"""Every all-reduce algorithm sums what it should, on real workers: for all types and sizes, the same bits on all."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from forked import Apart, World
from layout_runs import EXACT, assert_same, by_stepper, in_one_epoch
from paceline.comm import algorithm_selection
from paceline.comm.algorithm_selection import AllReduceSettings, TimingTable, with_selected_algorithm
from paceline.comm.allreduce.schedule_executor import ScheduleExecution
from paceline.comm.allreduce.scheduled_group import ScheduledGroup, SelectedAlgorithm
from paceline.comm.group import DIRECT_SUM_BYTES, FIRST_PAYLOAD_BYTES, Group
from paceline.events import AllReduceChosen, Event, decode
from paceline.plan import AllReduce, Batch, Plan
from paceline.schedule.allreduce.build import build
from paceline.schedule.allreduce.worker_program import program_of

ALGORITHMS = ("ring", "tree", "halving", "hierarchical")
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
)
SIZES = (1, 2, 3, 64, 1000)  # of float32; other types have one size each
LARGE = 1_100_001  # more chunks than workers
HOSTS = {2: (0, 1), 3: (0, 0, 1), 4: (0, 0, 1, 1), 5: (0, 1, 0, 1, 0)}
SLICED = {4: (0, 0, 1, 1), 5: (0, 0, 1, 1, 1)}  # hosts of several workers, who share what goes between them
CPU = torch.device("cpu")


def given(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """What a worker brings: whole numbers, whose sums every type holds exactly."""
    return ((torch.arange(numel) * (rank + 3) + 7 * rank) % 11 - (0 if dtype == torch.uint8 else 5)).to(dtype)


def rough(rank: int, numel: int) -> Tensor:
    """Numbers whose sum depends on the order of additions."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (rank % 3)


def reference(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def over_gloo() -> Group:
    world = dist.group.WORLD
    assert world is not None
    return Group(world, device=CPU)


def group_of(hosts: tuple[int, ...]) -> ScheduledGroup:
    over = over_gloo()
    return ScheduledGroup(
        over,
        choose=lambda _: SelectedAlgorithm("ring"),
        hosts=hosts,
        ranks=range(over.size),
        timeout_s=30,
        check=lambda: None,
    )


def summed(group: ScheduledGroup, name: str, dtypes: Sequence[torch.dtype]) -> tuple[list[str], int]:
    """What went wrong by this algorithm; and of a rough sum what this worker has, to be compared by the caller."""
    size, rank = group.size, group.index
    wrong: list[str] = []
    kinds = [(torch.float32, numel) for numel in SIZES] + [(dtype, 333) for dtype in dtypes]
    tensors = [given(rank, numel, dtype) for dtype, numel in kinds]
    flights = [group.begin(name, tensor, what="test") for tensor in tensors]
    for flight in reversed(flights):  # several at once, waited for in another order
        flight.wait()
    for (dtype, numel), tensor in zip(kinds, tensors, strict=True):
        if not torch.equal(tensor, reference([given(one, numel, dtype) for one in range(size)])):
            wrong.append(f"{dtype} {numel}")
    large = rough(rank, LARGE)
    group.begin(name, large, what="test").wait()
    expected = reference([rough(one, LARGE).double() for one in range(size)])
    if not torch.allclose(large.double(), expected, rtol=1e-5, atol=1e-3):
        wrong.append("large")
    holes = given(rank, 400, torch.float32).view(20, 20).t()[::2]
    group.begin(name, holes, what="test").wait()
    wide = reference([given(one, 400, torch.float32) for one in range(size)]).view(20, 20).t()[::2]
    if not torch.equal(holes, wide):
        wrong.append("holes")
    return wrong, zlib.crc32(large.numpy().tobytes())


def sum_everything(worker: Any) -> dict[str, Any]:
    """What went wrong, and what every worker has, by algorithm."""
    size, rank = worker.workers, worker.rank
    group = group_of(HOSTS[size])
    found: dict[str, Any] = {name: summed(group, name, DTYPES) for name in ALGORITHMS}
    with torch.inference_mode():
        made_there = torch.ones(100)
        group.begin("ring", made_there, what="test").wait()
    found["inference"] = (made_there.tolist() == [size] * 100, 0)
    # As on a GPU: round by round, in batches.
    world = dist.group.WORLD
    assert world is not None
    in_rounds = given(rank, 500, torch.float32)
    program = program_of(build("ring", num_workers=size, num_chunks=2 * size), rank)
    execution = ScheduleExecution(
        program=program, flat=in_rounds, peers=range(size), report_wait=lambda peer, number: None
    )
    execution.enqueue(Group(world, device=torch.device("cuda")), tag=7)
    expected = reference([given(one, 500, torch.float32) for one in range(size)])
    found["batches"] = (torch.equal(in_rounds, expected), 0)
    empty = torch.zeros(0)
    group.all_reduce(empty, what="test").wait()
    group.barrier()
    group.close()
    return found


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_algorithm_sums_all_types_and_sizes_and_gives_all_the_same_bits(world: World, size: int) -> None:
    results = world(sum_everything, size)
    for name in ALGORITHMS:
        assert [found[name][0] for found in results] == [[]] * size, name
        assert len({found[name][1] for found in results}) == 1, name
    assert all(found["inference"][0] and found["batches"][0] for found in results)


@pytest.mark.parametrize("size", SLICED)
def test_what_hosts_sum_in_their_memory_goes_between_them_in_slices(world: World, tmp_path: Path, size: int) -> None:
    def sum_by_hosts(worker: Any) -> tuple[list[str], int]:
        host = f"host{SLICED[size][worker.rank]}"
        wanted = AllReduceSettings(algorithm="hierarchical", host=host, timeout_s=30, report=lambda _: None)
        store = dist.FileStore(str(tmp_path / "near"), size)
        group = with_selected_algorithm(over_gloo(), wanted, ranks=range(size), store=store)
        assert isinstance(group, ScheduledGroup) and group.host_group is not None and group.host_group.shares_memory
        found = summed(group, "hierarchical", DTYPES)
        group.barrier()
        group.close()
        return found

    results = world(sum_by_hosts, size)
    assert [wrong for wrong, _ in results] == [[]] * size
    assert len({bits for _, bits in results}) == 1


def test_a_table_is_of_the_hosts_that_it_was_measured_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithm_selection, "SLOW_S", math.inf)  # however busy this machine is

    def meet_again(worker: Any) -> list[int]:
        """How often was timed, when the second host is another one, and when the first one of them is back."""
        told, known = list[Event](), dict[tuple[str, ...], TimingTable]()
        nums: list[int] = []
        for hosts in ("ab", "ab", "ac", "ab"):
            host = hosts[worker.rank]
            wanted = AllReduceSettings(algorithm="auto", host=host, timeout_s=30, report=told.append, known=known)
            with_selected_algorithm(over_gloo(), wanted, ranks=range(2), store=dist.HashStore(), reports=True)
            nums.append(len(told))
        assert wanted.latest(2) == known["a", "b"] and wanted.latest(3) == {}
        return nums

    assert world(meet_again, 2) == [[1, 1, 2, 2]] * 2


def test_on_slow_links_the_ways_are_tried_on_sums_of_the_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithm_selection, "SLOW_S", 0.0)

    def sum_much(worker: Any) -> tuple[list[list[str]], list[float], list[list[str]]]:
        told = list[Event]()
        wanted = AllReduceSettings(algorithm="auto", host=f"host{worker.rank}", timeout_s=30, report=told.append)
        group = with_selected_algorithm(over_gloo(), wanted, ranks=range(2), store=dist.HashStore(), reports=True)
        sums: list[float] = []
        for num_bytes in (5 << 20, 3 << 19, 5 << 20, 5 << 20, 5 << 20, 1 << 10, 5 << 20):
            tensor = torch.full((num_bytes // 4,), worker.rank + 1.0)
            group.all_reduce(tensor, what="test").wait()
            sums += [float(tensor.min()), float(tensor.max())]
        tables = group.gather_objects(wanted.latest(2))
        assert tables[0] == tables[1]
        group.close()
        chosen = [event for event in told if isinstance(event, AllReduceChosen)]
        assert all(event.took_s == 0.0 for event in chosen)
        return [sorted(event.chosen, key=int) for event in chosen], sums, [sorted(row) for row in tables[0].values()]

    everything = sorted(["backend", "ring", "tree", "halving"])
    found = [["4096", str(5 << 20)]], [3.0] * 14, [["backend"], everything]
    assert world(sum_much, 2) == [found] * 2


def test_a_named_way_is_timed_too_and_8_mb_only_where_the_time_suffices(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(algorithm_selection, "SLOW_S", math.inf)
    monkeypatch.setattr(algorithm_selection, "BUDGET_S", 0.0)
    monkeypatch.setattr(algorithm_selection, "LONGEST_S", math.inf)  # a busy machine is no slow link

    def found(worker: Any) -> list[tuple[int, list[str]]]:
        wanted = AllReduceSettings(algorithm="halving", host=f"host{worker.rank}", timeout_s=30, report=lambda _: None)
        group = with_selected_algorithm(over_gloo(), wanted, ranks=range(2), store=dist.HashStore(), reports=True)
        group.barrier()
        group.close()
        return [(size, list(row)) for size, row in wanted.latest(2).items()]

    assert world(found, 2) == [[(size, ["halving"]) for size in (4 << 10, 64 << 10, 1 << 20)]] * 2


def plan_by(algorithm: str) -> Plan:
    sync = AllReduce(algorithm=algorithm, bucket_bytes=16_000)  # pyright: ignore[reportArgumentType]
    return Plan(batch=Batch(size=16, micro=3), compute=EXACT, sync=sync)


def test_training_is_the_same_by_every_algorithm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uneven shares, a last partial batch, tied weights, a buffer and a clipped norm; two hosts of two and one."""
    monkeypatch.setattr(algorithm_selection, "SLOW_S", math.inf)
    oracle = World(tmp_path).one_process(in_one_epoch, plan_by("auto"))
    for algorithm in ("auto", *ALGORITHMS):
        (tmp_path / algorithm).mkdir()
        world = Apart(tmp_path / algorithm, (0, 0, 1))
        results = world(in_one_epoch, 3, plan_by(algorithm))
        assert_same(results, oracle, 1e-9)
        lines = [decode(line).event for line in (world.worker_dir(0) / "events.jsonl").read_text().splitlines()]
        chosen = [event for event in lines if isinstance(event, AllReduceChosen)]
        assert bool(chosen) == (algorithm == "auto")
        for event in chosen:
            assert set(event.table["4096"]) == {"backend", *ALGORITHMS}
            assert event.chosen.keys() == event.table.keys() and event.hosts == 2


def in_four_epochs(worker: Any) -> dict[str, Any]:
    return by_stepper(worker, drop=0.0, epochs=4)


def test_training_is_the_same_while_ways_are_tried_and_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(algorithm_selection, "SLOW_S", 0.0)
    oracle = World(tmp_path).one_process(in_four_epochs, plan_by("auto"))
    world = Apart(tmp_path, (0, 0, 1))
    assert_same(world(in_four_epochs, 3, plan_by("auto")), oracle, 1e-9)
    lines = [decode(line).event for line in (world.worker_dir(0) / "events.jsonl").read_text().splitlines()]
    told = [event for event in lines if isinstance(event, AllReduceChosen)]
    tried = [set(row) for size, row in told[-1].table.items() if size != "4096"]
    assert tried and all(row == {"backend", *ALGORITHMS} for row in tried)
    assert all(event.took_s == 0.0 for event in told)


def exchange_what_is_small(worker: Any) -> Tensor:
    """Compare sums of few numbers, rows and objects with what they should be; returns a rough sum."""
    assert dist.group.WORLD is not None
    group, size, rank = Group(dist.group.WORLD, device=CPU), worker.workers, worker.rank
    for dtype in DTYPES:
        largest = DIRECT_SUM_BYTES // (size * dtype.itemsize)
        for numel in (1, largest, largest + 1):
            tensor = given(rank, numel, dtype)
            group.all_reduce(tensor, what="numbers").wait()
            assert torch.equal(tensor, reference([given(other, numel, dtype) for other in range(size)])), dtype
        rows = torch.empty(size, 5, dtype=dtype)
        group.begin_all_gather(given(rank, 5, dtype), rows, what="rows").wait()
        assert torch.equal(rows, torch.stack([given(other, 5, dtype) for other in range(size)])), dtype
    with torch.inference_mode():  # as in evaluation
        turned = given(rank, 6, torch.float32).view(2, 3).T
        group.all_reduce(turned, what="a tensor with holes").wait()
    assert torch.equal(turned, reference([given(other, 6, torch.float32) for other in range(size)]).view(2, 3).T)
    for length in (
        0,
        10,
        FIRST_PAYLOAD_BYTES,
        3 * FIRST_PAYLOAD_BYTES,
    ):  # of one it is all in the first message, of another it is not
        words = [other * "a" + length * "b" * (other % 2) for other in range(size)]
        assert group.gather_objects(words[rank]) == words
        assert group.broadcast_object(words[rank], source=1) == words[1]
    total = rough(rank, 20)
    group.all_reduce(total, what="rough numbers").wait()
    return total


@pytest.mark.parametrize("size", [2, 3, 5])
def test_what_is_small_goes_from_each_to_each_and_gives_all_the_same_bits(world: World, size: int) -> None:
    first, *others = world(exchange_what_is_small, size)
    torch.testing.assert_close(first, reference([rough(rank, 20) for rank in range(size)]))
    assert all(torch.equal(first, other) for other in others)
