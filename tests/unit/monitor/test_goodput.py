"""Each second of each worker's place counts in one account, whatever happens in the run."""

from __future__ import annotations

import random

import pytest

import quick
from goodput_logs import SECONDS, assert_whole, finished, log, record, spike, started, steps
from paceline.events import (
    CheckpointSaved,
    Evaluated,
    Record,
    Regrouped,
    StateKept,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
)
from paceline.monitor.report.attempt_log import AttemptLog, StepTime
from paceline.monitor.report.goodput import ACCOUNTS, goodput_ledger
from paceline.monitor.report.report import cost_text, incident_text

NO_SECONDS = dict.fromkeys(ACCOUNTS, 0.0)


def test_an_undisturbed_run_is_start_up_steps_and_what_comes_after() -> None:
    told = {worker: steps(1, 10, 3.0) for worker in (0, 1)}  # the first step began at the third second
    records = [started(2.0, 0), started(2.0, 1), finished(14.0, 0, 10), finished(13.5, 1, 10)]
    ledger = goodput_ledger([log(records, told, ended=15.0)])
    assert_whole(ledger, places=30.0)
    assert dict(ledger.workers[0]) == pytest.approx(
        NO_SECONDS
        | {"start_up": 3.05, "compute": 6.0, "data": 1.0, "communication": 2.0, "optimizer": 0.5, "other": 0.45}
        | {"idle": 2.0}
    )
    assert ledger.goodput == pytest.approx((6.0 + 0.5 + 0.45) / 15)
    assert ledger.incidents == ()
    assert ledger.members == ((0.0, 0), (2.0, 1), (2.0, 2), (13.5, 1), (14.0, 0), (15.0, 0))


def test_evaluation_and_saves_are_taken_out_of_the_step_in_which_they_fall() -> None:
    told = {
        0: [*steps(1, 2, 2.0), StepTime(8.0, 3, SECONDS)],
        1: [*steps(1, 2, 2.0), StepTime(8.0, 3, SECONDS | {"communication": 1.0})],
    }
    evaluated = Evaluated(step=2, num_samples=8, metrics={}, duration_s=2.0)
    saved = CheckpointSaved(step=2, path="", num_bytes=1, stall_s=0.75, write_s=1.0)
    records = [
        started(2.0, 0),
        started(2.0, 1),
        record(6.5, evaluated, 0),
        record(6.5, evaluated, 1),
        record(7.0, saved, 0),
    ]
    ledger = goodput_ledger([log([*records, finished(8.0, 0, 3), finished(8.0, 1, 3)], told, ended=8.0)])
    assert_whole(ledger, places=16.0)
    assert [ledger.workers[worker]["evaluation"] for worker in (0, 1)] == pytest.approx([2.0, 2.0])
    assert [ledger.workers[worker]["checkpoint"] for worker in (0, 1)] == pytest.approx([0.75, 0.75])
    # Worker 1 did not save: it waited for worker 0 in its exchange.
    assert ledger.workers[1]["communication"] == pytest.approx(0.2 + 0.2 + 1.0 - 0.75)
    assert ledger.workers[0]["other"] == pytest.approx(0.05 + 4 - 0.95 - 2 - 0.75)


def test_the_last_save_and_evaluation_come_after_the_last_step() -> None:
    saved = CheckpointSaved(step=1, path="", num_bytes=1, stall_s=0.5, write_s=1.0)
    evaluated = Evaluated(step=1, num_samples=8, metrics={}, duration_s=2.0)
    records = [started(2.0, 0), record(5.0, evaluated, 0), record(6.8, saved, 0), finished(7.0, 0, 1)]
    ledger = goodput_ledger([log(records, {0: steps(1, 1, 2.0)}, workers=1, ended=7.5)])
    assert_whole(ledger, places=7.5)
    counted = {account: ledger.worker_s[account] for account in ("evaluation", "checkpoint", "idle")}
    assert counted == pytest.approx({"evaluation": 2.0, "checkpoint": 1.5, "idle": 1.0})


