"""Steps that leave the slowest out: each is made of exactly those shares that came in time, and nobody holds one up."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest

from paceline.schedule.backup_workers import BackupClock, BackupShare, num_micro_of
from paceline.schedule.staleness_clock import Pause, Save, StreamEnd

NUM_MICRO = 8
SHORT = 2  # micro-batches of an epoch's last step
EPOCH = 10


def num_micro(number: int) -> int:
    return num_micro_of(number, epochs=(EPOCH, EPOCH), micros=(NUM_MICRO, SHORT, SHORT))


def clock_of(
    workers: int,
    *,
    drop: int = 1,
    limit: int = 40,
    saves: Iterable[int] = (),
    num_micro: Callable[[int], int] = lambda _: NUM_MICRO,
) -> BackupClock:
    return BackupClock(drop=drop, limit=limit, workers=workers, num_micro=num_micro, saves=saves)


def shares(clock: BackupClock, *workers: int) -> None:
    """These workers take a share of the step under way, in this order."""
    for index, worker in enumerate(workers):
        share = clock.ask(worker)
        assert isinstance(share, BackupShare) and share.index == index


def drive(
    seed: int,
    *,
    drop: int,
    workers: int,
    limit: int,
    leaves: float = 0.0,
    passes: float = 0.0,
    wishes: float = 0.0,
    breaks: float = 0.0,
) -> dict[str, list[int]]:
    """Let pretended workers do everything in a random order; the slow ones act seldom. Returns what happened.

    A model of its own keeps which step each worker's weights are of, which shares were handed out and have arrived, and
    which steps are in some log. A worker that `breaks` off asks again without having recorded its steps.
    """
    chance = random.Random(seed)
    saves = frozenset(chance.sample(range(1, limit + 1), k=3))
    clock = clock_of(workers, drop=drop, limit=limit, saves=saves, num_micro=num_micro)
    told: dict[str, list[int]] = {"late": [], "chosen": [], "saves": [], "pauses": []}
    here, hand, sent = set(range(workers)), dict[int, BackupShare](), dict[int, BackupShare]()
    handed_out, came = dict[int, set[int]](), dict[int, set[int]]()  # by step
    over, paused = set[int](), set[int]()
    unnoted, logged = {worker: set[int]() for worker in here}, set[int]()

    def note(worker: int) -> None:
        logged.update(unnoted[worker])
        unnoted[worker].clear()
        clock.recorded(worker)

    def ask(worker: int) -> BackupShare | Save | Pause | StreamEnd | None:
        unnoted[worker].clear()
        turn = clock.ask(worker)
        if turn is not None:
            unnoted[worker].update(clock.claim_unrecorded(worker))
        if not isinstance(turn, BackupShare | None):
            note(worker)
        return turn

    speed = {worker: chance.choice([1, 1, 4, 30]) for worker in here}
    for _ in range(2000 * limit):
        acting = here - over - paused
        if not here - over:
            break
        worker = chance.choices(sorted(acting), [1 / speed[one] for one in sorted(acting)])[0]
        if chance.random() < wishes:
            clock.request_pause()
        if not paused and len(here) > 1 and (worker in hand or worker in sent) and chance.random() < leaves:
            here.discard(worker)  # with its share in hand, or while it waits for how the step ends, or is to end it
            clock.lost(worker)
            continue
        if unnoted[worker] and chance.random() >= breaks:
            note(worker)
        elif clock.closer == worker:  # it has been told so, and finishes the step
            number, chosen = clock.done, set(clock.chosen)
            assert chosen == came[number] and sent[worker].index in chosen and sent[worker].number == number
            told["chosen"].append(len(chosen))
            clock.settle()
            del sent[worker]
            unnoted[worker].add(number)
        elif worker in sent:
            if sent[worker].number < clock.done:  # it has been told how the step has ended
                share = sent.pop(worker)
                unnoted[worker].update({share.number} if share.index in came.get(share.number, ()) else ())
        elif worker in hand:
            share = hand.pop(worker)
            if chance.random() < passes:
                continue  # and asks for another one
            sent[worker] = share
            number, is_open = clock.done, clock.closer is None
            in_time = clock.arrive(worker)
            assert (in_time == share) == (share.number == number and is_open)
            if in_time is None:
                told["late"].append(share.number)
            else:
                came.setdefault(number, set()).add(share.index)
        else:
            match ask(worker):
                case BackupShare(number=number, index=index, count=count) as share:
                    assert number == clock.done and index < count <= num_micro(number)
                    assert index not in handed_out.setdefault(number, set())
                    handed_out[number].add(index)
                    hand[worker] = share
                case Save(number=number):
                    assert worker == 0 and number == clock.done and clock.is_idle and logged == {*range(number)}
                    told["saves"].append(number)
                    clock.saved(number)
                case Pause(number=number):
                    assert not hand and not sent and number == clock.done and len(here) == workers
                    paused.add(worker)
                    if paused == here:
                        told["pauses"].append(number)
                        paused.clear()
                case StreamEnd():
                    assert clock.done == limit and logged == {*range(limit)}
                    over.add(worker)
                case None:
                    pass
    assert over == here, "somebody waits for ever"
    assert clock.done == limit
    assert sorted(told["saves"]) == [one for one in sorted(saves) if 0 in here or one in told["saves"]]
    return told


@pytest.mark.parametrize("drop", [1, 2])
def test_each_step_is_made_of_all_shares_but_those_that_are_dropped(drop: int) -> None:
    num_late = 0
    for seed in range(30):
        workers = drop + 1 + seed % 4
        told = drive(seed, drop=drop, workers=workers, limit=40)
        expected = [max(1, min(workers, num_micro(number)) - drop) for number in range(40)]
        assert told["chosen"] == expected
        num_late += len(told["late"])
    assert num_late > 250


def test_a_worker_that_leaves_or_skips_a_batch_delays_no_other() -> None:
    for seed in range(40):
        told = drive(seed, drop=1, workers=2 + seed % 4, limit=40, leaves=0.01, passes=0.1, breaks=0.1)
        assert all(told["chosen"]) and len(told["chosen"]) > 30


@pytest.mark.thorough
def test_all_pause_between_two_steps_where_one_wishes_it() -> None:
    pauses = 0
    for seed in range(30):
        told = drive(seed, drop=1 + seed % 2, workers=3 + seed % 3, limit=40, wishes=0.05)
        assert len(told["chosen"]) == 40 and len(set(told["pauses"])) == len(told["pauses"])
        pauses += len(told["pauses"])
    assert pauses > 50


def test_the_slow_one_holds_up_no_step_and_joins_the_one_under_way_when_it_comes() -> None:
    clock = clock_of(3)
    shares(clock, 2, 0, 1)
    for number in range(20):
        if number:
            shares(clock, 0, 1)
        assert clock.arrive(0) is not None and clock.closer is None
        assert clock.arrive(1) is not None
        assert clock.closer == 1 and clock.chosen == ((0, 1) if number else (1, 2))
        clock.settle()
    assert clock.oldest == 0  # its record is kept
    assert clock.arrive(2) is None
    assert clock.ask(2) == BackupShare(20, 0, 3)


def test_a_closed_step_deals_no_more_shares_and_what_arrives_then_is_late() -> None:
    clock = clock_of(4, drop=2)
    shares(clock, 0, 1, 2)
    clock.arrive(0)
    clock.arrive(1)
    assert clock.closer == 1 and clock.chosen == (0, 1)
    assert clock.ask(3) is None
    assert clock.arrive(2) is None and clock.chosen == (0, 1)
    clock.settle()
    assert clock.ask(3) == BackupShare(1, 0, 4)


def test_a_short_batch_has_fewer_shares_and_waits_for_one_at_least() -> None:
    clock = clock_of(4, drop=2, num_micro=lambda _: 1)
    assert clock.ask(3) == BackupShare(0, 0, 1)
    assert clock.ask(0) is None
    clock.arrive(3)
    assert clock.closer == 3


def test_a_wish_waits_for_the_step_under_way_and_for_the_late_ones() -> None:
    clock = clock_of(3)
    shares(clock, 0, 1, 2)
    clock.arrive(0)
    clock.arrive(1)
    clock.settle()
    clock.request_pause()
    assert clock.ask(0) is None and clock.ask(1) is None  # no further step begins
    clock.arrive(2)
    assert clock.ask(2) == Pause(1)
    assert clock.ask(0) == clock.ask(1) == Pause(1)
    assert clock.ask(0) == BackupShare(1, 0, 3)


def test_before_a_step_that_is_due_the_writer_saves_even_if_others_are_late() -> None:
    clock = clock_of(3, saves=[1])
    shares(clock, 2, 0, 1)
    clock.arrive(0)
    clock.arrive(1)
    clock.settle()
    clock.recorded(0)
    assert clock.ask(0) is None  # the step may not be in the other one's log yet
    clock.recorded(1)
    assert clock.ask(1) is None
    assert clock.ask(0) == Save(1)
    clock.saved(1)
    assert clock.ask(1) == BackupShare(1, 0, 3)


def test_batches_are_as_long_as_their_place_in_the_epoch_says() -> None:
    counts = [num_micro_of(number, epochs=(2, 3), micros=(8, 1, 5)) for number in range(8)]
    assert counts == [8, 1, 8, 8, 5, 8, 8, 5]


def test_a_step_whose_only_share_so_far_has_lost_its_worker_is_ended_by_the_next_one() -> None:
    clock = clock_of(3)
    shares(clock, 0, 1, 2)
    clock.arrive(0)
    clock.lost(0)
    clock.lost(1)
    assert clock.closer is None and clock.done == 0  # who could end it is still at work
    assert clock.arrive(2) is not None
    assert clock.closer == 2 and clock.chosen == (0, 2)


def test_a_step_that_nobody_will_note_is_told_of_once() -> None:
    clock = clock_of(2)
    shares(clock, 0, 1)
    assert clock.ask(0) is None and clock.claim_unrecorded(0) == []  # the other one may take it
    assert clock.ask(1) == BackupShare(1, 0, 2)
    assert clock.claim_unrecorded(1) == [0]
    clock.recorded(1)
    clock.arrive(1)
    clock.settle(without=1)  # its closer has broken off
    assert clock.ask(0) == BackupShare(2, 0, 2)
    clock.arrive(0)
    clock.settle()
    assert clock.claim_unrecorded(1) == [1] and clock.claim_unrecorded(0) == []


def test_at_the_end_nobody_goes_on_before_the_last_step_is_noted() -> None:
    clock = clock_of(2, limit=1)
    shares(clock, 0, 1)
    clock.arrive(1)
    clock.settle()
    assert clock.ask(0) is None
    clock.recorded(1)
    assert clock.ask(0) == StreamEnd()


def test_what_its_worker_has_not_noted_when_it_asks_again_is_for_the_writer_to_note() -> None:
    clock = clock_of(2, saves=[1])
    shares(clock, 0, 1)
    clock.arrive(1)
    clock.settle()
    assert clock.ask(0) is None
    assert clock.ask(1) is None  # an error was caught
    assert clock.ask(0) == Save(1) and clock.claim_unrecorded(0) == [0]


def test_nobody_saves_before_who_was_told_of_a_step_has_noted_it_or_asks_again() -> None:
    clock = clock_of(3, saves=[2])
    shares(clock, 0, 1, 2)
    assert [clock.ask(0), clock.ask(1), clock.ask(2)] == [None, None, BackupShare(1, 0, 3)]
    assert clock.claim_unrecorded(2) == [0]
    assert [clock.ask(0), clock.ask(1)] == [BackupShare(1, 1, 3), BackupShare(1, 2, 3)]
    for worker in (0, 1):
        clock.arrive(worker)
    clock.settle()
    for worker in (0, 1):
        clock.recorded(worker)
    assert clock.ask(0) is None
    assert clock.ask(2) is None  # its weights were of two steps
    assert clock.ask(0) == Save(2) and clock.claim_unrecorded(0) == [0]
