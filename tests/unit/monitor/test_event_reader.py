"""Events come back whole, in order and once, however their files grow; steps become one row each."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from paceline.events import EventLog, Note, Record, StepDone, Warned, decode
from paceline.logs.log_reader import last_lines
from paceline.monitor.console.deduplication import Deduplicator, tag
from paceline.monitor.export.metrics_jsonl import metrics_line
from paceline.monitor.records.event_reader import EventTail
from paceline.monitor.records.run_files import GrowingFile, replace_text
from paceline.monitor.records.steps import StepMerger


def done(step: int, worker: int, *, when: float | None = None, **fields: object) -> Record:
    values: dict[str, object] = {"epoch": 0, "num_samples": 8, "loss": 1.0, "metrics": {}, "seconds": {"total": 0.5}}
    event = StepDone(step=step, **{**values, **fields})  # type: ignore[arg-type]  # the values are of many types
    return Record(float(step) if when is None else when, worker, event)


def worker_log(run: Path, worker: int) -> EventLog:
    path = run / "attempt_1" / f"worker_{worker}" / "events.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    return EventLog(path, worker=worker)


# ---------------------------------------------------------------------------------------------------------------- files


def test_a_growing_file_gives_lines_only_when_they_are_complete(tmp_path: Path) -> None:
    file = GrowingFile(tmp_path / "log")
    assert file.poll() == []  # it does not exist yet
    with open(tmp_path / "log", "wb", buffering=0) as out:
        assert file.poll() == []
        out.write(b"one\ntw")
        assert file.poll() == ["one"]
        assert file.poll() == []
        out.write("o \N{SNOWMAN}".encode()[:-1])  # in the middle of a character
        assert file.poll() == []
        out.write("\N{SNOWMAN}".encode()[-1:] + b"\nthree")
        assert file.poll() == ["two \N{SNOWMAN}"]
    assert file.rest() == "three"
    assert file.rest() == ""
    file.close()


def test_a_growing_file_is_read_in_portions_and_loses_nothing(tmp_path: Path) -> None:
    lines = [f"{number} " + "x" * 997 for number in range(3000)]
    (tmp_path / "log").write_text("\n".join(lines) + "\n")
    file = GrowingFile(tmp_path / "log")
    first = file.poll()
    assert 0 < len(first) < 3000
    assert first + file.poll(limit_bytes=None) == lines
    file.close()


@pytest.mark.parametrize("text", ["", "a", "a\n", "a\nb\n", "a\nb", "\n", "a\n\nb\n", "x" * 600_000 + "\nend\n"])
def test_last_lines_are_the_complete_lines_backwards(tmp_path: Path, text: str) -> None:
    (tmp_path / "log").write_text(text)
    assert list(last_lines(tmp_path / "log")) == text.split("\n")[:-1][::-1]


def test_replacing_a_text_leaves_no_other_file(tmp_path: Path) -> None:
    replace_text(tmp_path / "a.json", "1")
    replace_text(tmp_path / "a.json", "2")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "2"


# --------------------------------------------------------------------------------------------------------------- stream


def test_events_of_files_that_appear_later_are_found_and_sorted_by_time(tmp_path: Path) -> None:
    tail = EventTail(tmp_path, 1)
    assert tail.poll() == []
    one = worker_log(tmp_path, 1)
    one.emit(Note(text="first"))
    zero = worker_log(tmp_path, 0)
    zero.emit(Note(text="second"))
    one.emit(Note(text="third"))
    assert [(record.worker, record.event) for record in tail.poll()] == [
        (1, Note(text="first")),
        (0, Note(text="second")),
        (1, Note(text="third")),
    ]
    assert tail.poll() == []
    supervisor = EventLog(tmp_path / "attempt_1" / "events.jsonl", worker=None)
    supervisor.emit(Note(text="fourth"))
    assert [record.worker for record in tail.poll()] == [None]
    for log in (zero, one, supervisor):
        log.close()
    tail.close()


def test_a_damaged_line_is_reported_once_a_file_and_the_rest_is_read(tmp_path: Path) -> None:
    log = worker_log(tmp_path, 0)
    path = tmp_path / "attempt_1" / "worker_0" / "events.jsonl"
    log.emit(Note(text="before"))
    with open(path, "a") as file:
        file.write('{"event": "Note", "ti\n[1]\n{"event": "Note", "time": 1, "worker": 0, "unknown": 1}\n')
    log.emit(Note(text="after"))
    log.close()
    tail = EventTail(tmp_path, 1)
    events = [record.event for record in tail.poll()]
    assert [event.text for event in events if isinstance(event, Note)] == ["before", "after"]
    (warning,) = [event.text for event in events if isinstance(event, Warned)]
    assert "worker_0/events.jsonl, line 2 is not an event" in warning
    tail.close()


def test_what_an_event_log_writes_is_what_is_read(tmp_path: Path) -> None:
    log = worker_log(tmp_path, 3)
    event = done(7, 3, loss=float("nan"), metrics={"accuracy": float("inf")}).event
    log.emit(event)
    log.close()
    record = decode((tmp_path / "attempt_1" / "worker_3" / "events.jsonl").read_text())
    assert isinstance(record.event, StepDone) and record.event.loss is not None
    assert math.isnan(record.event.loss) and record.event.metrics == {"accuracy": float("inf")}


# ---------------------------------------------------------------------------------------------------------------- steps


def test_a_row_is_the_mean_of_the_workers_that_reported(tmp_path: Path) -> None:
    merger = StepMerger(range(3))
    merger.add(done(1, 0, when=10.0, metrics={"a": 1.0}, seconds={"total": 1.0, "data": 0.5}, num_bytes_sent=5))
    merger.add(
        done(1, 1, when=10.5, metrics={"a": 3.0, "b": 7.0}, seconds={"total": 2.0, "data": 0.0}, num_bytes_sent=6)
    )
    assert merger.rows() == []
    merger.add(done(1, 2, when=10.2, seconds={"total": 3.0, "data": 0.1}))
    (row,) = merger.rows()
    assert row.metrics == {"a": 2.0, "b": 7.0}
    assert row.seconds == {"total": 2.0, "data": pytest.approx(0.2)}
    assert (row.time, row.workers, row.num_bytes_sent) == (10.5, (0, 1, 2), 11)
    assert row.samples_per_s == 8 / 2.0  # the first step: by its own duration


def test_a_row_of_a_step_without_its_slowest_is_that_of_those_in_time() -> None:
    merger = StepMerger(range(3))
    merger.add(done(1, 0, when=1.0, seconds={"total": 1.0}, num_dropped=2))
    merger.add(done(1, 2, when=9.0, seconds={"total": 9.0}, num_dropped=2, late=True))
    merger.add(done(1, 1, when=1.0, seconds={"total": 3.0}, num_dropped=2))
    assert merger.rows() == []  # another one may have been in time, for all that is known
    (row,) = merger.rest()
    assert (row.workers, row.time, row.num_dropped) == ((0, 1), 1.0, 2)
    assert row.samples_per_s == (8 - 2) / 2.0
    assert metrics_line(row, attempt=1)["num_dropped"] == 2
    assert merger.last_steps == {0: 1, 1: 1, 2: 1}


def test_steps_of_single_workers_are_rows_of_their_own_however_late() -> None:
    merger = StepMerger(range(2))
    for step, worker, when in ((1, 0, 1.0), (3, 0, 2.0), (4, 0, 3.0), (5, 0, 4.0)):
        merger.add(done(step, worker, when=when, alone=True))
    assert [(row.step, row.workers) for row in merger.rows()] == [(1, (0,)), (3, (0,)), (4, (0,)), (5, (0,))]
    merger.add(done(2, 1, when=9.0, alone=True))
    assert [row.step for row in merger.rows()] == [2] and merger.rest() == []


def test_samples_per_second_come_from_the_time_between_commits() -> None:
    merger = StepMerger([0])
    merger.add(done(1, 0, when=10.0))
    merger.add(done(2, 0, when=14.0))
    assert [row.samples_per_s for row in merger.rows()] == [16.0, 2.0]


def test_any_order_between_workers_gives_each_row_once_and_in_order() -> None:
    numbers = random.Random(0)
    for workers in (1, 2, 5):
        merger, given, next_step = StepMerger(range(workers)), [], dict.fromkeys(range(workers), 1)
        while min(next_step.values()) <= 40 or len(given) < 40:
            for worker in next_step:  # a poll reads the files one after the other; the later ones may be far ahead
                for _ in range(numbers.randrange(5) if next_step[worker] <= 40 else 0):
                    if next_step[worker] <= min(40, 1 + min(next_step.values())):
                        merger.add(done(next_step[worker], worker))
                        next_step[worker] += 1
            given += merger.rows()
        assert [row.step for row in given] == list(range(1, 41))
        assert all(len(row.workers) == workers for row in given)


def test_a_file_that_is_read_too_early_in_a_poll_does_not_cut_its_worker_off() -> None:
    merger = StepMerger([0, 1])
    for step in range(1, 11):  # worker 0's file was read before any of this was written
        merger.add(done(step, 1))
    assert merger.rows() == []
    for step in range(1, 11):
        merger.add(done(step, 0))
    assert [row.workers for row in merger.rows()] == [(0, 1)] * 10


def test_a_worker_that_never_speaks_delays_a_row_by_two_steps() -> None:
    merger, given = StepMerger([0, 1]), []
    for step in range(1, 8):
        merger.add(done(step, 0))
        given.append([row.step for row in merger.rows()])
    assert given == [[], [], [], [1], [2], [3], [4]]
    merger.add(done(3, 1))  # too late
    assert [row.step for row in merger.rest()] == [5, 6, 7]
    assert merger.rest() == []


def test_after_a_loss_only_the_members_are_waited_for_and_a_newcomer_from_its_first_step_on() -> None:
    merger = StepMerger([0, 1])
    for worker in (0, 1):
        merger.add(done(1, worker))
    merger.regroup([0])
    merger.add(done(2, 0))
    assert [row.workers for row in merger.rows()] == [(0, 1), (0,)]
    merger.join(1)
    merger.add(done(3, 0))
    assert merger.rows() == []
    merger.add(done(3, 1))
    assert [row.workers for row in merger.rows()] == [(0, 1)]
    merger.leave(0)
    merger.add(done(4, 1))
    assert [row.workers for row in merger.rows()] == [(1,)]


def test_a_continued_run_begins_at_any_step() -> None:
    merger = StepMerger([0])
    merger.add(done(401, 0))
    assert [row.step for row in merger.rows()] == [401]


def test_a_reported_loss_is_the_loss_where_the_step_has_none_and_is_not_said_twice() -> None:
    cases = [
        (None, {"loss": 2.0}, 2.0, {}),
        (2.0, {"loss": 2.0000001}, 2.0, {}),
        (2.0, {"loss": 3.0}, 2.0, {"reported_loss": 3.0}),
    ]
    for loss, metrics, expected_loss, expected in cases:
        merger = StepMerger([0])
        merger.add(done(1, 0, loss=loss, metrics={**metrics, "time": 5.0}))
        (row,) = merger.rows()
        assert row.loss == expected_loss
        assert row.metrics == {"reported_time": 5.0, **expected}


# ----------------------------------------------------------------------------------------------------------------- once


def test_equal_texts_of_several_workers_are_shown_once_with_all_of_them() -> None:
    shown: list[tuple[str, tuple[int, ...]]] = []
    once = Deduplicator(range(4), lambda text, workers: shown.append((text, workers)))
    for worker in (2, 0, 1):
        once.add("same", worker, now=0.0)
    once.add("own", 3, now=0.1)
    once.release(now=0.2)
    assert shown == []  # worker 3 may still say it
    once.release(now=0.5)
    assert shown == [("same", (0, 1, 2)), ("own", (3,))]
    once.add("same", 3, now=9.0)
    once.release(now=99.0)
    assert len(shown) == 2


def test_what_all_have_said_waits_no_longer() -> None:
    shown: list[str] = []
    once = Deduplicator(range(2), lambda text, _: shown.append(text))
    once.add("same", 0, now=0.0)
    once.add("same", 1, now=0.0)
    once.release(now=0.0)
    assert shown == ["same"]


def test_rank_and_time_before_a_line_make_no_difference() -> None:
    shown: list[str] = []
    once = Deduplicator(range(2), lambda text, _: shown.append(text))
    once.add("[rank0]:[W1121 05:21:00.123456789 Group.cpp:12] Warning: odd", 0, now=0.0)
    once.add("[rank1]:[W1121 05:21:01.000000001 Group.cpp:12] Warning: odd", 1, now=0.0)
    once.add("[E5] one", 0, now=0.0)
    once.add("[E6] one", 0, now=0.0)
    once.release(now=1.0)
    assert len(shown) == 3


def test_workers_are_named_in_runs() -> None:
    said = [tag([2]), tag([1, 0]), tag(range(4)), tag([0, 1, 2, 5, 7, 8])]
    assert said == ["[worker 2]", "[workers 0, 1]", "[workers 0-3]", "[workers 0-2, 5, 7, 8]"]