def test_a_snapshot_in_memory_is_taken_out_of_the_step_after_it() -> None:
    told = {worker: steps(1, 4, 2.0) for worker in (0, 1)}
    kept = StateKept(step=2, every=2, seconds=0.04, num_bytes=10)
    records = [started(2.0, 0), started(2.0, 1), record(4.1, kept, 0), finished(6.0, 0, 4), finished(6.0, 1, 4)]
    ledger = goodput_ledger([log(records, told, ended=6.0)])
    for worker in (0, 1):
        assert ledger.workers[worker]["checkpoint"] == pytest.approx(0.04)
        assert ledger.workers[worker]["other"] == pytest.approx(3 * 0.05 - 0.04)


def test_a_worker_that_left_before_the_others_has_no_place_after_that() -> None:
    records = [started(2.0, 0), started(2.0, 1), finished(4.0, 1, 2), finished(12.0, 0, 10)]
    ledger = goodput_ledger([log(records, {0: steps(1, 10, 2.0), 1: steps(1, 2, 2.0)}, ended=12.0)])
    assert_whole(ledger, places=12.0 + 4.0)
    assert ledger.workers[1]["idle"] == 0.0


def test_the_place_of_a_worker_that_was_asked_to_leave_is_vacant_and_the_others_take_as_much_of_the_wall() -> None:
    ledger = goodput_ledger([one_that_left(resized=False)])
    assert_whole(ledger, places=24.0)
    (incident,) = ledger.incidents
    assert (incident.kind, incident.began, incident.step) == ("left", 4.5, 2)
    assert incident_text(incident) == "worker 1 has left (SIGTERM) after step 2: 1 worker goes on"
    assert ledger.workers[1]["vacant"] == incident.cost_s == pytest.approx(8.0)  # from its last word to the end
    assert ledger.wall_s["vacant"] == pytest.approx(8.0 / 2)
    assert cost_text(incident) == "8.00 s of workers' time"


def test_a_place_that_a_resize_gave_up_is_gone_and_takes_nothing_of_the_wall() -> None:
    ledger = goodput_ledger([one_that_left(resized=True)])
    assert_whole(ledger, places=12.0 + 4.0)
    assert ledger.worker_s["vacant"] == 0.0
    assert ledger.wall_s["start_up"] == pytest.approx(2.05)  # both started for as long: the wall is not theirs twice
    assert cost_text(ledger.incidents[0]) == "nothing"


def one_that_left(*, resized: bool) -> AttemptLog:
    """Worker 1 is dismissed after step 2, and its process is over half a second later."""
    leaving = WorkerLeft(rank=1, host="a", step=2, reason="SIGTERM", members=(0,), resized=resized)
    records = [
        started(2.0, 0), started(2.0, 1), finished(4.0, 1, 2), record(4.5, leaving), finished(12.0, 0, 10),
    ]  # fmt: skip
    return log(records, {0: steps(1, 10, 2.0), 1: steps(1, 2, 2.0)}, ended=12.0)


def test_a_worker_that_was_added_later_has_a_place_from_then_on() -> None:
    records = [started(2.0, 0), started(6.0, 1, startup_s=1.0), finished(12.0, 0, 10), finished(12.0, 1, 10)]
    told = {0: steps(1, 10, 2.0), 1: steps(6, 10, 7.0)}
    ledger = goodput_ledger([log(records, told, workers=1, ended=12.0)])
    assert_whole(ledger, places=12.0 + 7.0)
    assert ledger.workers[1]["start_up"] == pytest.approx(2.05)


def test_a_running_run_counts_up_to_now_and_one_that_never_started_is_start_up() -> None:
    running = goodput_ledger([log([started(2.0, 0)], {0: steps(1, 3, 2.0)}, workers=1, ended=6.0, state="running")])
    assert_whole(running, places=6.0)
    assert running.incidents == ()
    nothing = goodput_ledger([log([], {}, ended=3.0, state="failed", exit_code=1)])
    assert nothing.worker_s["start_up"] == 6.0
    assert nothing.incidents[0].went_on is None


