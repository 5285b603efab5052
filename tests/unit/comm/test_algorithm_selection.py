"""All-reduce algorithms are selected by size; abandoned threads are harmless; rounds in a stream sum as threads do."""

from __future__ import annotations

import dataclasses
import functools
import queue
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.cli.main import main
from paceline.comm.algorithm_selection import BACKEND, SIZES, AlgorithmChoice, TimingTable, fastest_algorithm, next_s
from paceline.comm.allreduce.async_collectives import CollectiveThreads
from paceline.comm.allreduce.schedule_executor import ReceiveBuffers, ScheduleExecution
from paceline.comm.allreduce.scheduled_group import ScheduledGroup, SelectedAlgorithm
from paceline.comm.group import Disrupted, PeerTensor
from paceline.errors import SyncError
from paceline.events import AllReduceChosen
from paceline.monitor.console.event_lines import event_line
from paceline.schedule.allreduce.build import build
from paceline.schedule.allreduce.rounds import Schedule, Send
from paceline.schedule.allreduce.worker_program import program_of

LIMIT_S = 20.0


def test_the_back_ends_own_is_taken_unless_another_is_clearly_faster() -> None:
    assert fastest_algorithm({BACKEND: 1.0, "ring": 0.97, "tree": 2.0}) == BACKEND
    assert fastest_algorithm({BACKEND: 1.0, "ring": 0.9, "tree": 0.8}) == "tree"


def auto(table: TimingTable) -> AlgorithmChoice:
    """What has found this, and agrees with itself."""
    choice = AlgorithmChoice((BACKEND, "ring", "tree"))
    choice.table, choice.agree = table, lambda table: table
    return choice


def test_a_size_takes_the_way_of_the_nearest_that_was_timed() -> None:
    assert AlgorithmChoice((BACKEND, "ring")).pick(1 << 30).name == BACKEND  # while they are being timed
    row_of = {4096: "tree", 1 << 14: "ring", 1 << 17: "tree", 1 << 20: "ring", 8 << 20: "tree"}
    choice = auto({size: {BACKEND: 2.0, name: 1.0} for size, name in row_of.items()})
    sizes = (1, 4096, 10_000, 40_000, 1 << 17, 1 << 19, 4 << 20, 1 << 30)
    found = [choice.pick(size) for size in sizes]
    assert [way.name for way in found] == ["tree", "tree", "ring", "ring", "tree", "ring", "tree", "tree"]
    assert not any(way.report for way in found)


def test_a_very_large_sum_is_no_trial_of_a_smaller_one() -> None:
    choice = auto({4096: {BACKEND: 2.0}})
    huge, large = 100 << 20, 9 << 20
    tried = [(size, way.name) for size in (huge, large, large, large) for way in [choice.pick(size)] if told(way, size)]
    assert tried == [(huge, BACKEND), (large, BACKEND), (large, "ring"), (large, "tree")]
    assert choice.table[large] == {BACKEND: large, "ring": large, "tree": large}
    assert choice.pick(huge) == SelectedAlgorithm(BACKEND)  # beyond 8 MB the rate alone counts


def told(way: SelectedAlgorithm, seconds: float) -> bool:
    assert way.report is not None
    way.report(seconds)
    return True


def test_of_a_named_way_the_first_sum_of_an_unknown_size_is_timed() -> None:
    choice = AlgorithmChoice(["halving"])
    choice.table, choice.agree = {4096: {BACKEND: 2.0}}, lambda table: table  # a barrier's time
    assert choice.pick(1) == SelectedAlgorithm("halving")
    way = choice.pick(1 << 20)
    assert way.name == "halving" and way.report is not None
    way.report(3.0)
    assert choice.table == {4096: {BACKEND: 2.0}, 1 << 20: {"halving": 3.0}}
    assert [choice.pick(size) for size in (1 << 19, 1 << 20)] == [SelectedAlgorithm("halving")] * 2


