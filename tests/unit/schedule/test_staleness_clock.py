"""Replicas that do not wait, and come and go: no update is too far behind, every batch is done once, nobody waits for
ever; all pause if one wishes it."""

from __future__ import annotations

import random

import pytest

import quick
from paceline.schedule.staleness_clock import AsyncBatch, Pause, Save, StalenessClock, StreamEnd


class Pretended:
    """Two servers and a clock, and workers that do everything in a random order; the slow ones act seldom.

    It keeps for itself which updates are on each server and in each worker's weights, so that it knows how far behind
    each one really is. An update is on the second server before it is on the first, and workers are lost in between,
    too.
    """

    def __init__(self, seed: int, *, staleness: int | None, workers: int, limit: int) -> None:
        self.chance, self.limit = random.Random(seed), limit
        self.saves = set(self.chance.sample(range(1, limit + 1), k=self.chance.choice([3, 3, limit])))
        self.clock = StalenessClock(staleness=staleness, limit=limit, workers=range(workers), saves=self.saves)
        self.alive, self.num_ever = set(range(workers)), workers
        self.has_lost = False
        self.slow = dict[int, int]()
        self.hand = dict[int, tuple[int, list[set[int]]]]()  # batch, and the updates that a worker's weights have
        self.permits = dict[int, int]()  # by worker: the number of its update that is being sent
        self.half = set[int]()  # of them, it is on the second server
        self.missing = dict[int, int]()  # of them, what its weights lacked of what a server had when it came there
        self.on: list[set[int]] = [set(), set()]  # updates on each server
        self.batches: list[list[int]] = [[], []]  # the same
        self.unnoted = dict[int, int]()  # batches that are done, and that their workers have not noted
        self.behind, self.saved, self.pauses = list[int](), list[int](), list[int]()
        self.over, self.paused, self.group = set[int](), set[int](), set[int]()

    def run(self, *, deaths: float, joins: float, wishes: float) -> None:
        for _ in range(600 * self.limit):
            active = sorted(self.alive - self.over - self.paused)
            if not active:
                break
            weights = [1 / self.slow.setdefault(one, self.chance.choice([1, 1, 4, 30])) for one in active]
            worker = self.chance.choices(active, weights)[0]
            if self.chance.random() < joins and len(self.alive) < 6 and not self.over:
                self.join()
            if self.chance.random() < wishes:
                self.clock.request_pause()
            if len(self.alive) > 1 and self.chance.random() < deaths:
                self.lose(worker)
            else:
                self.act(worker, deaths)
            self.resume()
        assert self.over == self.alive, "somebody waits for ever"

    def join(self) -> None:
        dead = [one for one in range(self.num_ever) if one not in self.alive]
        worker = self.chance.choice([*dead, self.num_ever])  # in the place of a lost one, or one more
        self.num_ever = max(self.num_ever, worker + 1)
        self.alive.add(worker)
        self.clock.join(worker)

    def lose(self, worker: int) -> None:
        self.has_lost = True
        for one in (self.alive, self.over, self.paused, self.group, self.half):
            one.discard(worker)
        for one in (self.hand, self.permits, self.unnoted, self.missing):  # what is unnoted the others hear of
            one.pop(worker, None)
        self.clock.lost(worker)

    def act(self, worker: int, deaths: float) -> None:
        if worker in self.unnoted:
            del self.unnoted[worker]
            self.clock.recorded(worker)
        elif worker in self.permits:
            self.apply(worker)
        elif worker in self.hand:
            self.permit(worker)
        else:
            self.ask(worker, deaths)

    def apply(self, worker: int) -> None:
        """The update comes to the next server, which leaves it out where it has one of the same batch."""
        server, number = (0, self.hand[worker][0]) if worker in self.half else (1, self.hand[worker][0])
        if number not in self.batches[server]:
            missing = len(self.on[server] - self.hand[worker][1][server])
            self.missing[worker] = max(missing, self.missing.get(worker, 0))
            self.on[server].add(self.permits[worker])
            self.batches[server].append(number)
        if server == 1:
            self.half.add(worker)
            return
        self.half.discard(worker)
        behind = self.clock.finish(worker)
        assert self.missing.pop(worker, 0) <= behind
        self.behind.append(behind)
        self.unnoted[worker] = self.hand[worker][0]
        del self.permits[worker], self.hand[worker]

    def permit(self, worker: int) -> None:
        before = self.clock.permitted
        behind = self.clock.permit(worker)
        if behind is None:
            return
        for server in (0, 1):
            on_way = {one for who, one in self.permits.items() if self.hand[who][0] not in self.batches[server]}
            missing = len((self.on[server] | on_way) - self.hand[worker][1][server])
            assert missing <= behind and (server == 1 or self.has_lost or missing == behind)
        self.permits[worker] = before

    def ask(self, worker: int, deaths: float) -> None:
        match self.clock.ask(worker):
            case AsyncBatch(number=number):
                assert not self.paused and number not in self.batches[0]
                self.hand[worker] = number, [set(one) for one in self.on]
            case Save(number=number):
                assert worker == min(self.alive)
                self.expect_all_before(number)
                if len(self.alive) > 1 and self.chance.random() < 50 * deaths:
                    self.lose(worker)
                else:
                    self.saved.append(number)
                    self.clock.saved(number)
            case Pause(number=number):
                self.expect_all_before(number)
                self.group = self.group or set(self.alive)
                self.pauses += [number] if not self.paused else []
                self.paused.add(worker)
            case StreamEnd():
                assert not self.paused
                self.expect_all_before(self.limit)
                self.over.add(worker)
            case None:
                pass

    def expect_all_before(self, number: int) -> None:
        assert not self.hand and not self.unnoted and all(sorted(one) == [*range(number)] for one in self.batches)

    def resume(self) -> None:
        """Once all have come together they go on."""
        if self.paused and self.paused == self.group:
            self.paused, self.group = set(), set()


