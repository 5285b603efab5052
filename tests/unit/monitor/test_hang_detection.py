"""The hang detector names those that others wait for, once it is time, and calls that do not fit each other."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from paceline.comm.elastic.generation_group import ElasticGroup
from paceline.comm.flight_recorder import (
    FlightRecorder,
    RecordedCollective,
)
from paceline.comm.group import SingleWorkerGroup
from paceline.monitor.hang.hang_detection import (
    FIRST_S,
    MARGIN_S,
    HangDetector,
    HangFinding,
    absences,
    cause_text,
    circles,
    finding_text,
    mismatches,
    outlook_text,
)
from paceline.monitor.hang.hang_monitor import CIRCLE_LIMIT_S, HangMonitor
from paceline.monitor.hang.worker_activity import WorkerActivity, read_activity
from worker_activities import EVERYBODY, OWN, USERS, doing


def call(
    sequence: int,
    *,
    group: int = OWN,
    kind: str = "all_reduce",
    what: str = "all_reduce of layers.4.weight",
    numel: int = 100,
    line: str = "train.py:30 in train",
) -> RecordedCollective:
    return RecordedCollective(
        serial=sequence + group * 1000,
        sequence=sequence,
        group=group,
        kind=kind,
        what=what,
        dtype="float32",
        numel=numel,
        step=812,
        line=line,
        age_s=1.0,
    )


def one_is_missing(waited_s: float, **fields: object) -> dict[int, WorkerActivity]:
    waiting = {k: doing(k, call(416), call(417), waited_s=waited_s, **fields) for k in (0, 1, 3)}  # type: ignore[arg-type]  # the values are of many types
    return {**waiting, 2: doing(2, call(416), idle_s=waited_s, **fields)}  # type: ignore[arg-type]  # the values are of many types


def only(findings: list[HangFinding]) -> HangFinding:
    assert len(findings) == 1
    return findings[0]


def test_who_has_not_come_is_named_with_the_call_the_place_and_who_waits() -> None:
    activities = one_is_missing(21.0)
    finding = only(HangDetector().look(activities))
    assert finding_text(finding, activities, {2: "train.py:88 in load_image"}) == (
        "worker 2 (a, pid 4702) has not entered all_reduce 417 (layers.4.weight, called at train.py:30 in train, step "
        "812); it is at train.py:88 in load_image; workers 0, 1, 3 have waited 21.0 s"
    )


@pytest.mark.parametrize(("step_s", "expected_s"), [(1.0, 3.0), (20.0, 60.0), (0.0, FIRST_S)])
def test_a_wait_is_told_when_it_is_longer_than_the_steps_of_this_run_explain(step_s: float, expected_s: float) -> None:
    detector = HangDetector()
    assert detector.look(one_is_missing(expected_s + MARGIN_S - 0.1, step_s=step_s)) == []
    assert only(detector.look(one_is_missing(expected_s + MARGIN_S + 0.1, step_s=step_s))).named == (2,)


def test_a_wait_that_ended_well_was_no_hang_and_the_next_one_of_its_kind_may_last_as_long() -> None:
    detector = HangDetector()
    detector.look(one_is_missing(60.0))
    detector.look({k: doing(k, call(418)) for k in EVERYBODY})
    assert detector.look(one_is_missing(80.0)) == []
    assert detector.look(one_is_missing(90.0 + MARGIN_S)) != []


def test_a_wait_that_has_used_up_its_limit_is_told_whatever_was_expected() -> None:
    assert HangDetector().look(one_is_missing(4.0, limit_s=4.0)) != []
    assert HangDetector().look(one_is_missing(3.9, limit_s=4.0)) == []


def test_nobody_is_named_while_all_are_in_the_same_call() -> None:
    assert absences({k: doing(k, call(417), waited_s=900.0) for k in EVERYBODY}) == []


def test_the_one_that_is_furthest_behind_is_named() -> None:
    activities = one_is_missing(30.0)
    activities[1] = doing(1, *(call(number) for number in (415,)), idle_s=30.0)
    assert only(absences(activities)).named == (1,)


def test_who_has_launched_a_collective_and_does_nothing_more_waits_too() -> None:
    """As with accelerators, where waiting for a collective does not block the host."""
    activities = {k: doing(k, call(416), call(417), idle_s=30.0) for k in (0, 1, 3)} | {2: doing(2, call(416))}
    finding = only(HangDetector().look(activities))
    assert (finding.named, finding.waiting, finding.waited_s) == ((2,), (0, 1, 3), 30.0)


def test_nobody_is_awaited_for_what_members_entered_before_they_parted(tmp_path: Path) -> None:
    """Worker 0 has come in the place of another one, was in none of it, and trains; worker 1 has a long batch."""
    members = list[ElasticGroup]()
    for worker in (0, 1, 2):
        (tmp_path / f"worker_{worker}").mkdir()
        recorder = FlightRecorder.create(tmp_path / f"worker_{worker}" / "doing", worker=worker, limit_s=8.0)
        group = None if worker == 0 else SingleWorkerGroup()
        members.append(ElasticGroup(group, generation=0, ranks=() if worker == 0 else (0, 1, 2), recorder=recorder))
        if worker > 0:
            recorder.join("generation 0", (0, 1, 2), is_main=True)
            recorder.wait(recorder.enter("broadcast_object", ""))
            recorder.leave()

    def seen() -> dict[int, WorkerActivity]:
        found = [read_activity(tmp_path / f"worker_{worker}", worker, host="a") for worker in (0, 1, 2)]
        return {one.worker: one for one in found if one is not None}

    assert only(absences(seen())).named == (0,)  # as long as they are together
    for worker, one in enumerate(members):
        one.detach(worker)
    assert absences(seen()) == []
    for one in members:
        one.join()
    assert absences(seen()) == [] and [one.groups[0].name for one in seen().values()][1:] == ["generation 0"] * 2


def test_the_outlook_says_when_the_wait_ends_and_what_ends_it_now() -> None:
    activities = one_is_missing(21.0)
    (finding,) = absences(activities)

    def said(finding: HangFinding = finding, *, limit_s: float = 600.0, goes_on: bool = True, host: str = "a") -> str:
        return outlook_text(finding, activities, limit_s=limit_s, goes_on=goes_on, host=host)

    pid = activities[2].pid
    assert said() == f". The run gives it up in 579 s (timeout_s) and goes on; `kill -9 {pid}` does it now"
    assert said(host="other").endswith(f"`kill -9 {pid}` on a does it now")
    assert said(goes_on=False) == ". The job ends in 579 s (timeout_s) if that does not change"
    certain = dataclasses.replace(finding, kind="mismatch")
    assert said(certain).startswith(". The job ends in 579 s")
    assert said(limit_s=21.5) == said(limit_s=float("inf")) == ""
    stopped = {**activities, 2: dataclasses.replace(activities[2], state="stopped")}
    assert outlook_text(finding, stopped, limit_s=600.0, goes_on=True, host="a") == ""


def test_the_cause_names_the_place_and_how_long_everybody_stood_still() -> None:
    activities = one_is_missing(25.3)
    (finding,) = absences(activities)
    assert cause_text(finding, activities, {2: "train.py:88 in load_image"}, 25.0) == (
        "worker 2 (a, pid 4702) was hanging at train.py:88 in load_image and was ended: the others had stood still "
        "for 25.3 s (timeout_s is 25)"
    )
    stopped = {**activities, 2: dataclasses.replace(activities[2], state="stopped")}
    assert "was silent, as it was stopped (SIGSTOP, or a debugger), and was ended" in cause_text(
        finding, stopped, {}, 25.0
    )


def test_a_stopped_worker_is_called_stopped() -> None:
    activities = one_is_missing(21.0)
    activities[2] = dataclasses.replace(activities[2], state="stopped")
    text = finding_text(only(HangDetector().look(activities)), activities, {})
    assert text.startswith("worker 2 (a, pid 4702) is stopped (SIGSTOP, or a debugger) and has not entered all_reduce")
    assert "last seen at train.py:30 in train; workers 0, 1, 3 have waited 21.0 s" in text


def test_a_worker_that_has_ended_is_not_named() -> None:
    activities = one_is_missing(21.0)
    activities[2] = dataclasses.replace(activities[2], state="gone")
    assert HangDetector().look(activities) == []


def test_a_worker_that_has_not_begun_is_named() -> None:
    activities = one_is_missing(60.0)
    del activities[2]
    text = finding_text(only(HangDetector().look(activities)), activities, {})
    assert text.startswith("worker 2 has not entered") and "has not come to paceline.run() yet" in text


def test_members_of_a_generation_that_is_over_do_not_count() -> None:
    """Worker 2 was left behind by a regrouping: nobody waits for it in the old group."""
    left_behind = doing(2, call(3), idle_s=90.0)
    others = {k: doing(k, call(9), waited_s=50.0, generation=1) for k in (0, 1, 3)}
    for k, one in others.items():
        own = dataclasses.replace(one.groups[0], id=99, members=(0, 1, 3), entered=9)
        moved = tuple(dataclasses.replace(c, group=99) for c in one.calls)
        others[k] = dataclasses.replace(one, groups=(own,), calls=moved)
    left_behind = dataclasses.replace(left_behind, groups=left_behind.groups[:1])
    assert absences({**others, 2: left_behind}) == []


@pytest.mark.parametrize(
    "other", [call(417, numel=2), call(417, kind="barrier"), call(417, what="evaluation")], ids=["size", "kind", "what"]
)
def test_different_calls_under_one_number_are_told_at_the_second_look(other: RecordedCollective) -> None:
    activities = {k: doing(k, call(417), waited_s=0.5) for k in (0, 1, 3)} | {2: doing(2, other, waited_s=0.5)}
    detector = HangDetector()
    assert detector.look(activities) == []
    finding = only(detector.look(activities))
    assert (finding.kind, finding.named, finding.waiting) == ("mismatch", (2,), (0, 1, 3))
    text = finding_text(finding, activities, {})
    assert "number 417 is " in text and "for worker 2, and all_reduce of 100 float32 (layers.4.weight" in text


def test_the_first_mismatch_counts_and_equal_calls_are_none() -> None:
    same = [call(1), call(2)]
    assert mismatches({0: doing(0, *same), 1: doing(1, *same)}) == []
    different = {0: doing(0, call(1), call(2, numel=1), call(3, numel=1)), 1: doing(1, call(1), call(2), call(3))}
    assert only(mismatches(different)).call.sequence == 2


def test_who_has_sent_more_than_was_taken_waits_for_that_only_where_it_says_so() -> None:
    def of_two(made: WorkerActivity) -> WorkerActivity:
        return dataclasses.replace(made, groups=tuple(dataclasses.replace(g, members=(0, 1)) for g in made.groups))

    sent = [call(1, group=USERS, kind="transfer"), call(2, group=USERS, kind="transfer")]
    behind = of_two(doing(1, call(1), sent[0]))
    elsewhere = of_two(doing(0, *sent, call(1), waited_s=40.0))  # in the run's own group, where nobody is late
    assert absences({0: elsewhere, 1: behind}) == []
    here = of_two(doing(0, call(1), *sent, waited_s=40.0))
    assert only(absences({0: here, 1: behind})).named == (1,)


def test_two_groups_whose_members_wait_for_each_other_are_a_circle_told_without_delay() -> None:
    users = call(1, group=USERS, kind="torch.distributed.all_gather", what="", line="train.py:31 in train")
    activities = {k: doing(k, call(418), waited_s=3.0) for k in (0, 2, 3)} | {
        1: doing(1, call(417), users, waited_s=3.0)
    }
    detector = HangDetector()
    detector.look(activities)
    finding = only(detector.look(activities))
    assert finding.kind == "circle" and finding.named == (1,)
    assert finding_text(finding, activities, {}).startswith(
        "worker 1 (a, pid 4701) waits in torch.distributed.all_gather 1 (called at train.py:31 in train, step 812), "
        "which workers 0, 2, 3 have not entered; workers 0, 2, 3 wait in all_reduce 418 ("
    )
    said = outlook_text(finding, activities, limit_s=CIRCLE_LIMIT_S, goes_on=False, host="a")
    assert said == ". They wait for each other, so the job ends in 12 s"


def test_a_circle_is_ended_long_before_the_workers_own_timeout(tmp_path: Path) -> None:
    users = call(1, group=USERS, kind="torch.distributed.all_gather")
    late = {1: doing(1, call(417), users, waited_s=16.0)}
    finding = only(circles({k: doing(k, call(418), waited_s=16.0) for k in (0, 2, 3)} | late))
    monitor = HangMonitor(tmp_path, host="a", local=(0, 1), control=None, say=print)
    monitor._detector.limit_s = 600.0
    assert monitor._is_final(finding)
    assert not monitor._is_final(dataclasses.replace(finding, waited_s=14.0))
    assert not monitor._is_final(dataclasses.replace(finding, kind="absent"))