def test_sums_of_an_unknown_size_try_one_way_each_and_later_ones_take_the_fastest() -> None:
    seconds = {BACKEND: 2.0, "ring": 1.0, "tree": 4.0}
    choice = auto({4096: {BACKEND: 2.0}})
    assert choice.pick(6000).report is None and choice.pick(6200).report is not None  # half as large again
    tried = list[str]()
    for num_bytes in (3 << 20, 3 << 20, 100 << 10, (3 << 20) + 4096):  # another size's trial is one of its own
        way = choice.pick(num_bytes)
        assert way.report is not None
        way.report(seconds[way.name])
        tried.append(way.name)
    assert tried == [BACKEND, "ring", BACKEND, "tree"]
    assert choice.table == {4096: {BACKEND: 2.0}, 3 << 20: seconds}
    assert [choice.pick(size).name for size in (1 << 20, 3 << 20, 4 << 20)] == ["ring"] * 3
    assert choice.pick(100 << 10).name == "ring"  # its second trial
    assert [choice.pick(size).name for size in (5 << 20, 700 << 10)] == [BACKEND] * 2  # farther than what is near


def test_what_the_next_size_would_take_goes_on_as_the_last_two() -> None:
    def next_after(*seconds: float) -> float:
        return next_s(
            {size: {"ring": 0.25 * one, "tree": 0.75 * one} for size, one in zip(SIZES, seconds, strict=False)}
        )

    assert next_after() == 0.0
    assert next_after(1.0) == pytest.approx(1.0)  # at least
    assert next_after(0.1, 0.05) == pytest.approx(0.05)
    assert next_after(0.01, 0.07) == pytest.approx(0.07 + 0.06 * (1024 - 64) / 60)


@pytest.mark.parametrize(
    "chosen, says",
    [
        ({"4096": "tree", "65536": "tree", "1048576": "ring"}, "tree up to 64.0 KiB, above ring"),
        (
            {"4096": "tree", "65536": "ring", "1048576": "backend"},
            "tree up to 4.00 KiB, ring up to 64.0 KiB, above the back end's own",
        ),
        ({"4096": "ring", "1048576": "ring"}, "ring"),
    ],
)
def test_the_console_tells_the_choice_in_one_line(chosen: dict[str, str], says: str) -> None:
    event = AllReduceChosen(members=4, hosts=2, took_s=0.31, table={}, chosen=chosen)
    assert event_line(event) == f"all-reduce among 4 workers on 2 hosts: {says} (timed in 310 ms)"
    tried = dataclasses.replace(event, took_s=0.0)
    assert event_line(tried) == f"all-reduce among 4 workers on 2 hosts: {says} (tried on sums of the run)"


class Counting:
    """A base that sums nothing, and notes what it was asked for."""

    index, size, hosts, shares_memory = 0, 2, (0, 1), False

    def __init__(self) -> None:
        self.asked: list[str] = []

    def barrier(self) -> None:
        self.asked.append("barrier")

    def all_reduce(self, tensor: Tensor, *, what: str) -> Any:
        self.asked.append("sum")
        return SimpleNamespace(wait=lambda: self.asked.append("wait"))


def test_a_trial_begins_on_all_together_and_is_waited_for_before_it_is_told() -> None:
    base: Any = Counting()
    way = SelectedAlgorithm(BACKEND, lambda seconds: base.asked.append("told" if 0 <= seconds < LIMIT_S else "wrong"))
    group = ScheduledGroup.__new__(ScheduledGroup)
    group.__dict__.update(base=base, choose=lambda _: way, host_group=None, _under_way=[])
    group.all_reduce(torch.zeros(100), what="test").wait()
    assert base.asked == ["barrier", "sum", "wait", "told"]
    group.all_reduce(torch.zeros(10), what="a vote").wait()  # too small to be worth a trial
    assert base.asked[4:] == ["sum", "wait"]


def collective_threads(
    check: Any = lambda: None, *, timeout_s: float = LIMIT_S, lost: type[SyncError] = SyncError
) -> CollectiveThreads:
    return CollectiveThreads(num_threads=1, timeout_s=timeout_s, check=check, lost=lost)


