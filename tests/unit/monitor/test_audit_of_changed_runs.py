"""The audit of runs in which steps were taken again, undone, late or behind: what is void, under way or wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from audit_ledgers import BATCH, MICRO, SAMPLES, Line, edit, ledger, states, steps, write_attempt
from paceline.monitor.audit.audit import audit, main_audit
from paceline.monitor.records.run_record import RunRecord


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_the_newest_steps_of_a_run_that_goes_on_are_under_way_and_of_one_that_has_ended_a_problem(run: Path) -> None:
    lines = [(worker, step, line) for worker, step, line in steps(workers=3, last=9) if step <= (5, 9, 7)[worker]]
    write_attempt(run, 1, iter(lines), workers=3)
    with open(ledger(run, 1, 2), "a") as file:
        file.write('{"step": 8, "stre')  # being written
    record = RunRecord.begin_attempt(run, job={}, workers=3)
    result = audit(run)
    assert (result.verdict, states(result)) == ("nothing to prove yet", ["unfinished"])
    assert [epoch.last_step for epoch in result.epochs] == [5]
    assert result.notes == ("attempt 1 goes on: steps 6-9 are under way, not yet in the ledgers of all workers",)
    edit(ledger(run, 1, 1), 3, ranges=[])  # a step that all have written is judged as ever
    assert states(audit(run)) == ["broken"]
    record.end_attempt("stopped", 75)
    result = audit(run)
    assert not result.is_clean and "step 6 of attempt 1 (train) is in the ledgers of workers 1, 2" in str(result)


def test_under_asynchronous_updates_steps_after_one_that_nobody_has_written_yet_are_under_way(run: Path) -> None:
    lines = [one for one in in_turns(behind=[0] * 14) if one[1] not in (5, 11, 13)]
    write_attempt(run, 1, iter(lines), workers=2, staleness=3)
    record = RunRecord.begin_attempt(run, job={}, workers=2)
    result = audit(run)  # worker 0 has come to step 9, and step 5 is lost all the same
    assert states(result) == ["broken", "unfinished"]
    assert result.notes[0] == "attempt 1 goes on: steps 10-14 are under way, not yet in the ledgers of all workers"
    record.end_attempt("finished", 0)
    assert states(audit(run)) == ["broken", "broken"]


def test_a_worker_that_was_lost_long_ago_keeps_no_later_step_under_way(run: Path) -> None:
    lines = [(int(step > 1), step, line) for _, step, line in in_turns(behind=[0] * 14) if step != 12]
    write_attempt(run, 1, iter(lines), workers=2, staleness=3)
    RunRecord.begin_attempt(run, job={}, workers=2)
    result = audit(run)
    assert states(result) == ["exact", "unfinished"]
    assert result.notes[0] == "attempt 1 goes on: steps 13-14 are under way, not yet in the ledgers of all workers"


def test_steps_after_the_checkpoint_that_a_later_attempt_continued_from_are_void(run: Path) -> None:
    write_attempt(run, 1, steps(workers=2, last=6), workers=2)
    write_attempt(run, 2, steps(workers=3, first=5, last=6), workers=3, from_step=4)
    write_attempt(run, 3, steps(workers=1, first=4, last=7), workers=1, from_step=3)  # from an older checkpoint
    result = audit(run)
    assert result.is_clean and states(result) == ["exact"]
    assert result.notes[0] == "steps 4-6 of attempt 1 are void: a later attempt went on from step 3"
    assert "steps 5-6 of attempt 2 are void" in result.notes[1]


def test_the_same_steps_without_a_continuation_in_between_are_repeated(run: Path) -> None:
    write_attempt(run, 1, steps(workers=2, last=6), workers=2)
    write_attempt(run, 2, steps(workers=2, first=5, last=7), workers=2, from_step=6)  # lies: it takes 5 and 6 again
    result = audit(run)
    assert not result.is_clean
    assert any("step 5" in problem for problem in result.problems)


def test_an_attempt_that_ended_before_its_first_step_voids_only_what_it_says(run: Path) -> None:
    write_attempt(run, 1, steps(workers=2, last=7), workers=2)
    write_attempt(run, 2, iter(()), workers=2, from_step=7)
    (run / "attempt_3" / "worker_0").mkdir(parents=True)  # ended while it started
    assert audit(run).is_clean


def test_a_last_line_cut_off_by_a_kill_is_ignored_when_the_step_was_taken_again(run: Path) -> None:
    write_attempt(run, 1, steps(workers=1, last=5), workers=1)
    text = ledger(run, 1, 0).read_text()
    ledger(run, 1, 0).write_text(text[:-20])
    write_attempt(run, 2, steps(workers=1, first=5, last=7), workers=1, from_step=4)
    result = audit(run)
    assert result.is_clean
    assert any("line 7, the last, was cut off" in note for note in result.notes)


def roll_back(path: Path, *, after: int, **told: Any) -> None:
    """Put a rollback behind a step's line."""
    lines = path.read_text().splitlines()
    place = next(number for number, text in enumerate(lines) if json.loads(text).get("step") == after)
    lines.insert(place + 1, json.dumps({"rollback": told}))
    path.write_text("".join(line + "\n" for line in lines))


