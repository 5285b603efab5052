"""The ledger books each second of each worker's place once, and charges incidents with what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from paceline.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    Record,
    Regrouped,
    WorkerFailed,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
    WorkerStarted,
)
from paceline.monitor.goodput import ACCOUNTS, Ledger, keep_ledger
from paceline.monitor.goodput_log import AttemptLog, StepTime

SECONDS = {"data": 0.1, "compute": 0.6, "communication": 0.2, "optimizer": 0.05}  # of a step of one second
NO_SECONDS = dict.fromkeys(ACCOUNTS, 0.0)


def record(when: float, event: Event, worker: int | None = None) -> Record:
    return Record(when, worker, event)


def started(when: float, worker: int, *, startup_s: float = 2.0, resumed_from_step: int = 0) -> Record:
    event = WorkerStarted(
        rank=worker, workers=2, host="a", pid=1, device="cpu", startup_s=startup_s, plan="",
        resumed_from_step=resumed_from_step,
    )  # fmt: skip
    return record(when, event, worker)


def finished(when: float, worker: int, step: int) -> Record:
    return record(when, WorkerFinished(rank=worker, step=step, peak_memory_bytes=1), worker)


def steps(first: int, last: int, began: float, *, length: float = 1.0) -> list[StepTime]:
    """Steps that follow each other without a gap."""
    return [StepTime(began + length * (step - first + 1), step, SECONDS) for step in range(first, last + 1)]


def log(records: Sequence[Record], told: Mapping[int, Sequence[StepTime]], **fields: Any) -> AttemptLog:
    values: dict[str, Any] = {
        "attempt": 1,
        "workers": 2,
        "began": 0.0,
        "ended": 20.0,
        "state": "finished",
        "exit_code": 0,
    }
    last = max((step.step for each in told.values() for step in each), default=0)
    values |= {
        "records": sorted(records, key=lambda one: one.time),
        "steps": lambda worker: told.get(worker, ()),
        "last_step": last,
    }
    return AttemptLog(**{**values, **fields})


def assert_whole(ledger: Ledger, *, places: float) -> None:
    """Nothing is booked twice and nothing is left out."""
    assert sum(ledger.worker_s.values()) == pytest.approx(places)
    assert sum(ledger.wall_s.values()) == pytest.approx(ledger.duration_s)
    assert sum(map(sum, ledger.timeline.accounts.values())) == pytest.approx(places - ledger.worker_s["down"])
    for accounts in ledger.workers.values():
        assert all(seconds >= 0 for seconds in accounts.values())


def test_an_undisturbed_run_is_start_up_steps_and_what_comes_after() -> None:
    told = {worker: steps(1, 10, 3.0) for worker in (0, 1)}  # the first step began at the third second
    records = [started(2.0, 0), started(2.0, 1), finished(14.0, 0, 10), finished(13.5, 1, 10)]
    ledger = keep_ledger([log(records, told, ended=15.0)])
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
    ledger = keep_ledger([log([*records, finished(8.0, 0, 3), finished(8.0, 1, 3)], told, ended=8.0)])
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
    ledger = keep_ledger([log(records, {0: steps(1, 1, 2.0)}, workers=1, ended=7.5)])
    assert_whole(ledger, places=7.5)
    booked = {account: ledger.worker_s[account] for account in ("evaluation", "checkpoint", "idle")}
    assert booked == pytest.approx({"evaluation": 2.0, "checkpoint": 1.5, "idle": 1.0})


def loss_of_worker_1(*, joined_at: float = 9.0) -> AttemptLog:
    """Worker 1 is lost at 6.5, in step 5; worker 0 commits it at 8; a successor is forked at 7 and joins in step 6."""
    lost = WorkerLost(rank=1, host="a", step=4, reason="worker 1 (pid 7) killed by signal 9")
    formed = Regrouped(
        causes=[lost.reason], members=[0], step=4, detected_s=0.1, regrouped_s=0.2, steps_lost=0, holds=False
    )
    records = [
        started(2.0, 0), started(2.0, 1), record(6.5, lost), record(6.8, formed), started(7.5, 1, startup_s=0.5),
        record(joined_at, WorkerJoined(rank=1, step=6, after_s=joined_at - 6.5)),
        finished(13.0, 0, 10), finished(13.0, 1, 10),
    ]  # fmt: skip
    told = {0: [*steps(1, 4, 2.0), *steps(5, 5, 6.0, length=2.0), *steps(6, 10, 8.0)]}
    told[1] = [*steps(1, 4, 2.0), *steps(6, 10, 8.0)]
    return log(records, told, ended=13.0)


def test_a_loss_costs_what_the_survivors_step_took_longer_and_the_place_until_its_successor_takes_part() -> None:
    ledger = keep_ledger([loss_of_worker_1()])
    assert_whole(ledger, places=26.0)
    (incident,) = ledger.incidents
    assert (incident.kind, incident.workers, incident.step, incident.members) == ("loss", [1], 4, (0,))
    assert [(each.worker, each.step) for each in incident.joined] == [(1, 6)]
    assert ledger.workers[0]["recovery"] == pytest.approx(1.0)  # two seconds for a step that takes one
    assert ledger.workers[1]["vacant"] == pytest.approx(0.5)  # lost at 6.5, forked at 7
    # What it had done of step 5, and the successor's start until its first step's own work.
    assert ledger.workers[1]["recovery"] == pytest.approx(0.5 + (9.0 - 7.0) - 0.95)
    assert incident.costs == pytest.approx({"recovery": 1.0 + 0.5 + 1.05, "vacant": 0.5})
    assert incident.cost_s == pytest.approx(ledger.worker_s["recovery"] + ledger.worker_s["vacant"])
    assert ledger.members[-5:] == ((6.5, 1), (9.0, 2), (13.0, 1), (13.0, 0), (13.0, 0))


def test_a_place_that_nobody_takes_stays_empty_to_the_end() -> None:
    whole = loss_of_worker_1()
    records = [one for one in whole.records if one.worker != 1 or one.time < 6]
    records = [one for one in records if not isinstance(one.event, WorkerJoined)]
    told = {0: list(whole.steps(0)), 1: steps(1, 4, 2.0)}
    ledger = keep_ledger([log(records, told, ended=13.0)])
    assert_whole(ledger, places=26.0)
    assert ledger.workers[1]["vacant"] == pytest.approx(6.5)


def test_losses_before_the_others_have_formed_again_are_one_incident() -> None:
    lost = [WorkerLost(rank=worker, host="a", step=1, reason=f"worker {worker}") for worker in (1, 2)]
    formed = Regrouped(causes=[], members=[0], step=1, detected_s=0.1, regrouped_s=0.2, steps_lost=0, holds=False)
    records = [started(2.0, worker) for worker in range(3)] + [finished(5.0, 0, 3)]
    records += [record(3.2, lost[0]), record(3.3, lost[1]), record(3.5, formed)]
    told = {0: steps(1, 3, 2.0), 1: steps(1, 1, 2.0), 2: steps(1, 1, 2.0)}
    ledger = keep_ledger([log(records, told, workers=3, ended=5.0)])
    assert_whole(ledger, places=15.0)
    assert [(incident.workers, incident.causes) for incident in ledger.incidents] == [
        ([1, 2], ["worker 1", "worker 2"])
    ]


def test_steps_that_are_taken_again_are_repeated_and_the_time_between_attempts_is_down() -> None:
    failed = WorkerFailed(rank=1, host="a", step=6, reason="ValueError in worker 1")
    told = {worker: steps(1, 6, 2.0) for worker in (0, 1)}
    first = log([started(2.0, 0), started(2.0, 1), record(9.0, failed)], told, ended=9.0, state="failed", exit_code=1)
    again = {worker: steps(5, 8, 14.0) for worker in (0, 1)}
    records = [started(13.0, worker, startup_s=1.0, resumed_from_step=4) for worker in (0, 1)]
    records += [finished(18.0, worker, 8) for worker in (0, 1)]
    ledger = keep_ledger([first, log(records, again, attempt=2, began=12.0, ended=18.0)])
    assert_whole(ledger, places=36.0)
    (incident,) = ledger.incidents
    assert (incident.kind, incident.causes, incident.step, incident.steps_lost) == ("end", [failed.reason], 4, 2)
    assert ledger.worker_s["repeated"] == pytest.approx(2 * 2.0)
    assert ledger.wall_s["down"] == pytest.approx(3.0)
    assert incident.costs == pytest.approx({"repeated": 4.0, "recovery": 2.0, "down": 6.0})  # a second for nothing each
    assert ledger.worker_s["compute"] == pytest.approx(2 * 0.6 * 8)  # each step once
    assert ledger.elapsed(12.0) == ledger.elapsed(9.0) == 9.0


def test_the_cause_of_an_end_is_the_first_error_and_not_its_echo() -> None:
    failed = [record(5.0, WorkerFailed(rank=rank, host="a", step=3, reason=f"worker {rank}")) for rank in (0, 1)]
    told = {worker: steps(1, 3, 2.0) for worker in (0, 1)}
    records = [started(2.0, 0), started(2.0, 1), *failed]
    fields: dict[str, Any] = {"ended": 5.5, "state": "failed", "exit_code": 1, "echoes": frozenset({0})}
    (incident,) = keep_ledger([log(records, told, **fields)]).incidents
    assert (incident.causes, incident.workers) == (["worker 1"], [1])


def test_steps_that_a_loss_threw_away_are_repeated_for_everybody() -> None:
    lost = WorkerLost(rank=1, host="a", step=4, reason="worker 1")
    formed = Regrouped(causes=["worker 1"], members=[0], step=2, detected_s=0, regrouped_s=0, steps_lost=2, holds=False)
    records = [started(2.0, 0), started(2.0, 1), record(6.1, lost), record(6.2, formed), finished(10.0, 0, 6)]
    told = {0: [*steps(1, 4, 2.0), *steps(3, 6, 6.0)], 1: steps(1, 4, 2.0)}
    ledger = keep_ledger([log(records, told, ended=10.0)])
    assert_whole(ledger, places=20.0)
    assert [ledger.workers[worker]["repeated"] for worker in (0, 1)] == pytest.approx([2.0, 2.0])


def test_a_run_continued_from_its_own_end_has_no_incident() -> None:
    first = log([started(2.0, 0), finished(5.0, 0, 3)], {0: steps(1, 3, 2.0)}, workers=1, ended=5.0)
    records = [started(8.0, 0, startup_s=1.0, resumed_from_step=3), finished(10.0, 0, 5)]
    second = log(records, {0: steps(4, 5, 8.0)}, workers=1, attempt=2, began=7.0, ended=10.0)
    ledger = keep_ledger([first, second])
    assert ledger.incidents == ()
    assert ledger.worker_s["down"] == 2.0
    assert_whole(ledger, places=10.0)


def test_a_worker_that_left_before_the_others_has_no_place_after_that() -> None:
    records = [started(2.0, 0), started(2.0, 1), finished(4.0, 1, 2), finished(12.0, 0, 10)]
    ledger = keep_ledger([log(records, {0: steps(1, 10, 2.0), 1: steps(1, 2, 2.0)}, ended=12.0)])
    assert_whole(ledger, places=12.0 + 4.0)
    assert ledger.workers[1]["idle"] == 0.0


def test_a_worker_that_was_added_later_has_a_place_from_then_on() -> None:
    records = [started(2.0, 0), started(6.0, 1, startup_s=1.0), finished(12.0, 0, 10), finished(12.0, 1, 10)]
    told = {0: steps(1, 10, 2.0), 1: steps(6, 10, 7.0)}
    ledger = keep_ledger([log(records, told, workers=1, ended=12.0)])
    assert_whole(ledger, places=12.0 + 7.0)
    assert ledger.workers[1]["start_up"] == pytest.approx(2.05)


def test_a_running_run_is_booked_up_to_now_and_one_that_never_started_is_start_up() -> None:
    running = keep_ledger([log([started(2.0, 0)], {0: steps(1, 3, 2.0)}, workers=1, ended=6.0, state="running")])
    assert_whole(running, places=6.0)
    assert running.incidents == ()
    nothing = keep_ledger([log([], {}, ended=3.0, state="failed", exit_code=1)])
    assert nothing.worker_s["start_up"] == 6.0
    assert nothing.incidents[0].went_on is None


def test_without_an_attempt_there_is_nothing_to_book() -> None:
    with pytest.raises(ValueError, match="no attempt"):
        keep_ledger([])
