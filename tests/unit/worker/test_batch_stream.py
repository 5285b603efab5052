"""Batches in hand: divided again among those that are left when members are lost, and let go of when the loop goes
on.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.utils.data import Dataset, IterableDataset

from paceline.comm.elastic.generation_group import ElasticGroup
from paceline.comm.elastic.lockstep_group import Lockstep
from paceline.comm.group import Disrupted, SingleWorkerGroup
from paceline.elastic.membership_messages import MembershipView
from paceline.plan import Batch
from paceline.worker.data.batch_stream import BatchStream, StreamSource
from paceline.worker.data.load_balancing import LoadBalancer
from paceline.worker.data.micro_batch_size import MicroBatchSize
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.data.stream_position import StreamPosition
from paceline.worker.loop.between_steps import BetweenSteps
from paceline.worker.loop.local_rounds import LocalRounds
from paceline.worker.membership.consensus import Consensus
from paceline.worker.membership.generation_builder import ElasticMembership
from paceline.worker.membership.state_transfer import MemberProgress
from paceline.worker.topology.parallel_groups import single_worker_replicas

NUM = 30


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> int:
        return index


class Lines(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(NUM))


class Data(list[int]):
    """Of a micro-batch."""


class Place(SingleWorkerGroup):
    def __init__(self, index: int, size: int) -> None:
        self.index, self.size = index, size


def stream_of(
    group: Place,
    *,
    each: int = 1,
    micro: int = 2,
    data: Any = None,
    replicas: Callable[[], Sequence[int]] | None = None,
    loaders: int = 0,
    has_equal_runs: bool = False,
) -> BatchStream:
    """Batches of 10, of this worker of replicas of `each`, all of which run different micro-batches."""
    return BatchStream(
        StreamSource(
            dataset=data or Numbers(),
            epochs=1,
            collate=Data,
            loaders=loaders,
            prefetch=2,
            pin=False,
            name="train",
            has_equal_runs=has_equal_runs,
        ),
        MicroBatchSize(Batch(size=10, micro=micro, shuffle=False)),
        cursor=StreamPosition(),
        group=group,
        run_pass=lambda batch: iter(()),
        together=cast("Any", lambda operation: operation()),
        balance=LoadBalancer(is_on=False),
        timeout_s=10.0,
        axes=dataclasses.replace(single_worker_replicas(group), shard_group=Place(group.index % each, each)),
        replicas=replicas,
    )


def run(batch: StepBatch) -> list[int | None]:
    """The numbers of the micro-batches that a gradient pass runs, None for a void one; each has the data of its own
    samples.
    """
    for number, micro, _ in batch.runs():
        assert batch.read(number) == list(range(micro.start, micro.stop))
    return [None if is_void else micro.index for _, micro, is_void in batch.runs()]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_equal_runs_are_as_many_on_every_worker_and_each_micro_batch_is_run_once(size: int) -> None:
    own: dict[int, list[int]] = {}
    for index in range(size):
        for step, batch in enumerate(stream_of(Place(index, size), has_equal_runs=True).steps(lambda: 1)):
            assert batch.num_runs == -(-len({*range(batch.start, batch.stop, 2)}) // size)
            own.setdefault(step, []).extend(number for number in run(batch) if number is not None)
    assert all(sorted(numbers) == list(range(len(numbers))) and numbers for numbers in own.values())


@pytest.mark.parametrize("data", [Numbers(), Lines()], ids=["map", "iterable"])
@pytest.mark.parametrize("left", [2, 1])
def test_replicas_of_several_workers_run_each_micro_batch_once_and_each_worker_as_many_as_the_others(
    data: Any, left: int
) -> None:
    ran: list[list[list[int | None]]] = []  # of each worker, in this batch and the next one
    for worker in range(left * 2):
        group = Place(worker, 6)
        stream = stream_of(group, each=2, data=data)
        steps = stream.steps(lambda: 1)
        batch = next(steps)
        run(batch)
        group.size = left * 2
        stream.members_changed()
        stream.reassign(batch)
        ran.append([run(batch), run(next(steps))])
    for one, other in zip(ran[::2], ran[1::2], strict=True):
        assert [*map(len, one)] == [*map(len, other)], "who makes another run waits in it for nobody"
    for step in range(2):
        assert sorted(number for one in ran for number in one[step] if number is not None) == [*range(5)]


@pytest.mark.parametrize("data", [Numbers(), Lines()], ids=["map", "iterable"])
@pytest.mark.parametrize("micro", [2, 5])
def test_where_replicas_take_steps_by_themselves_no_share_of_the_lost_one_is_left(data: Any, micro: int) -> None:
    present, own = [0, 1, 2], 2  # with two micro-batches this one has none of them at first
    group = Place(own, 3)
    stream = stream_of(group, micro=micro, data=data, replicas=lambda: present)
    batch = next(stream.steps(lambda: 1))
    assert sorted(batch.shares) == [0, 1, 2]
    present.remove(1)
    group.index, group.size = 1, 2
    stream.members_changed()
    stream.reassign(batch)
    assert sorted(batch.shares) == [0, 2]
    assert batch.shares[own] == batch.micros
    assert batch.num_here == sum(one.num_samples for one in batch.micros) > 0
    assert sorted(one.index for share in batch.shares.values() for one in share) == [*range(10 // micro)]


class Pair(SingleWorkerGroup):
    """With another one, who is past the operation."""

    size = 2

    def __init__(self, other: MemberProgress) -> None:
        self._other = other

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, self._other]


def between_steps_of(stream: BatchStream) -> BetweenSteps:
    """As far as shares are divided again."""
    between = BetweenSteps.__new__(BetweenSteps)
    between.streams, between.balance = {"train": stream}, LoadBalancer(is_on=False)
    return between


@pytest.mark.parametrize(("others_step", "needs_reassignment"), [(0, True), (1, False)])
def test_who_is_behind_keeps_the_share_that_others_have_begun_a_round_with(
    others_step: int, needs_reassignment: bool
) -> None:
    """Two of three have come to the end of an operation before the round's first step, and one has gone on from it."""
    stream = stream_of(Place(0, 3), replicas=lambda: (0, 1, 2))
    next(stream.steps(lambda: 1))  # as it was divided among all three
    form = MembershipView(generation=1, members=(0, 1), planned=False, holds=False, reason="worker 2 was lost")
    head = SimpleNamespace(
        newest=1,
        acknowledges=False,
        has_acknowledged=False,
        tell=lambda op, **told: None,
        wait_for=lambda *_, **__: form,
    )
    consensus = Consensus(
        ElasticGroup(SingleWorkerGroup(), generation=0, ranks=(0, 1, 2)),
        rank=0,
        coordinator=cast("Any", head),
        timeout_s=10.0,
        elastic=ElasticMembership(
            build=lambda form, is_hurry: Pair(MemberProgress(position=1, holds_result=False, step=others_step)),
            has_formed=lambda generation, has_formed: has_formed,
            lockstep=Lockstep(),
            workers_each=1,
        ),
    )
    mode = LocalRounds.__new__(LocalRounds)
    mode._between = between_steps_of(stream)
    mode._rounds = cast("Any", SimpleNamespace(is_open=False, members_changed=lambda: None))
    mode._consensus = consensus
    consensus.attach(cast("Any", SimpleNamespace(step=0, regrouped=mode.members_changed)))
    consensus._position = 0
    assert consensus.drop(Disrupted("worker 2 was lost"), holds_result=True)
    assert stream.needs_reassignment is needs_reassignment