def test_a_wait_that_is_too_long_names_the_awaited_worker() -> None:
    stuck, begun = threading.Event(), threading.Event()

    def do(collective: Any, _: ReceiveBuffers) -> None:
        collective.awaited = "worker 3 (ring, round 2 of 6)"
        begun.set()
        stuck.wait(LIMIT_S)

    threads = collective_threads(timeout_s=0.1)
    collective = threads.begin(do, what="all_reduce of weight")
    assert begun.wait(LIMIT_S)
    with pytest.raises(SyncError, match=r"in all_reduce of weight for worker 3 \(ring, round 2 of 6\): stopped, stuck"):
        collective.wait()
    assert not threads.close()  # its thread is left behind
    stuck.set()
    threads.join(LIMIT_S)
    with pytest.raises(SyncError, match="was closed"):
        threads.begin(do, what="another one")


def test_a_wait_ends_where_the_group_is_over_though_the_thread_waits_on() -> None:
    stuck, is_over = threading.Event(), threading.Event()

    def check() -> None:
        is_over.set() if not is_over.is_set() else _raise(Disrupted("worker 2 was killed"))

    def do(*_: object) -> None:
        stuck.wait(LIMIT_S)

    threads = collective_threads(check, lost=Disrupted)
    collective = threads.begin(do, what="all_reduce")
    with pytest.raises(Disrupted, match="worker 2 was killed"):
        collective.wait()
    assert not threads.close()
    stuck.set()
    threads.join(LIMIT_S)


def _raise(error: Exception) -> None:
    raise error


def test_a_lost_peer_is_named_and_the_next_collective_is_done() -> None:
    def do(collective: Any, _: ReceiveBuffers) -> None:
        collective.awaited = "worker 1 (tree, round 1 of 2)"
        raise RuntimeError("[tcp/pair.cc:1] Connection closed by peer [10.0.0.1]:1 GLHF!")

    threads = collective_threads(lost=Disrupted)
    broken, done = (
        threads.begin(do, what="all_reduce of bias"),
        threads.begin(lambda *_: None, what="the next one"),
    )
    with pytest.raises(Disrupted, match=r"a peer during all_reduce of bias: worker 1 \(tree, round 1 of 2\): .tcp"):
        broken.wait()
    done.wait()
    assert threads.close()


class Wires:
    """Ports of workers that are threads of this process. A tensor is read when it is received, and its send is over
    then: a worker that writes to its place before sends something else."""

    def __init__(self, size: int) -> None:
        self._queues: dict[tuple[int, int], queue.SimpleQueue[Sent]] = {
            (source, target): queue.SimpleQueue() for source in range(size) for target in range(size)
        }

    def port(self, index: int) -> Any:
        return SimpleNamespace(post=functools.partial(self._post, index))

    def _post(self, index: int, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], *, tag: int) -> list[Any]:
        begun = [Sent(tensor) for _, tensor in sends]
        for (peer, _), sent in zip(sends, begun, strict=True):
            self._queues[index, peer].put(sent)
        return [Coming(self._queues[peer, index], tensor) for peer, tensor in receives] + begun


class Sent:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.is_over = tensor, threading.Event()

    def wait(self) -> None:
        assert self.is_over.wait(LIMIT_S)


class Coming:
    def __init__(self, wire: queue.SimpleQueue[Sent], tensor: Tensor) -> None:
        self._wire, self._tensor = wire, tensor

    def wait(self) -> None:
        sent = self._wire.get(timeout=LIMIT_S)
        time.sleep(0)  # another worker may go first
        self._tensor.copy_(sent.tensor)
        sent.is_over.set()


@pytest.mark.parametrize("way", ["run", "enqueue"])
@pytest.mark.parametrize("num_chunks", [1, 11, 40])  # more than there are numbers
@pytest.mark.parametrize("name", ["ring", "tree", "halving", "hierarchical"])
def test_rounds_in_a_stream_and_executions_in_threads_give_the_sum(name: str, num_chunks: int, way: str) -> None:
    size, numel = 5, 37
    schedule = build(name, num_workers=size, num_chunks=num_chunks, hosts=(0, 1, 0, 1, 0))
    given = [torch.randn(numel, generator=torch.Generator().manual_seed(worker)) for worker in range(size)]
    found, wires = [one.clone() for one in given], Wires(size)

    def work(index: int) -> None:
        execution = ScheduleExecution(
            program=program_of(schedule, index),
            flat=found[index],
            peers=range(size),
            report_wait=lambda peer, number: None,
        )
        if way == "run":
            execution.run(wires.port(index), ReceiveBuffers(), tag=1)
        else:
            execution.enqueue(wires.port(index), tag=1)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert torch.allclose(found[0].double(), torch.stack(given).double().sum(0), atol=1e-5)
    assert all(torch.equal(one, found[0]) for one in found)