def drive(
    seed: int,
    *,
    staleness: int | None,
    workers: int,
    deaths: float = 0.0,
    joins: float = 0.0,
    wishes: float = 0.0,
) -> Pretended:
    """A whole history; on each server each batch counts once, all saves are made, and the bound holds."""
    pretended = Pretended(seed, staleness=staleness, workers=workers, limit=40)
    pretended.run(deaths=deaths, joins=joins, wishes=wishes)
    assert all(sorted(one) == [*range(40)] for one in pretended.batches)
    assert pretended.saved == sorted(pretended.saves)
    assert staleness is None or max(pretended.behind) <= staleness
    return pretended


@pytest.mark.parametrize("staleness", [0, 1, 3, None])
@pytest.mark.parametrize(("deaths", "joins"), [(0.0, 0.0), (0.004, 0.0), (0.02, 0.02)])
def test_the_bound_holds_and_each_batch_is_done_once_whatever_workers_are_lost(
    staleness: int | None, deaths: float, joins: float
) -> None:
    for seed in quick.some(range(24), step=4):
        drive(seed, staleness=staleness, workers=2 + seed % 5, deaths=deaths, joins=joins)


@pytest.mark.thorough
@pytest.mark.parametrize("staleness", [2, None])
def test_all_pause_where_one_wishes_it_and_each_batch_is_done_once_all_the_same(staleness: int | None) -> None:
    pauses = 0
    for seed in quick.some(range(24), step=4):
        often = 0.01 * (seed % 2)
        told = drive(seed, staleness=staleness, workers=2 + seed % 5, deaths=often, joins=often, wishes=0.05)
        assert 0 not in told.pauses
        pauses += len(told.pauses)
    assert pauses > 40


def test_in_the_last_batch_a_wish_changes_nothing() -> None:
    clock = StalenessClock(staleness=None, limit=2, workers=range(2))
    assert [clock.ask(0), clock.ask(1)] == [AsyncBatch(0, 0), AsyncBatch(1, 0)]
    clock.permit(1)
    clock.finish(1)
    clock.request_pause()
    assert clock.ask(1) is None
    clock.permit(0)
    clock.finish(0)
    clock.recorded(0)
    assert clock.ask(0) is None  # 1 has not recorded it yet
    clock.recorded(1)
    assert [clock.ask(0), clock.ask(1)] == [StreamEnd(), StreamEnd()]


