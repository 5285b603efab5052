"""Replicas that do not wait: no update is too far behind, every batch is done once, nobody waits for ever; all pause if
one wishes it."""

from __future__ import annotations

import random

import pytest

from paceline.schedule.clock import Clock, Over, Pause, Save, Turn


def drive(
    seed: int, *, staleness: int | None, workers: int, limit: int, deaths: float = 0.0, wishes: float = 0.0
) -> dict[str, list[int]]:
    """Let pretended workers do everything in a random order; the slow ones act seldom. Returns what happened.

    A model of its own keeps which updates each worker's weights contain, and how far behind each update really was.
    """
    chance = random.Random(seed)
    saves = frozenset(chance.sample(range(1, limit + 1), k=3))
    clock = Clock(staleness=staleness, limit=limit, workers=workers, saves=saves)
    told: dict[str, list[int]] = {"behind": [], "batches": [], "saves": [], "pauses": []}
    alive, hand = set(range(workers)), dict[int, tuple[int, set[int]]]()  # batch, and the updates that it knows
    applied, permits = set[int](), dict[int, int]()  # numbers of permits that are in the weights; worker -> its permit
    over, paused = set[int](), set[int]()
    speed = {worker: chance.choice([1, 1, 4, 30]) for worker in alive}
    for _ in range(400 * limit):
        waiting = alive - over - paused
        if not alive - over:
            break
        worker = chance.choices(sorted(waiting), [1 / speed[one] for one in sorted(waiting)])[0]
        if not paused and len(alive) > 1 and chance.random() < deaths:
            alive.discard(worker)
            if worker in permits:
                applied.add(permits.pop(worker))
                told["batches"].append(hand[worker][0])
            clock.lost(worker)
            continue
        if chance.random() < wishes:
            clock.wish()
        if worker in permits:
            applied.add(permits.pop(worker))
            clock.finish(worker)
            told["batches"].append(hand.pop(worker)[0])
        elif worker in hand:
            before = clock.permitted
            behind = clock.permit(worker)
            if behind is not None:
                missing = set(range(before)) - hand[worker][1]
                assert len(missing) == behind
                told["behind"].append(behind)
                permits[worker] = before
        else:
            match clock.ask(worker):
                case Turn(number=number):
                    hand[worker] = (number, set(applied))
                case Save(number=number):
                    assert worker == 0 and sorted(told["batches"]) == list(range(number))
                    told["saves"].append(number)
                    clock.saved(number)
                case Pause(number=number):
                    assert not hand and sorted(told["batches"]) == list(range(number)) and len(alive) == workers
                    paused.add(worker)
                    if paused == alive:  # all have come together, and go on
                        told["pauses"].append(number)
                        paused.clear()
                case Over():
                    assert not paused
                    over.add(worker)
                case None:
                    pass
    assert over == alive, "somebody waits for ever"
    assert sorted(told["saves"]) == [one for one in sorted(saves) if 0 in alive or one in told["saves"]]
    return told


@pytest.mark.parametrize("staleness", [0, 1, 3, None])
@pytest.mark.parametrize("deaths", [0.0, 0.004])
def test_whatever_happens_the_bound_holds_and_each_batch_is_done_once(staleness: int | None, deaths: float) -> None:
    for seed in range(60):
        told = drive(seed, staleness=staleness, workers=2 + seed % 5, limit=40, deaths=deaths)
        assert sorted(told["batches"]) == list(range(40))
        assert staleness is None or max(told["behind"]) <= staleness


@pytest.mark.parametrize("staleness", [2, None])
def test_all_pause_where_one_wishes_it_and_each_batch_is_done_once_all_the_same(staleness: int | None) -> None:
    pauses = 0
    for seed in range(60):
        deaths = 0.002 * (seed % 2)
        told = drive(seed, staleness=staleness, workers=2 + seed % 5, limit=40, deaths=deaths, wishes=0.05)
        assert sorted(told["batches"]) == list(range(40))
        assert len(set(told["pauses"])) == len(told["pauses"]) and 0 not in told["pauses"]
        pauses += len(told["pauses"])
    assert pauses > 100


def test_in_the_last_batch_a_wish_changes_nothing() -> None:
    clock = Clock(staleness=None, limit=2, workers=2)
    assert [clock.ask(0), clock.ask(1)] == [Turn(0, 0), Turn(1, 0)]
    clock.permit(1)
    clock.finish(1)
    clock.wish()
    assert clock.ask(1) is None
    clock.permit(0)
    clock.finish(0)
    assert [clock.ask(0), clock.ask(1)] == [Over(), Over()]


def test_a_wish_comes_before_a_save_and_after_it_the_save_is_made() -> None:
    clock = Clock(staleness=None, limit=2, workers=2, saves=[1])
    assert clock.ask(0) == Turn(0, 0)
    assert clock.ask(1) is None
    clock.permit(0)
    clock.finish(0)
    clock.wish()
    assert clock.ask(1) is None
    assert clock.ask(0) == clock.ask(1) == Pause(1)
    clock.wish()  # again, though it has led to nothing
    assert clock.ask(1) is None
    assert clock.ask(0) == Save(1)


def test_where_the_writer_has_left_nobody_waits_for_a_save() -> None:
    clock = Clock(staleness=None, limit=2, workers=2, saves=[1, 2])
    assert clock.ask(0) == Turn(0, 0)
    clock.lost(0)
    assert clock.ask(1) == Turn(0, 0)
    clock.permit(1)
    clock.finish(1)
    assert clock.ask(1) == Turn(1, 1)


def test_without_a_bound_nobody_waits_for_the_slow_one() -> None:
    clock = Clock(staleness=None, limit=100, workers=2)
    assert clock.ask(0) == Turn(0, 0)
    for number in range(1, 100):
        assert clock.ask(1) == Turn(number, number - 1)
        assert clock.permit(1) == 0
        clock.finish(1)
    assert clock.ask(1) is None  # the last batch is still in the slow one's hands
    assert clock.permit(0) == 99


def test_with_a_bound_the_fast_one_waits_when_the_slow_one_would_be_too_far_behind() -> None:
    clock = Clock(staleness=2, limit=100, workers=2)
    assert clock.ask(0) == Turn(0, 0)
    for number in (1, 2):
        assert clock.ask(1) == Turn(number, number - 1)
        assert clock.permit(1) == 0
        clock.finish(1)
    assert clock.ask(1) == Turn(3, 2)
    assert clock.permit(1) is None
    assert clock.permit(0) == 2
    clock.finish(0)
    assert clock.permit(1) == 1


def test_a_batch_without_an_update_is_passed_over() -> None:
    clock = Clock(staleness=0, limit=2, workers=1)
    assert clock.ask(0) == Turn(0, 0)
    assert clock.ask(0) == Turn(1, 0)
    clock.skip(0)
    assert clock.ask(0) == Over()
