"""A flight record shows what a worker does; the detector names those that others wait for, once it is time."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import quick
from paceline.comm.call_site import is_user_code
from paceline.comm.elastic.generation_group import ElasticGroup
from paceline.comm.flight_recorder import (
    NUM_CALLS,
    STACK_SIGNAL,
    FlightRecorder,
    RecordedCollective,
    RecordedGroup,
    WorkTotals,
    read_flight_record,
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
from paceline.monitor.hang.stack_dumps import StackFile, newest_dump, place_of, stack_text
from paceline.monitor.hang.worker_activity import WorkerActivity, read_activity
from paceline.monitor.records.failure import Failure, explain
from paceline.worker.record.flight_recording import COLLECTIVES, KEYWORDS, recording_user_collectives

OWN, USERS = 7, 8  # ids of the run's own group, and of one that the user's code has made
EVERYBODY = (0, 1, 2, 3)


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


def doing(
    worker: int,
    *calls: RecordedCollective,
    waited_s: float = 0.0,
    idle_s: float = 0.0,
    step_s: float = 1.0,
    generation: int = 0,
    **fields: object,
) -> WorkerActivity:
    """A worker that has entered these calls, and waits for the last one if it has waited at all."""
    entered = {group: max((c.sequence for c in calls if c.group == group), default=0) for group in (OWN, USERS)}
    made = WorkerActivity(
        worker=worker,
        host="a",
        pid=4700 + worker,
        limit_s=600.0,
        state="running",
        step=812,
        steps_s=(step_s,) * 3 if step_s else (),
        phase="forward and backward",
        phase_s=waited_s,
        line="train.py:30 in train",
        work=WorkTotals(),
        run_delay_s=None,
        idle_s=max(idle_s, waited_s),
        waits_for=calls[-1].serial if calls and waited_s else 0,
        waited_s=waited_s,
        groups=(
            RecordedGroup(id=OWN, name=f"generation {generation}", members=EVERYBODY, entered=entered[OWN]),
            RecordedGroup(id=USERS, name="torch group 0", members=EVERYBODY, entered=entered[USERS]),
        ),
        calls=calls,
    )
    return dataclasses.replace(made, **fields)


def one_is_missing(waited_s: float, **fields: object) -> dict[int, WorkerActivity]:
    waiting = {k: doing(k, call(416), call(417), waited_s=waited_s, **fields) for k in (0, 1, 3)}  # type: ignore[arg-type]  # the values are of many types
    return {**waiting, 2: doing(2, call(416), idle_s=waited_s, **fields)}  # type: ignore[arg-type]  # the values are of many types


def only(findings: list[HangFinding]) -> HangFinding:
    assert len(findings) == 1
    return findings[0]


# ------------------------------------------------------------------------------------------------------------- the ring


def test_a_ring_tells_what_was_written_to_it(tmp_path: Path) -> None:
    recorder = FlightRecorder.create(tmp_path / "doing", worker=2, limit_s=600.0)
    recorder.join("generation 3", [0, 2, 5, 6, 7], is_main=True)
    recorder.begin("forward and backward", 812)
    recorder.enter("all_reduce", "all_reduce of layers.4", dtype="torch.float32", numel=1234)
    serial = recorder.enter("barrier", "")
    recorder.wait(serial)
    image = read_flight_record(tmp_path / "doing")
    assert image is not None
    assert (image.worker, image.pid) == (2, os.getpid())
    assert (image.step, image.phase, image.limit_s) == (812, "forward and backward", 600.0)
    (group,) = image.groups
    assert (group.name, group.members, group.entered) == ("generation 3", (0, 2, 5, 6, 7), 2)
    first, second = image.calls
    assert (first.sequence, first.kind, first.what) == (1, "all_reduce", "all_reduce of layers.4")
    assert (first.dtype, first.numel, first.step, first.group) == ("float32", 1234, 812, group.id)
    assert first.line.startswith("test_hang_detection.py:") and first.line.endswith(
        "in test_a_ring_tells_what_was_written_to_it"
    )
    assert image.waits_for == second.serial == serial
    recorder.leave()
    image = read_flight_record(tmp_path / "doing", with_calls=False)
    assert image is not None
    assert (image.waits_for, image.calls) == (0, ())


def test_a_ring_keeps_the_newest_calls_and_counts_all(tmp_path: Path) -> None:
    recorder = FlightRecorder.create(tmp_path / "doing", worker=0, limit_s=1.0)
    recorder.join("generation 0", [0, 1], is_main=True)
    for _ in range(NUM_CALLS + 10):
        recorder.enter("all_reduce", "x")
    image = read_flight_record(tmp_path / "doing")
    assert image is not None
    assert [one.sequence for one in image.calls] == list(range(11, NUM_CALLS + 11))
    assert image.groups[0].entered == NUM_CALLS + 10


def test_a_new_generation_counts_from_the_beginning_and_other_groups_stay(tmp_path: Path) -> None:
    recorder = FlightRecorder.create(tmp_path / "doing", worker=0, limit_s=1.0)
    recorder.join("generation 0", [0, 1], is_main=True)
    recorder.join("torch group 0", [0, 1])
    recorder.enter("all_reduce", "x")
    recorder.enter("all_gather", "", group="torch group 0")
    recorder.join("generation 1", [0, 2], is_main=True)
    recorder.enter("all_reduce", "x")
    image = read_flight_record(tmp_path / "doing")
    assert image is not None
    assert [(group.name, group.members, group.entered) for group in image.groups] == [
        ("generation 1", (0, 2), 1),
        ("torch group 0", (0, 1), 1),
    ]


def test_steps_and_work_are_told_without_the_first_step(tmp_path: Path) -> None:
    recorder = FlightRecorder.create(tmp_path / "doing", worker=0, limit_s=1.0)
    for step in (1, 2, 3):
        recorder.begin("waiting for data", step)
    recorder.add_work(3, {"data": 1.0, "compute": 2.0, "communication": 3.0, "optimizer": 4.0, "total": 11.0})
    recorder.add_work(2, {"data": 1.0, "compute": 2.0, "communication": 3.0, "optimizer": 4.0, "total": 11.0})
    image = read_flight_record(tmp_path / "doing")
    assert image is not None
    assert len(image.steps_s) == 2 and all(0 < seconds < 1 for seconds in image.steps_s)
    assert image.work == WorkTotals(steps=2, micros=5, data_s=2, compute_s=4, communication_s=6, optimizer_s=8)


@pytest.mark.parametrize("content", [b"", b"PACERNG1", b"x" * 100_000])
def test_what_is_no_ring_is_not_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "doing").write_bytes(content)
    assert read_flight_record(tmp_path / "doing") is None
    assert read_flight_record(tmp_path / "absent") is None


def test_a_look_says_how_the_process_is_and_travels_as_json(tmp_path: Path) -> None:
    recorder = FlightRecorder.create(tmp_path / "doing", worker=1, limit_s=1.0)
    recorder.join("generation 0", [0, 1], is_main=True)
    recorder.enter("all_reduce", "x")
    seen = read_activity(tmp_path, 1, host="a")
    assert seen is not None
    assert (seen.state, seen.pid, seen.entered(seen.groups[0].id)) == ("running", os.getpid(), 1)
    assert WorkerActivity.from_json(json.loads(json.dumps(seen.to_json()))) == seen
    assert read_activity(tmp_path, 2, host="a") is None, "the file is another worker's"


# --------------------------------------------------------------------------------------------------------- the detector


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


# ------------------------------------------------------------------------------------------- the user's own collectives


@pytest.fixture
def lonely_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("lonely_group")
def test_the_users_own_collectives_are_noted_while_a_run_lasts_and_put_back_afterwards(tmp_path: Path) -> None:
    recorder = FlightRecorder.create(tmp_path / "doing", worker=0, limit_s=1.0)
    names: dict[str, Any] = {"reduce_them": dist.all_reduce, "dist": dist}  # as after an import by name
    exec(compile("def train(x):\n    reduce_them(x)\n    dist.barrier()", "train.py", "exec"), names)
    before = {name: getattr(dist, name) for name in COLLECTIVES}
    with recording_user_collectives(recorder, names["train"]):
        names["train"](torch.ones(3))
        assert names["reduce_them"] is dist.all_reduce is not before["all_reduce"]
        distributed_c10d.all_reduce(torch.ones(4))  # torch's own way
    assert {name: getattr(dist, name) for name in COLLECTIVES} == before
    assert names["reduce_them"] is before["all_reduce"]
    image = read_flight_record(tmp_path / "doing")
    assert image is not None
    assert [(one.kind, one.sequence, one.numel, one.dtype) for one in image.calls] == [
        ("torch.distributed.all_reduce", 1, 3, "float32"),
        ("torch.distributed.barrier", 2, 0, ""),
    ]
    assert [(group.members, group.entered) for group in image.groups] == [((0,), 2)]
    assert image.waits_for == 0


@pytest.mark.usefixtures("lonely_group")
@pytest.mark.parametrize("name", sorted(COLLECTIVES))
def test_every_collective_that_is_followed_has_the_parameters_that_the_table_says(name: str) -> None:
    parameters = list(inspect.signature(getattr(dist, name)).parameters)
    tensor_at, group_at = COLLECTIVES[name]
    assert parameters[group_at] == "group"
    assert tensor_at is None or parameters[tensor_at] == KEYWORDS.get(name, "tensor")


# --------------------------------------------------------------------------------------------------------------- stacks

DUMP = """Stack (most recent call first):
  File "/usr/lib/python3.11/site-packages/PIL/Image.py", line 3 in open
  File "/home/u/train.py", line 88 in load_image
  File "/venv/lib/python3.11/site-packages/torch/utils/data.py", line 5 in fetch
  File "/home/u/train.py", line 20 in <module>
  File "<frozen runpy>", line 88 in run
