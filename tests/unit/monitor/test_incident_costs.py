"""Each incident of a run is charged with what it cost: losses, restarts, rollbacks and healed weights."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from goodput_logs import SECONDS, assert_whole, finished, log, record, spike, started, steps
from paceline.events import (
    CheckpointSaved,
    EventLog,
    Regrouped,
    Restarted,
    RunStarted,
    SpikeSeen,
    StateKept,
    StepDone,
    WeightsDiffer,
    WorkerFailed,
    WorkerJoined,
    WorkerLost,
)
from paceline.monitor.console.event_lines import spike_cause, spike_text
from paceline.monitor.records.run_record import RunRecord
from paceline.monitor.report.attempt_log import AttemptLog, StepTime, read_attempts
from paceline.monitor.report.goodput import goodput_ledger
from paceline.monitor.report.report import incident_text


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
    ledger = goodput_ledger([loss_of_worker_1()])
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
    ledger = goodput_ledger([log(records, told, ended=13.0)])
    assert_whole(ledger, places=26.0)
    assert ledger.workers[1]["vacant"] == pytest.approx(6.5)


def test_who_hung_took_no_part_from_the_beginning_of_the_stall_on_and_the_incident_begins_there() -> None:
    whole = loss_of_worker_1()
    hung = WorkerLost(rank=1, host="a", step=4, reason="worker 1 was hanging", silent_s=0.4)
    records = [record(one.time, hung) if isinstance(one.event, WorkerLost) else one for one in whole.records]
    ledger = goodput_ledger([log(records, {0: list(whole.steps(0)), 1: list(whole.steps(1))}, ended=13.0)])
    assert ledger.incidents[0].began == pytest.approx(6.1)
    assert ledger.members[-5] == (pytest.approx(6.1), 1)
    assert_whole(ledger, places=26.0)


def test_losses_before_the_others_have_formed_again_are_one_incident() -> None:
    lost = [WorkerLost(rank=worker, host="a", step=1, reason=f"worker {worker}") for worker in (1, 2)]
    formed = Regrouped(causes=[], members=[0], step=1, detected_s=0.1, regrouped_s=0.2, steps_lost=0, holds=False)
    records = [started(2.0, worker) for worker in range(3)] + [finished(5.0, 0, 3)]
    records += [record(3.2, lost[0]), record(3.3, lost[1]), record(3.5, formed)]
    told = {0: steps(1, 3, 2.0), 1: steps(1, 1, 2.0), 2: steps(1, 1, 2.0)}
    ledger = goodput_ledger([log(records, told, workers=3, ended=5.0)])
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
    ledger = goodput_ledger([first, log(records, again, attempt=2, began=12.0, ended=18.0)])
    assert_whole(ledger, places=36.0)
    (incident,) = ledger.incidents
    assert (incident.kind, incident.causes, incident.step, incident.steps_lost) == ("end", [failed.reason], 4, 2)
    assert ledger.worker_s["repeated"] == pytest.approx(2 * 2.0)
    assert ledger.wall_s["down"] == pytest.approx(3.0)
    assert incident.costs == pytest.approx({"repeated": 4.0, "recovery": 2.0, "down": 6.0})  # a second for nothing each
    assert ledger.worker_s["compute"] == pytest.approx(2 * 0.6 * 8)  # each step once
    assert ledger.elapsed(12.0) == ledger.elapsed(9.0) == 9.0


def test_an_attempt_that_came_to_no_step_does_not_hide_that_steps_were_taken_again() -> None:
    told = {worker: steps(1, 6, 2.0) for worker in (0, 1)}
    first = log([started(2.0, 0), started(2.0, 1)], told, ended=9.0, state="lost", exit_code=None)
    nothing = log([], {}, attempt=2, began=10.0, ended=11.0, state="failed", exit_code=76)
    again = {worker: steps(5, 8, 14.0) for worker in (0, 1)}
    records = [started(13.0, worker, startup_s=1.0, resumed_from_step=4) for worker in (0, 1)]
    ledger = goodput_ledger([first, nothing, log(records, again, attempt=3, began=12.0, ended=18.0)])
    assert_whole(ledger, places=36.0)
    assert ledger.worker_s["repeated"] == pytest.approx(2 * 2.0)
    assert ledger.worker_s["compute"] == pytest.approx(2 * 0.6 * 8)  # each step once
    ended, hindered = ledger.incidents
    assert (ended.step, ended.steps_lost, hindered.steps_lost) == (4, 2, 0)
    assert "after step 6: " in incident_text(ended)
    assert "attempt 3 went on from step 4, steps lost 2" in incident_text(ended)


@pytest.mark.parametrize(("state", "num_useful"), [("failed", 4), ("lost", 4), ("stopped", 4), ("running", 6)])
def test_steps_that_no_checkpoint_has_are_not_useful_where_the_run_ended_early(state: str, num_useful: int) -> None:
    told = {worker: steps(1, 6, 2.0) for worker in (0, 1)}
    saved = CheckpointSaved(step=4, path="", num_bytes=1, stall_s=0.0, write_s=0.0)
    ledger = goodput_ledger(
        [log([started(2.0, 0), started(2.0, 1), record(6.5, saved, 0)], told, ended=9.0, state=state)]
    )
    assert_whole(ledger, places=18.0)
    assert ledger.worker_s["compute"] == pytest.approx(2 * 0.6 * num_useful)
    assert ledger.worker_s["undone"] == pytest.approx(2.0 * (6 - num_useful))
    if state != "running":
        (incident,) = ledger.incidents
        assert "after step 6: " in incident_text(incident) and "steps in no checkpoint 2" in incident_text(incident)


def test_what_it_takes_until_all_have_begun_again_is_recovery_and_their_snapshots_are_no_useful_time() -> None:
    lost = Restarted(
        causes=["worker 1 (pid 7) killed by signal 9"],
        lost=[1],
        workers=2,
        at_step=5,
        step=4,
        source="memory",
        lost_at=9.0,
    )
    kept = StateKept(step=4, every=2, seconds=0.04, num_bytes=10)
    first = log(
        [started(2.0, 0), started(2.0, 1), record(6.5, kept, 0)],
        {worker: steps(1, 5, 2.0) for worker in (0, 1)},
        ended=9.0,
        state="failed",
    )
    began = [started(11.0, worker, startup_s=2.0, resumed_from_step=4) for worker in (0, 1)]
    again = log(
        [record(9.5, lost), *began, finished(18.0, 0, 8), finished(18.0, 1, 8)],
        {worker: steps(5, 8, 13.0) for worker in (0, 1)},
        attempt=2,
        began=9.0,  # as the supervisor counts
        ended=18.0,
    )
    ledger = goodput_ledger([first, again])
    assert_whole(ledger, places=36.0)
    (incident,) = ledger.incidents
    assert ledger.num_lost == 1
    assert incident_text(incident) == (
        "attempt 1 ended after step 5: worker 1 (pid 7) killed by signal 9; attempt 2 went on from step 4 (from "
        "memory), steps lost 1"
    )
    accounts = ledger.workers[0]
    assert accounts["repeated"] == pytest.approx(1.0)  # step 5, the first time
    # From the last step to the end, and the next attempt's start, with what its first step does not measure.
    assert accounts["recovery"] == pytest.approx(2.0 + 4.0 + 0.05)
    assert accounts["down"] == 0.0 and accounts["start_up"] == pytest.approx(2.05)
    assert accounts["checkpoint"] == 0.0, "the step after the snapshot was taken again, so all of it is repeated"
    assert incident.cost_s == pytest.approx(2 * (accounts["recovery"] + accounts["repeated"]))


def test_the_cause_of_an_end_is_the_first_error_and_not_its_echo() -> None:
    failed = [record(5.0, WorkerFailed(rank=rank, host="a", step=3, reason=f"worker {rank}")) for rank in (0, 1)]
    told = {worker: steps(1, 3, 2.0) for worker in (0, 1)}
    records = [started(2.0, 0), started(2.0, 1), *failed]
    fields: dict[str, Any] = {"ended": 5.5, "state": "failed", "exit_code": 1, "echoes": frozenset({0})}
    (incident,) = goodput_ledger([log(records, told, **fields)]).incidents
    assert (incident.causes, incident.workers) == (["worker 1"], [1])


def test_steps_that_a_loss_threw_away_are_repeated_for_everybody() -> None:
    lost = WorkerLost(rank=1, host="a", step=4, reason="worker 1")
    formed = Regrouped(causes=["worker 1"], members=[0], step=2, detected_s=0, regrouped_s=0, steps_lost=2, holds=False)
    records = [started(2.0, 0), started(2.0, 1), record(6.1, lost), record(6.2, formed), finished(10.0, 0, 6)]
    told = {0: [*steps(1, 4, 2.0), *steps(3, 6, 6.0)], 1: steps(1, 4, 2.0)}
    ledger = goodput_ledger([log(records, told, ended=10.0)])
    assert_whole(ledger, places=20.0)
    assert [ledger.workers[worker]["repeated"] for worker in (0, 1)] == pytest.approx([2.0, 2.0])


def test_a_run_continued_from_its_own_end_has_no_incident() -> None:
    first = log([started(2.0, 0), finished(5.0, 0, 3)], {0: steps(1, 3, 2.0)}, workers=1, ended=5.0)
    records = [started(8.0, 0, startup_s=1.0, resumed_from_step=3), finished(10.0, 0, 5)]
    second = log(records, {0: steps(4, 5, 8.0)}, workers=1, attempt=2, began=7.0, ended=10.0)
    ledger = goodput_ledger([first, second])
    assert ledger.incidents == ()
    assert ledger.worker_s["down"] == 2.0
    assert_whole(ledger, places=10.0)


def left_out(told: Sequence[StepTime], *numbers: int) -> list[StepTime]:
    return [step._replace(skipped=step.step in numbers) for step in told]


def test_steps_that_a_rollback_undid_are_not_useful_and_its_incident_has_cost_them() -> None:
    told = left_out(steps(1, 10, 2.0), 7)
    records = [started(2.0, 0), started(2.0, 1), *spike(8.5, 7, "rollback", 4), finished(12.0, 0, 10)]
    ledger = goodput_ledger([log([*records, finished(12.0, 1, 10)], {0: told, 1: told}, ended=12.0)])
    assert_whole(ledger, places=24.0)
    # Steps 5 and 6 were taken, and are undone; step 7, the spike's own, was taken by nobody.
    assert [ledger.workers[worker]["undone"] for worker in (0, 1)] == pytest.approx([3.0, 3.0])
    assert ledger.worker_s["compute"] == pytest.approx(2 * 7 * 0.6)
    (incident,) = ledger.incidents
    assert incident.costs == pytest.approx({"undone": 6.0})
    assert incident_text(incident) == (
        "step 7: loss 50, expected at most 3; left out, rolled back to step 4, steps undone 2"
    )


def test_the_start_of_a_run_stays_its_start_when_its_first_step_is_undone_or_taken_again() -> None:
    told = left_out(steps(1, 10, 2.0), 7)
    records = [started(2.0, 0), started(2.0, 1), *spike(8.5, 7, "rollback", 0), finished(12.0, 0, 10)]
    ledger = goodput_ledger([log([*records, finished(12.0, 1, 10)], {0: told, 1: told}, ended=12.0)])
    assert_whole(ledger, places=24.0)
    assert [ledger.workers[worker]["start_up"] for worker in (0, 1)] == pytest.approx(
        [2.05, 2.05]
    )  # 0.05: not measured
    (incident,) = ledger.incidents
    assert incident.cost_s == ledger.worker_s["undone"] == pytest.approx(2 * 6.95)

    failed = WorkerFailed(rank=1, host="a", step=6, reason="ValueError in worker 1")
    told = {worker: steps(1, 6, 2.0) for worker in (0, 1)}
    first = log([started(2.0, 0), started(2.0, 1), record(9.0, failed)], told, ended=9.0, state="failed", exit_code=1)
    records = [started(13.0, worker, startup_s=1.0) for worker in (0, 1)]
    again = {worker: steps(1, 8, 14.0) for worker in (0, 1)}
    ledger = goodput_ledger([first, log(records, again, attempt=2, began=12.0, ended=22.0)])
    assert ledger.worker_s["repeated"] == pytest.approx(2 * 5.95)
    assert ledger.worker_s["start_up"] == pytest.approx(2 * (2.05 + 2.05))


def test_where_all_are_lost_the_incident_is_after_the_last_step_that_anybody_took() -> None:
    told = {worker: steps(1, 6, 2.0) for worker in (0, 1)}
    records = [started(2.0, 0), started(2.0, 1)]
    records += [record(8.5, WorkerLost(rank=worker, host="a", step=4, reason="killed")) for worker in (0, 1)]
    ledger = goodput_ledger([log(records, told, ended=9.0, state="stopped", exit_code=76)])
    ends = [(incident.kind, incident.step + incident.steps_lost) for incident in ledger.incidents]
    assert ends == [("loss", 6), ("end", 6)]


@pytest.mark.parametrize(
    ("loss", "expected", "text"),
    [
        (47.3, 3.1, "loss 47.3, expected at most 3.1"),
        (float("nan"), None, "the loss is nan"),
        (float("inf"), None, "the loss is inf"),
        (2.1, None, "loss 2.1, but gradients are not finite"),
    ],
)
def test_a_spike_is_told_as_what_it_was(loss: float, expected: float | None, text: str) -> None:
    spike = SpikeSeen(step=61, loss=loss, expected=expected, action="skip", to_step=None)
    assert spike_cause(spike) == text
    assert spike_text(spike).startswith(f"step 61  SPIKE: {text}: no worker takes the step")


def test_a_step_that_nobody_took_is_not_useful() -> None:
    told = left_out(steps(1, 6, 2.0), 3, 5)
    records = [started(2.0, 0), started(2.0, 1), *spike(4.5, 3, "skip"), finished(8.0, 0, 6), finished(8.0, 1, 6)]
    ledger = goodput_ledger([log(records, {0: told, 1: told}, ended=8.0)])
    assert_whole(ledger, places=16.0)
    assert ledger.worker_s["undone"] == pytest.approx(4.0)
    (incident,) = ledger.incidents  # step 5 was left out without a guard: a warning told of it
    assert incident.costs == pytest.approx({"undone": 2.0})
    assert incident_text(incident) == "step 3: loss 50, expected at most 3; left out"


def test_a_second_rollback_to_the_same_snapshot_undoes_what_was_done_since() -> None:
    told = left_out(steps(1, 8, 2.0), 4, 6)
    records = [started(2.0, 0), *spike(5.5, 4, "rollback", 2), *spike(7.5, 6, "rollback", 2), finished(10.0, 0, 8)]
    ledger = goodput_ledger([log(records, {0: told}, workers=1, ended=10.0)])
    assert ledger.worker_s["undone"] == pytest.approx(4.0)  # steps 3 to 6
    assert sum(incident.costs["undone"] for incident in ledger.incidents) == pytest.approx(4.0)


def test_weights_that_were_healed_are_an_incident() -> None:
    who = ["worker 1 (host a, pid 7)"]
    differ = WeightsDiffer(workers=[1], who=who, step=4, since_step=2, first="model.weight", source=0, num_alike=2)
    records = [started(2.0, 0), started(2.0, 1), record(6.0, differ, 0), record(6.1, differ, 1), finished(8.0, 0, 6)]
    told = steps(1, 6, 2.0)
    ledger = goodput_ledger([log([*records, finished(8.0, 1, 6)], {0: told, 1: told}, ended=8.0)])
    (incident,) = ledger.incidents
    assert "worker 1 (host a, pid 7) differed from 2 others' in model.weight; healed" in incident_text(incident)
    assert_whole(ledger, places=16.0)


def test_workers_of_other_hosts_are_named_and_not_counted_and_their_losses_are_reported(tmp_path: Path) -> None:
    RunRecord.begin_attempt(tmp_path, job={}, workers=4)
    for worker in (0, 1):  # 2 and 3 are elsewhere
        place = tmp_path / "attempt_1" / f"worker_{worker}"
        place.mkdir(parents=True)
        own = EventLog(place / "events.jsonl", worker=worker)
        own.emit(started(0, worker, startup_s=0.0).event)
        own.emit(StepDone(step=1, epoch=0, num_samples=1, loss=1.0, metrics={}, seconds=SECONDS, skipped=True))
        own.close()
    head = EventLog(tmp_path / "attempt_1" / "events.jsonl", worker=None)
    head.emit(RunStarted(run_dir="", attempt=1, workers=4, hosts=2, program="", launcher="local"))
    reason = "host b is gone"
    for worker in (2, 3):
        head.emit(WorkerLost(rank=worker, host="b", step=1, reason=reason))
    about: dict[str, Any] = {"causes": [reason], "members": [0, 1], "step": 1, "detected_s": 0.1, "regrouped_s": 0.2}
    head.emit(Regrouped(**about, steps_lost=0, holds=False))
    head.close()
    other = tmp_path / "of_the_other_host"
    for worker in (2, 3):
        place = other / "attempt_1" / f"worker_{worker}"
        place.mkdir(parents=True)
        with contextlib.closing(EventLog(place / "events.jsonl", worker=worker)) as own:
            own.emit(started(0, worker, startup_s=0.0).event)
    (whole,) = read_attempts(RunRecord.load(tmp_path), others=[other])
    assert list(goodput_ledger([whole]).workers) == [0, 1, 2, 3] and not whole.elsewhere
    (one,) = read_attempts(RunRecord.load(tmp_path))
    assert [step.skipped for step in one.steps(0)] == [True]
    ledger = goodput_ledger([one])
    assert list(ledger.workers) == [0, 1] and ledger.elsewhere == (2, 3)
    assert [(incident.kind, incident.workers, incident.causes) for incident in ledger.incidents] == [
        ("loss", [2, 3], [reason])
    ]
    assert sum(ledger.wall_s.values()) == pytest.approx(ledger.duration_s)