def test_without_an_attempt_there_is_nothing_to_book() -> None:
    with pytest.raises(ValueError, match="no attempt"):
        goodput_ledger([])


def any_worker(draw: random.Random, worker: int, began: float, ended: float) -> tuple[list[Record], list[StepTime]]:
    """What a worker may have said that is late, ahead of its time, lost, replaced, evaluates, saves and spikes."""
    now, step = began + draw.uniform(-1.0, 3.0), 0
    records, told = [started(now, worker, startup_s=draw.uniform(0.0, 3.0))], list[StepTime]()
    while now < ended + draw.uniform(-3.0, 3.0) and step < 40:
        step, now = step + 1, now + draw.uniform(-0.1, 2.0)
        seconds = {name: draw.uniform(0.0, 0.8) for name in SECONDS}
        told.append(StepTime(now, step, seconds, skipped=draw.random() < 0.1))
        match draw.randrange(20):
            case 0:
                lost = WorkerLost(rank=worker, host="a", step=step, reason="lost")
                formed = Regrouped(
                    causes=["lost"], members=[0], step=step, detected_s=0.1, regrouped_s=0.1,
                    steps_lost=draw.randrange(3), holds=False,
                )  # fmt: skip
                joined = WorkerJoined(rank=worker, step=step, after_s=2.0)
                records += [record(now, lost), record(now + 0.1, formed), started(now + 1.0, worker)]
                records.append(record(now + 2.0, joined))
            case 1:
                evaluated = Evaluated(step=step, num_samples=1, metrics={}, duration_s=draw.random())
                records.append(record(now, evaluated, worker))
            case 2:
                saved = CheckpointSaved(step=step, path="", num_bytes=1, stall_s=draw.random(), write_s=draw.random())
                records.append(record(now, saved, worker))
            case 3:
                records += spike(now, step, "rollback", max(0, step - draw.randrange(1, 5)))
            case _:
                pass
    return [*records, *([finished(now, worker, step)] if draw.random() < 0.5 else [])], told


def any_attempt(draw: random.Random, attempt: int, began: float) -> AttemptLog:
    ended = began + draw.uniform(0.0, 30.0)
    workers = [any_worker(draw, worker, began, ended) for worker in range(3)]
    records = [one for said, _ in workers for one in said]
    told = {worker: sorted(done) for worker, (_, done) in enumerate(workers)}
    about = {"workers": draw.choice([2, 3]), "state": draw.choice(["finished", "failed", "lost", "running"])}
    return log(records, told, attempt=attempt, began=began, ended=ended, **about)


@pytest.mark.parametrize("seed", quick.some(range(60), step=5))
def test_whatever_happens_the_accounts_add_up_to_the_wall_time(seed: int) -> None:
    draw = random.Random(seed)
    attempts, began = list[AttemptLog](), 0.0
    for attempt in range(draw.randrange(1, 4)):
        attempts.append(any_attempt(draw, attempt + 1, began))
        began = attempts[-1].ended + draw.uniform(-1.0, 5.0)  # clocks may have been set back
    ledger = goodput_ledger(attempts)
    assert sum(ledger.wall_s.values()) == pytest.approx(ledger.duration_s, rel=1e-9, abs=1e-9)
    for book in ledger.attempts:
        for worker in range(2):  # these have a place from the beginning; it may be given up before the end
            assert sum(book.workers[worker].values()) <= book.wall_s + 1e-9
        assert all(seconds >= -1e-9 for accounts in book.workers.values() for seconds in accounts.values())
    counted = sum(map(sum, ledger.timeline.accounts.values()))
    assert counted == pytest.approx(sum(ledger.worker_s.values()) - ledger.worker_s["down"], rel=1e-6, abs=1e-6)