class StillGoing(Exception):
    """A execution waits for the end of a send."""


class Slow:
    """A port where all that is to be received is there, and no send ever ends: `begun` and `posted` are in their
    order, each a peer and its numbers."""

    def __init__(self) -> None:
        self.begun: list[PeerTensor] = []
        self.posted: list[PeerTensor] = []

    def post(self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], *, tag: int) -> list[Any]:
        self.begun += sends
        self.posted += receives
        return [SimpleNamespace(wait=lambda: None) for _ in receives] + [
            SimpleNamespace(wait=self._wait) for _ in sends
        ]

    def _wait(self) -> None:
        raise StillGoing


@pytest.mark.parametrize("name", ["ring", "tree", "halving"])
def test_a_chunk_is_in_its_next_round_while_another_one_is_still_on_its_way_in_an_earlier_one(name: str) -> None:
    schedule = build(name, num_workers=4, num_chunks=8)
    for worker in range(4):
        execution = ScheduleExecution(
            program=program_of(schedule, worker),
            flat=torch.zeros(64),
            peers=range(4),
            report_wait=lambda peer, number: None,
        )
        sent_in = [number for number, (out, _) in enumerate(execution.program.rounds) for _ in out]  # in their order
        chunks, rounds = Slow(), Slow()
        with pytest.raises(StillGoing):
            execution.run(chunks, ReceiveBuffers(), tag=1)
        with pytest.raises(StillGoing):
            execution.enqueue(rounds, tag=1)  # what a barrier between rounds comes to
        assert len({*sent_in[: len(rounds.begun)]}) == 1 < len({*sent_in[: len(chunks.begun)]})
        assert len(rounds.posted) < len(chunks.posted)


def test_nothing_is_written_to_a_place_from_which_it_is_still_sent() -> None:
    rounds = ((Send(0, 1, 0, 1, False),), (Send(2, 0, 0, 1, True),))
    schedule = Schedule(name="made up", num_workers=3, num_chunks=1, rounds=rounds)
    found, wires = [torch.full((4,), float(worker)) for worker in (5, 6, 7)], Wires(3)

    def work(index: int) -> None:
        program = program_of(schedule, index)
        execution = ScheduleExecution(
            program=program, flat=found[index], peers=range(3), report_wait=lambda peer, number: None
        )
        execution.run(wires.port(index), ReceiveBuffers(), tag=1)

    first, second, third = (threading.Thread(target=work, args=(index,)) for index in range(3))
    first.start()
    third.start()
    third.join(LIMIT_S)  # worker 0 has what it adds, and worker 1 has not looked yet
    first.join(0.2)
    second.start()
    for thread in (first, second):
        thread.join(LIMIT_S)
    assert [one.tolist() for one in found] == [[12.0] * 4, [5.0] * 4, [7.0] * 4]


def test_the_command_draws_a_plans_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "replicas=4+allreduce(algorithm=hierarchical)", "--draw", "--hosts", "2"]) == 0
    assert "0      +2-3>1    +0-1>0    +2-3>3    +0-1>2" in capsys.readouterr().out
    assert main(["plan", "replicas=4", "--draw"]) == 0
    assert "auto: timed in the run. Name an algorithm to see it: ring, tree" in capsys.readouterr().out
    assert main(["plan", "replicas=2+allreduce(algorithm=ring)", "--draw", "--hosts", "3"]) == 2
    assert "--hosts is 3; it must be from 1 to the number of replicas, 2." in capsys.readouterr().err