def test_a_rollback_names_what_it_has_undone_over_two_epochs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_attempt(run, 1, steps(workers=2, last=14), workers=2)
    for worker in range(2):
        path = ledger(run, 1, worker)
        roll_back(path, after=9, to_step=5, from_step=9, skips={"train": [[0, 40], [1, 16]]})
    result = audit(run)
    assert result.verdict == "clean"
    told = [
        (undone.start, undone.stop, undone.first_step, undone.last_step) for e in result.epochs for undone in e.undone
    ]
    assert told == [(40, 50, 6, 7), (0, 16, 8, 9)]
    assert all(len(undone.samples) == 8 for epoch in result.epochs for undone in epoch.undone)
    assert main_audit(run) == 0
    assert capsys.readouterr().out.count("by a rollback of steps") == 2


def test_a_rollback_that_passes_over_other_samples_than_it_says_is_broken(run: Path) -> None:
    write_attempt(run, 1, steps(workers=1, last=14), workers=1)
    roll_back(ledger(run, 1, 0), after=9, to_step=7, from_step=9, skips={"train": [[1, 0], [1, 8]]})
    result = audit(run)
    assert states(result) == ["exact", "broken"]
    assert "does not say that positions 0-15 are passed over" in result.epochs[1].says[0]


def test_workers_that_disagree_on_a_rollback_are_a_problem(run: Path) -> None:
    write_attempt(run, 1, steps(workers=2, last=14), workers=2)
    for worker, to_step in ((0, 7), (1, 8)):
        path = ledger(run, 1, worker)
        roll_back(path, after=9, to_step=to_step, from_step=9, skips={"train": [[1, 0], [1, 16]]})
    assert audit(run).problems == ("attempt 1: its workers disagree on the rollback after step 9",)


def test_a_rollback_to_before_the_attempt_cannot_be(run: Path) -> None:
    write_attempt(run, 1, steps(workers=1, last=8), workers=1)
    write_attempt(run, 2, steps(workers=1, first=9, last=14), workers=1, from_step=8)
    roll_back(ledger(run, 2, 0), after=10, to_step=7, from_step=10, skips={"train": [[1, 0], [1, 24]]})
    (problem,) = audit(run).problems
    assert "a rollback from step 10 to step 7 cannot be, in an attempt from step 8" in problem


def test_a_rollback_in_void_steps_is_void(run: Path) -> None:
    write_attempt(run, 1, steps(workers=1, last=9), workers=1)
    roll_back(ledger(run, 1, 0), after=9, to_step=7, from_step=9, skips={"train": [[1, 0], [1, 16]]})
    write_attempt(run, 2, steps(workers=1, first=9, last=14), workers=1, from_step=8)
    result = audit(run)
    assert result.verdict == "clean"
    assert not any(epoch.undone for epoch in result.epochs)


