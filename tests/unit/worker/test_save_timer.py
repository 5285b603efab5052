"""When a save by time is due, with a clock that the test turns."""

from __future__ import annotations

import pytest

from paceline.worker.loop import save_timer
from paceline.worker.loop.save_timer import SaveTimer


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(save_timer.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_the_time_counts_from_the_first_step_and_from_each_save(clock: Clock) -> None:
    timer = SaveTimer(300.0)
    clock.now += 1000.0  # the script loads its data
    assert not timer.is_due
    timer.begin()
    clock.now += 299.0
    timer.begin()
    assert not timer.is_due and timer.is_near
    clock.now += 1.0
    assert timer.is_due
    timer.saved(0.5)
    assert not timer.is_due and not timer.is_near
    clock.now += 300.0
    assert timer.is_due


def test_saves_take_at_most_a_hundredth_of_the_time(clock: Clock) -> None:
    timer = SaveTimer(300.0)
    timer.begin()
    began, spent = clock.now, 0.0
    while clock.now < began + 100_000.0:
        clock.now += 1.0
        if timer.is_due:
            clock.now += 20.0
            spent += 20.0
            timer.saved(20.0)
    assert 0.005 < spent / (clock.now - began) <= 0.0101


def test_zero_is_never(clock: Clock) -> None:
    timer = SaveTimer(0.0)
    timer.begin()
    clock.now += 1e6
    assert not timer.is_due and not timer.is_near


def test_a_save_at_the_end_of_a_loop_pays_where_it_takes_little_of_the_time(clock: Clock) -> None:
    timer = SaveTimer(0.0)
    clock.now += 1000.0
    assert not timer.is_worth, "no step was taken"
    timer.begin()
    clock.now += save_timer.LEAST_S - 1.0
    assert not timer.is_worth
    clock.now += 1.0
    assert timer.is_worth
    timer.saved(2.0)
    clock.now += 199.0
    assert not timer.is_worth
    clock.now += 1.0
    assert timer.is_worth
