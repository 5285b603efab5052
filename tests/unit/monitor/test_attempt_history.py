"""Work that was not saved is told: in the closing table, and when the run is started again."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_run_files import Workers
from paceline.events import CheckpointSaved, EventLog, SpikeSeen, WorkerLost
from paceline.monitor.records.attempt_history import repeated_steps_text
from paceline.monitor.watch import Watch
from paceline.plan.job import Job


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    workers = Workers(tmp_path / "run")
    yield workers
    workers.close()


def ended(workers: Workers, *, saved: int | None, state: str = "stopped") -> str:
    """What the console shows of an attempt of seven steps."""
    stream = io.StringIO()
    watch = Watch(workers.run, 1, 2, job=Job(), stream=stream)
    workers.start()
    for number in range(1, 8):
        workers.step(number)
    if saved is not None:
        path = str(workers.run / "checkpoints" / f"step_{saved}")
        workers.logs[0].emit(CheckpointSaved(step=saved, path=path, num_bytes=8, stall_s=0.0, write_s=0.0))
    supervisor = EventLog(workers.attempt / "events.jsonl", worker=None)
    supervisor.emit(WorkerLost(rank=1, host="a", step=6, reason="worker 1 killed by signal 9"))
    supervisor.close()
    facts = watch.finish(state, 76 if state == "stopped" else 0)
    assert facts["steps_unsaved"] == (0 if state == "finished" else 7 - (saved or 0))
    return stream.getvalue()


def test_an_attempt_that_saved_nothing_says_how_many_steps_that_costs(workers: Workers) -> None:
    shown = ended(workers, saved=None)
    assert (
        "checkpoint     none of this attempt is complete, 7 steps are lost: --save-every STEPS saves more often"
        in shown
    )
    assert "1 worker lost, 0 taken in again, 7 steps lost" in shown


def test_an_attempt_that_went_on_after_its_last_save_says_what_is_behind_it(workers: Workers) -> None:
    shown = ended(workers, saved=6)
    assert "checkpoint     run/checkpoints/step_6 (1 step after it is lost)" in shown
    assert "1 step lost" in shown


@pytest.mark.parametrize(("saved", "state"), [(7, "stopped"), (None, "finished")])
def test_what_was_saved_and_what_finished_has_lost_nothing(workers: Workers, saved: int | None, state: str) -> None:
    shown = ended(workers, saved=saved, state=state)
    assert "0 steps lost" in shown
    assert "is lost" not in shown and "are lost" not in shown


def test_the_closing_table_says_how_many_steps_rollbacks_undid(workers: Workers) -> None:
    stream = io.StringIO()
    watch = Watch(workers.run, 1, 2, job=Job(), stream=stream)
    workers.start()
    for number in range(1, 11):
        workers.step(number, skipped=number in (5, 8))
    for step in (5, 8):  # of both, back to step 2: steps 3, 4, and then 6, 7
        workers.emit(SpikeSeen(step=step, loss=9.0, expected=1.0, action="rollback", to_step=2))
    assert watch.finish("finished", 0)["undone_steps"] == 4
    assert "steps          10 (80 samples), 2 of them skipped, 4 undone by a rollback\n" in stream.getvalue()


def test_the_closing_table_tells_overflows_of_fp16_from_broken_steps(workers: Workers) -> None:
    stream = io.StringIO()
    watch = Watch(workers.run, 1, 2, job=Job(), stream=stream)
    workers.start(plan="replicas=2+compute(precision=fp16)")
    for number, overflows in enumerate((1, 2, 2, 2), start=1):
        scale = {"loss_scale": 65536.0 / 2**overflows, "overflows": float(overflows)}
        workers.step(number, skipped=number < 4, optimizer=scale)
    assert watch.finish("finished", 0)["metrics"] == {"loss_scale": 16384.0, "overflows": 2.0}
    assert "steps          4 (32 samples), 3 of them skipped (in fp16 2 overflowed so far)\n" in stream.getvalue()


@pytest.mark.parametrize(
    ("resumed_from", "text"),
    [
        (0, "attempt 1 came to step 7, and nothing was saved: beginning at step 1, 7 steps are taken again"),
        (6, "attempt 1 came to step 7, and saved step 6 last: 1 step is taken again"),
        (7, None),
        (9, None),
    ],
)
def test_the_next_start_says_which_steps_are_taken_again(workers: Workers, resumed_from: int, text: str | None) -> None:
    for number in range(1, 8):
        workers.step(number)
    (workers.run / "attempt_2" / "worker_0").mkdir(parents=True)  # it did not come to a step
    assert repeated_steps_text(workers.run, before_attempt=3, resumed_from=resumed_from) == text
    assert repeated_steps_text(workers.run, before_attempt=1, resumed_from=resumed_from) is None, "it is the first"


@pytest.mark.parametrize(("fresh", "is_said"), [(False, True), (True, False)])
def test_the_console_of_the_next_attempt_says_it_unless_a_fresh_start_was_asked_for(
    tmp_path: Path, fresh: bool, is_said: bool
) -> None:
    first = Workers(tmp_path / "run")
    for number in range(1, 8):
        first.step(number)
    first.close()
    second = Workers(tmp_path / "run")
    stream = io.StringIO()
    watch = Watch(tmp_path / "run", 2, 2, job=Job(fresh=fresh), stream=stream)
    second.start()
    watch.poll()
    watch.finish("stopped", 130)
    second.close()
    assert ("7 steps are taken again" in stream.getvalue()) is is_said


@pytest.mark.parametrize(
    ("second", "resumed_from", "text"),
    [
        ({}, 5, "attempt 1 came to step 7, and saved step 5 last: 2 steps are taken again"),
        ({}, 7, None),
        (
            {"from_step": 5, "of_attempt": 1},
            5,
            "attempt 2 came to step 9, and saved step 5 last: 4 steps are taken again",
        ),
    ],
    ids=["started over", "nothing lost", "went on"],
)
def test_steps_of_an_attempt_that_led_nowhere_are_not_taken_again(
    tmp_path: Path, second: dict[str, int], resumed_from: int, text: str | None
) -> None:
    """The second attempt saved nothing, so the third goes on from the first one's checkpoint."""
    places: tuple[dict[str, int], ...] = ({}, second, {"from_step": resumed_from, "of_attempt": 1})
    for place, last in zip(places, (7, 9, 0), strict=True):
        workers = Workers(tmp_path / "run")
        for number in range(place.get("from_step", 0) + 1, last + 1):
            workers.step(number)
        workers.close()
        head = {"attempt": 1, "from_step": 0, "of_attempt": None, **place}
        (workers.directories[0] / "ledger.jsonl").write_text(json.dumps(head) + "\n")
    assert repeated_steps_text(tmp_path / "run", before_attempt=3, resumed_from=resumed_from) == text