def without_the_slowest(*, first: int = 1, last: int) -> Iterator[tuple[int, int, Line]]:
    """As `steps`, of three workers whose last one is late in each: two have a share of each step in their ledgers."""
    for worker, step, line in steps(workers=3, first=first, last=last):
        start = (step - 1) % 7 * BATCH
        stop = min(start + BATCH, SAMPLES)
        late = [[a, min(a + MICRO, stop)] for a in range(start + 2 * MICRO, stop, 3 * MICRO)]
        if worker < 2:
            yield worker, step, {**line, "whole": [start, stop], "dropped": late}


def test_samples_that_came_too_late_for_their_steps_are_counted_and_lost_by_nobody(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_attempt(run, 1, without_the_slowest(last=7), workers=3)
    result = audit(run)
    assert result.verdict == "clean" and states(result) == ["exact"]
    assert result.epochs[0].num_dropped == 6 * MICRO
    assert main_audit(run) == 0
    assert "dropped (too late for their steps, which were taken without them): 12 samples" in capsys.readouterr().out


def test_workers_that_do_not_agree_on_what_was_late_are_a_problem(run: Path) -> None:
    write_attempt(run, 1, without_the_slowest(last=7), workers=3)
    edit(ledger(run, 1, 1), 3, dropped=[[16, 18], [20, 22]])
    assert any("disagree on step 3" in problem for problem in audit(run).problems)


def test_what_is_in_a_step_and_too_late_for_it_is_a_problem(run: Path) -> None:
    write_attempt(run, 1, without_the_slowest(last=7), workers=3)
    for worker in range(2):
        edit(ledger(run, 1, worker), 3, dropped=[[16, 22]])
    assert any("samples of step 3 were run by two workers" in problem for problem in audit(run).problems)


def in_turns(*, behind: list[int]) -> Iterator[tuple[int, int, Line]]:
    """Two replicas that take turns: each has run a step by itself, and says how far its update was behind."""
    for _, step, line in steps(workers=1, last=len(behind)):
        whole = [line["ranges"][0][0], line["ranges"][-1][1]]
        yield (step - 1) % 2, step, {**line, "ranges": [whole], "whole": whole, "behind": behind[step - 1]}


def test_an_update_that_was_further_behind_than_the_plan_allows_is_a_problem(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_attempt(run, 1, in_turns(behind=[0, 1, 0, 2, 1, 1, 2]), workers=2, staleness=2)
    result = audit(run)
    assert result.is_clean and result.notes == ("stream train: updates were up to 2 behind; the plan allows 2",)
    edit(ledger(run, 1, 1), 6, behind=3)
    told = "step 6 (train): the weights that its gradient was computed on lacked 3 updates, but the plan allows 2"
    assert [problem.startswith(told) for problem in audit(run).problems] == [True]
    assert main_audit(run) == 1
    assert f"PROBLEM: {told} (staleness=2)" in capsys.readouterr().out
    edit(ledger(run, 1, 1), 6, behind=-1)
    assert "the update of step 6 cannot be -1 behind" in audit(run).problems[0]


def test_without_a_bound_no_update_is_too_far_behind_and_what_is_void_does_not_count(run: Path) -> None:
    write_attempt(run, 1, in_turns(behind=[0, 1, 9, 9]), workers=2)
    assert audit(run).problems == ()
    assert "up to 9 behind; the plan allows any number" in audit(run).notes[0]
    two = ((worker, step, line) for worker, step, line in in_turns(behind=[0] * 7) if step > 2)
    write_attempt(run, 2, two, workers=2, from_step=2, staleness=1)
    assert audit(run).problems == ()
    assert "up to 1 behind; the plan allows 1, any number" in audit(run).notes[-1]