@pytest.mark.parametrize("is_left_behind", [False, True])
def test_who_ends_a_round_when_others_are_in_the_next_one_deals_anew_after_that(is_left_behind: bool) -> None:
    stream = stream_of(Place(0, 3), replicas=lambda: (0, 1, 2))
    next(stream.steps(lambda: 1))  # as it was divided among all three
    mode = LocalRounds.__new__(LocalRounds)
    mode._between, mode._log = between_steps_of(stream), cast("Any", SimpleNamespace(step=1))
    rounds = SimpleNamespace(is_open=True, is_left_behind=is_left_behind, end=lambda *_, **__: True)
    mode._rounds = cast("Any", rounds)
    mode._files = cast("Any", SimpleNamespace(ledger=SimpleNamespace(settle=lambda: None)))
    mode._takers, mode._has_new_members = {}, True  # a member was lost meanwhile
    mode._try_to_end_round(is_wanted=False)
    assert stream.needs_reassignment is not is_left_behind
    rounds.is_left_behind = False  # the next one is over
    mode._try_to_end_round(is_wanted=False)
    assert stream.needs_reassignment


@pytest.mark.parametrize("data", [Numbers(), Lines()], ids=["map", "iterable"])
def test_a_batch_that_is_kept_as_rounds_do_does_not_keep_its_data(data: Any) -> None:
    kept: list[StepBatch] = []
    seen: list[weakref.ref[Any]] = []
    for batch in stream_of(Place(0, 1), data=data).steps(lambda: 1):
        assert [one() for one in seen] == [None] * len(seen)
        run(batch)
        kept.append(batch)
        seen += [weakref.ref(batch.read(number)) for number in range(len(batch))]
    assert len(kept) == NUM // 10


@pytest.mark.parametrize("data", [Numbers(), Lines()], ids=["map", "iterable"])
def test_loaders_end_with_the_loop_and_not_with_the_process_which_would_kill_them(data: Any) -> None:
    stream = stream_of(Place(0, 1), data=data, loaders=1)
    batches = stream.steps(lambda: 1)
    run(next(batches))
    assert len(multiprocessing.active_children()) == 1
    cast("Any", batches).close()  # the user's loop has ended before the stream
    assert multiprocessing.active_children() == []