"""


def test_the_users_innermost_line_is_found_in_a_dump() -> None:
    frames = newest_dump(DUMP)
    assert place_of(frames) == "train.py:88 in load_image"
    assert stack_text(frames).splitlines() == [
        '  File "/home/u/train.py", line 20, in <module>',
        "  ... 1 frame in libraries, the last: data.py:5 in fetch",
        '  File "/home/u/train.py", line 88, in load_image',
        "  ... 1 frame in libraries, the last: Image.py:3 in open",
    ]
    assert newest_dump(DUMP + DUMP.replace("line 88 in load_image", "line 99 in load_image"))[1].line == 99
    assert place_of(newest_dump("")) == ""


def test_a_dump_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "stacks"
    path.write_text(DUMP.replace("88", "77"))
    stack = StackFile(tmp_path)
    stack.ask()
    assert stack.answer() is None
    with open(path, "a") as file:
        file.write(DUMP[:60])
    assert stack.answer() is None, "it may still grow"
    with open(path, "a") as file:
        file.write(DUMP[60:])
    assert stack.answer() is None
    frames = stack.answer()
    assert frames is not None and place_of(frames) == "train.py:88 in load_image"


BUSY = """
import sys, threading
from paceline.worker.record.flight_recording import dump_stacks_on_signal