def test_a_wish_comes_before_a_save_and_after_it_the_save_is_made() -> None:
    clock = StalenessClock(staleness=None, limit=2, workers=range(2), saves=[1])
    assert clock.ask(0) == AsyncBatch(0, 0)
    assert clock.ask(1) is None
    clock.permit(0)
    clock.finish(0)
    clock.request_pause()
    assert clock.ask(1) is None
    clock.recorded(0)
    assert clock.ask(0) == clock.ask(1) == Pause(1)
    clock.request_pause()  # again, though it has led to nothing
    assert clock.ask(1) is None
    assert clock.ask(0) == Save(1)


def test_where_the_writer_has_left_nobody_waits_for_a_save() -> None:
    clock = StalenessClock(staleness=None, limit=2, workers=range(2), saves=[1, 2])
    assert clock.ask(0) == AsyncBatch(0, 0)
    clock.left(0)
    assert clock.ask(1) == AsyncBatch(0, 0)
    clock.permit(1)
    clock.finish(1)
    assert clock.ask(1) == AsyncBatch(1, 1)


@pytest.mark.parametrize("is_skipped", [False, True])
def test_nobody_saves_before_all_have_noted_what_is_done(is_skipped: bool) -> None:
    clock = StalenessClock(staleness=None, limit=3, workers=range(2), saves=[2])
    assert [clock.ask(0), clock.ask(1)] == [AsyncBatch(0, 0), AsyncBatch(1, 0)]
    clock.permit(0)
    clock.finish(0)
    if is_skipped:
        clock.skip(1)
    else:
        clock.permit(1)
        clock.finish(1)
    assert clock.ask(0) is None
    clock.recorded(1)
    assert clock.ask(0) is None
    clock.recorded(0)
    assert clock.ask(0) == Save(2)


def test_where_the_writer_is_lost_another_one_saves() -> None:
    clock = StalenessClock(staleness=None, limit=2, workers=range(2), saves=[1])
    assert clock.ask(0) == AsyncBatch(0, 0)
    clock.permit(0)
    clock.finish(0)
    clock.recorded(0)
    assert clock.ask(1) is None
    assert clock.ask(0) == Save(1)
    clock.lost(0)
    assert clock.ask(1) == Save(1)
    clock.saved(1)
    assert clock.ask(1) == AsyncBatch(1, 1)


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_who_saves_gets_batches_too_however_often_it_saves(every: int) -> None:
    clock = StalenessClock(staleness=None, limit=1000, workers=range(4), saves=range(every, 1000, every))
    waiting, has = [0, 1, 2, 3], list[int]()
    taken = dict.fromkeys(range(4), 0)
    for _ in range(2000):
        for worker in tuple(waiting):
            match clock.ask(worker):
                case AsyncBatch():
                    waiting.remove(worker)
                    has.append(worker)
                    taken[worker] += 1
                case Save(number=number):
                    clock.saved(number)
                    waiting.remove(worker)
                    waiting.append(worker)  # the others had asked before it could ask again
                case _:
                    pass
        if has:
            clock.permit(worker := has.pop(0))
            clock.finish(worker)
            clock.recorded(worker)
            waiting.append(worker)
    assert sum(taken.values()) == 1000
    assert min(taken.values()) >= 125, "half of an even share"


def test_where_who_saved_is_lost_another_one_takes_the_last_batch_before_the_next_save() -> None:
    clock = StalenessClock(staleness=None, limit=3, workers=range(2), saves=[1, 2])
    assert clock.ask(0) == AsyncBatch(0, 0)
    clock.permit(0)
    clock.finish(0)
    clock.recorded(0)
    assert clock.ask(0) == Save(1)
    assert clock.ask(1) is None
    clock.saved(1)
    assert clock.ask(1) is None
    clock.lost(0)
    assert clock.ask(1) == AsyncBatch(1, 1)