def deep(depth):
    return depth and deep(depth - 1)

def turn():
    while True:
        deep(50)

def aside():
    turn()

dump_stacks_on_signal(sys.argv[1])
threading.Thread(target=aside, daemon=True).start()
print("ready", flush=True)
turn()
"""


def test_a_process_of_busy_threads_lives_through_any_number_of_requests(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY, str(tmp_path)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            stack = StackFile(tmp_path)
            for _ in quick.some(range(15), step=4):
                stack.ask()
                process.send_signal(STACK_SIGNAL)
                while (frames := stack.answer()) is None:
                    assert process.poll() is None
                    time.sleep(0.02)
                assert frames[-1].function == "<module>"
        finally:
            process.kill()
    stacks = (tmp_path / "stacks").read_text()
    assert "in aside" not in stacks, "a thread that runs meanwhile is not read"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/home/u/train.py", True),
        ("/tmp/ipykernel_1/2.py", True),
        ("/usr/lib/python3.11/queue.py", False),
        ("/usr/lib/python3/dist-packages/x.py", False),
        ("/v/lib/python3.12/site-packages/torch/nn.py", False),
        ("<frozen importlib>", False),
        (HangDetector.look.__code__.co_filename, False),
    ],
)
def test_whose_file_it_is(path: str, expected: bool) -> None:
    assert is_user_code(path) is expected


def test_a_hang_is_explained_by_its_sentence_and_everybodys_stack() -> None:
    error = {"kind": "Hang", "message": "worker 1 has not entered x", "says_all": True, "names_workers": True}
    text = explain(
        [
            Failure(worker=1, host="a", pid=2, error={**error, "stacks": "worker 1:\n  train.py:88"}),
            Failure(worker=0, host="a", pid=1, signal=15, sent_by_us=True),
        ]
    )
    assert text.splitlines() == [
        "worker 1 has not entered x",
        "worker 1:",
        "  train.py:88",
        "worker 0 stopped because of it",
    ]