def test_what_was_permitted_to_a_lost_worker_counts_and_its_batch_is_handed_out_again() -> None:
    """One of the servers may have the update, another one not: a worker that computes without it is behind by it."""
    clock = StalenessClock(staleness=1, limit=9, workers=range(2))
    assert clock.ask(0) == AsyncBatch(0, 0)
    assert clock.ask(1) == AsyncBatch(1, 0)
    assert clock.permit(0) == 0
    clock.lost(0)
    assert clock.permit(1) == 1
    clock.finish(1)
    assert clock.ask(1) == AsyncBatch(0, 2)


def test_a_newcomer_gets_no_batch_until_all_have_come_back_from_a_pause() -> None:
    clock = StalenessClock(staleness=None, limit=4, workers=range(2))
    assert [clock.ask(0), clock.ask(1)] == [AsyncBatch(0, 0), AsyncBatch(1, 0)]
    clock.request_pause()
    assert [clock.ask(0), clock.ask(1), clock.ask(0)] == [None, Pause(2), Pause(2)]
    clock.join(2)
    assert [clock.ask(2), clock.ask(0), clock.ask(2)] == [None, None, None]
    assert clock.ask(1) == AsyncBatch(2, 0)
    assert clock.ask(2) == AsyncBatch(3, 0)


def test_nobody_comes_to_the_end_before_who_has_joined_has_asked() -> None:
    clock = StalenessClock(staleness=None, limit=1, workers=range(1))
    assert clock.ask(0) == AsyncBatch(0, 0)
    clock.join(1)
    clock.permit(0)
    clock.finish(0)
    clock.recorded(0)
    assert clock.ask(0) is None and not clock.is_over
    assert [clock.ask(1), clock.ask(0)] == [StreamEnd(), StreamEnd()]
    assert clock.is_over


def test_without_a_bound_nobody_waits_for_the_slow_one() -> None:
    clock = StalenessClock(staleness=None, limit=100, workers=range(2))
    assert clock.ask(0) == AsyncBatch(0, 0)
    for number in range(1, 100):
        assert clock.ask(1) == AsyncBatch(number, number - 1)
        assert clock.permit(1) == 0
        clock.finish(1)
    assert clock.ask(1) is None  # the last batch is still in the slow one's hands
    assert clock.permit(0) == 99


def test_with_a_bound_the_fast_one_waits_when_the_slow_one_would_be_too_far_behind() -> None:
    clock = StalenessClock(staleness=2, limit=100, workers=range(2))
    assert clock.ask(0) == AsyncBatch(0, 0)
    for number in (1, 2):
        assert clock.ask(1) == AsyncBatch(number, number - 1)
        assert clock.permit(1) == 0
        clock.finish(1)
    assert clock.ask(1) == AsyncBatch(3, 2)
    assert clock.permit(1) is None
    assert clock.permit(0) == 2
    clock.finish(0)
    assert clock.permit(1) == 1


def test_an_update_on_its_way_is_not_overtaken_by_more_than_it_may_be_behind() -> None:
    clock = StalenessClock(staleness=2, limit=100, workers=range(3))
    assert [clock.ask(worker) for worker in range(3)] == [AsyncBatch(0, 0), AsyncBatch(1, 0), AsyncBatch(2, 0)]
    assert clock.permit(0) == 0  # and then its connection is slow
    for worker, number in ((1, 3), (2, 4)):
        assert clock.permit(worker) is not None
        clock.finish(worker)
        assert clock.ask(worker) == AsyncBatch(number, number - 2)
    assert clock.permit(1) is None and clock.permit(2) is None
    assert clock.finish(0) == 2
    assert clock.permit(1) == 2 and clock.permit(2) is None  # which would be the third one before that of worker 1
    assert clock.finish(1) == 2
    assert clock.permit(2) == 2


def test_a_batch_without_an_update_is_passed_over() -> None:
    clock = StalenessClock(staleness=0, limit=2, workers=range(1))
    assert clock.ask(0) == AsyncBatch(0, 0)
    assert clock.ask(0) == AsyncBatch(1, 0)
    clock.skip(0)
    assert clock.ask(0) is None
    clock.recorded(0)
    assert clock.ask(0) == StreamEnd()
