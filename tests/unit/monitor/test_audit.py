"""The audit proves an exact run exact, and names every way in which a run can be wrong."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.monitor.audit.audit import AuditResult, audit, main_audit
from paceline.monitor.audit.epoch import Coverage
from paceline.monitor.audit.epoch_columns import EpochColumns
from paceline.monitor.records.run_record import RunRecord
from paceline.schedule import sample_order

Line = dict[str, Any]
SAMPLES, BATCH, MICRO = 50, 8, 2  # 7 steps an epoch, the last with 2 samples


def steps(
    *,
    workers: int,
    first: int = 1,
    last: int,
    samples: int = SAMPLES,
    batch: int = BATCH,
    micro: int = MICRO,
    drop: bool = False,
) -> Iterator[tuple[int, int, Line]]:
    """Yield (worker, step, line) of a correct run: each step's micro-batches are given to the workers in turn."""
    per_epoch = samples // batch if drop else -(-samples // batch)
    for step in range(first, last + 1):
        epoch, place = divmod(step - 1, per_epoch)
        start, stop = place * batch, min((place + 1) * batch, samples)
        micros = [[a, min(a + micro, stop)] for a in range(start, stop, micro)]
        for worker in range(workers):
            line = {
                "step": step,
                "stream": "train",
                "epoch": epoch,
                "ranges": micros[worker::workers],
                "skipped": False,
            }
            yield worker, step, line


def write_attempt(
    run: Path, attempt: int, lines: Iterator[tuple[int, int, Line]], *, workers: int, from_step: int = 0, **about: Any
) -> None:
    opening = {"stream": "train", "samples": SAMPLES, "batch": BATCH, "micro": MICRO, "seed": 3, "shuffle": True}
    opening = {**opening, "drop_last": False, **about}
    head = {"attempt": attempt, "from_step": from_step, "of_attempt": attempt - 1 or None}
    texts = {k: [head, opening] for k in range(workers)}
    for worker, _, line in lines:
        texts[worker].append(line)
    for worker, told in texts.items():
        directory = run / f"attempt_{attempt}" / f"worker_{worker}"
        directory.mkdir(parents=True)
        (directory / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))


def ledger(run: Path, attempt: int, worker: int) -> Path:
    return run / f"attempt_{attempt}" / f"worker_{worker}" / "ledger.jsonl"


def edit(path: Path, step: int, **changes: Any) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    changed = [{**line, **changes} if line.get("step") == step else line for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in changed))


def states(result: AuditResult) -> list[str]:
    return [epoch.state for epoch in result.epochs]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_a_correct_run_of_two_epochs_is_proved_at_any_worker_count(run: Path, workers: int) -> None:
    write_attempt(run, 1, steps(workers=workers, last=14), workers=workers)
    result = audit(run)
    assert result.is_clean and states(result) == ["exact", "exact"]
    assert [(epoch.num_used, epoch.first_step, epoch.last_step) for epoch in result.epochs] == [(50, 1, 7), (50, 8, 14)]
    assert all(epoch.is_permutation for epoch in result.epochs)
    assert main_audit(run) == 0


def test_an_unfinished_last_epoch_is_reported_and_is_no_error(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_attempt(run, 1, steps(workers=2, last=9), workers=2)
    assert states(audit(run)) == ["exact", "unfinished"]
    assert main_audit(run) == 0
    assert "train, epoch 2 (steps 8-9): unfinished; 16 of 50 samples were used, each once" in capsys.readouterr().out


def test_an_unfinished_epoch_before_another_one_lists_its_tail(run: Path) -> None:
    lines = [entry for entry in steps(workers=2, last=9) if entry[1] != 7]
    write_attempt(run, 1, iter(lines), workers=2)
    result = audit(run)
    assert states(result) == ["broken", "unfinished"]
    assert [(gap.start, gap.stop, gap.after_step, gap.before_step) for gap in result.epochs[0].missing] == [
        (48, 50, 6, None)
    ]


def test_an_epoch_without_any_step_is_a_problem(run: Path) -> None:
    lines = [entry for entry in steps(workers=1, last=21) if not 8 <= entry[1] <= 14]
    write_attempt(run, 1, iter(lines), workers=1)
    assert any("epoch 2 has no step at all" in problem for problem in audit(run).problems)


def test_lost_positions_are_named_with_their_step_and_samples(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_attempt(run, 1, steps(workers=2, last=7), workers=2)
    edit(ledger(run, 1, 1), 3, ranges=[[18, 20]])  # [22, 24) is lost
    result = audit(run)
    (epoch,) = result.epochs
    (gap,) = epoch.missing
    assert (gap.start, gap.stop, gap.after_step, gap.before_step, epoch.num_missing) == (22, 24, 3, 4, 2)
    expected = sample_order.sample_indices(
        seed=3, epoch=0, num_samples=SAMPLES, positions=np.arange(22, 24), shuffle=True
    )
    assert gap.samples == tuple(expected.tolist())
    assert main_audit(run) == 1
    assert f"positions 22-23 (2 samples: {gap.samples[0]}, {gap.samples[1]})" in capsys.readouterr().out


def test_repeated_positions_are_named_with_their_steps_and_workers(run: Path) -> None:
    write_attempt(run, 1, steps(workers=2, last=7), workers=2)
    edit(ledger(run, 1, 0), 5, ranges=[[32, 34], [36, 38], [10, 12]])
    (epoch,) = audit(run).epochs
    (twice,) = epoch.repeated
    assert (twice.start, twice.stop, twice.steps, twice.workers) == (10, 12, (2, 5), (1, 0))
    assert epoch.state == "broken" and epoch.num_repeated == 2 and epoch.num_missing == 0


def test_a_step_that_only_some_workers_committed_shows_up(run: Path) -> None:
    write_attempt(run, 1, (entry for entry in steps(workers=3, last=7) if entry[:2] != (1, 4)), workers=3)
    result = audit(run)
    assert states(result) == ["broken"]
    (problem,) = result.problems
    assert problem.startswith("step 4 of attempt 1 (train) is in the ledgers of workers 0, 2 but not of worker 1")


def test_a_partly_committed_last_step_shows_up_though_its_epoch_is_unfinished(run: Path) -> None:
    write_attempt(run, 1, (entry for entry in steps(workers=2, last=4) if entry[:2] != (1, 4)), workers=2)
    assert not audit(run).is_clean


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


def test_a_run_that_has_just_begun_is_no_problem(run: Path) -> None:
    record = RunRecord.begin_attempt(run, job={}, workers=2)
    (run / "attempt_1").mkdir()
    assert audit(run).verdict == "nothing to prove yet"
    write_attempt(run, 1, steps(workers=1, last=2), workers=1)
    (run / "attempt_1" / "worker_1").mkdir()
    result = audit(run)
    assert result.verdict == "nothing to prove yet"
    assert "steps 1-2 are under way, not yet in the ledgers of all workers; worker 1 has none" in str(result)
    record.end_attempt("failed", 1)
    assert not audit(run).is_clean


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


def test_a_skipped_step_used_its_samples_and_is_information(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_attempt(run, 1, steps(workers=2, last=7), workers=2)
    for worker in range(2):
        edit(ledger(run, 1, worker), 5, skipped=True)
    result = audit(run)
    assert result.is_clean and result.epochs[0].skipped_steps == (5,)
    assert main_audit(run) == 0
    assert "skipped (samples used, weights unchanged): step 5" in capsys.readouterr().out


def test_with_drop_last_an_epoch_ends_at_its_last_full_batch(run: Path) -> None:
    write_attempt(run, 1, steps(workers=2, last=12, drop=True), workers=2, drop_last=True)
    result = audit(run)
    assert result.is_clean and [epoch.num_samples for epoch in result.epochs] == [48, 48]


@pytest.mark.parametrize(("sizes", "state"), [((10, 4, 10), "exact"), ((4, 10, 4), "broken")])
def test_with_drop_last_the_newest_batch_size_says_where_an_epoch_ends_also_one_that_came_back(
    run: Path, sizes: tuple[int, int, int], state: str
) -> None:
    """Of 50 samples 6 or 4 are left: of a batch of 10 no other one fits, of 4 one does."""
    stops = {(10, 4, 10): (10, 14, 24, 34, 44), (4, 10, 4): (4, 14, 18, 22, 26, 30, 34, 38, 42, 46)}[sizes]
    position, begun = 0, {1: 0, 2: 1, 3: 2}
    lines: dict[int, list[tuple[int, int, Line]]] = {1: [], 2: [], 3: []}
    for step, stop in enumerate(stops, 1):
        line = {"step": step, "stream": "train", "epoch": 0, "ranges": [[position, stop]], "skipped": False}
        lines[min(step, 3)].append((0, step, line))
        position = stop
    last = len(stops) + 1
    lines[3].append((0, last, {**lines[3][0][2], "step": last, "epoch": 1, "ranges": [[0, sizes[2]]]}))
    for attempt, size in enumerate(sizes, 1):
        about = {"batch": size, "drop_last": True}
        write_attempt(run, attempt, iter(lines[attempt]), workers=1, from_step=begun[attempt], **about)
    result = audit(run)
    assert result.is_clean is (state == "exact"), result.problems
    assert (result.epochs[0].state, result.epochs[0].num_used) == (state, position)


def test_with_drop_last_the_dropped_tail_may_not_be_used(run: Path) -> None:
    write_attempt(run, 1, steps(workers=2, last=7), workers=2, drop_last=True)
    (epoch,) = audit(run).epochs
    assert epoch.says == ("positions up to 50 were used, beyond the end",)


def test_streams_are_judged_apart(run: Path) -> None:
    write_attempt(run, 1, steps(workers=2, last=7), workers=2)
    for worker in range(2):
        with open(ledger(run, 1, worker), "a") as file:
            other = {
                "stream": "noise",
                "samples": 4,
                "batch": 4,
                "micro": 2,
                "seed": 1,
                "shuffle": False,
                "drop_last": False,
            }
            ranges = [[2 * worker, 2 * worker + 2]]
            step = {"step": 2, "stream": "noise", "epoch": 0, "ranges": ranges, "skipped": False}
            file.write(json.dumps(other) + "\n" + json.dumps(step) + "\n")
    result = audit(run)
    assert result.is_clean
    assert [(epoch.stream, epoch.num_used) for epoch in result.epochs] == [("noise", 4), ("train", 50)]


def test_an_iterable_is_checked_as_far_as_it_went(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_attempt(run, 1, steps(workers=2, last=9), workers=2, samples=0, shuffle=False)
    result = audit(run)
    assert result.is_clean and states(result) == ["unfinished", "unfinished"]
    assert [epoch.num_used for epoch in result.epochs] == [50, 16]
    assert "where its epochs end is not known" in result.notes[0]
    assert main_audit(run) == 0
    assert "50 samples of an iterable were used, each once, none left out" in capsys.readouterr().out


def test_an_iterables_lost_and_repeated_positions_are_found(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_attempt(run, 1, steps(workers=1, last=7), workers=1, samples=0, shuffle=False)
    edit(ledger(run, 1, 0), 3, ranges=[[12, 20]])  # instead of 16 to 24
    (epoch,) = audit(run).epochs
    assert epoch.state == "broken"
    assert [(gap.start, gap.stop) for gap in epoch.missing] == [(20, 24)]
    assert [(twice.start, twice.stop) for twice in epoch.repeated] == [(12, 14), (14, 16)]
    assert main_audit(run) == 1
    assert "missing   positions 20-23, between steps 3 and 4" in capsys.readouterr().out


def test_a_last_line_cut_off_by_a_kill_is_ignored_when_the_step_was_taken_again(run: Path) -> None:
    write_attempt(run, 1, steps(workers=1, last=5), workers=1)
    text = ledger(run, 1, 0).read_text()
    ledger(run, 1, 0).write_text(text[:-20])
    write_attempt(run, 2, steps(workers=1, first=5, last=7), workers=1, from_step=4)
    result = audit(run)
    assert result.is_clean
    assert any("line 7, the last, was cut off" in note for note in result.notes)


def test_a_damaged_line_before_the_last_is_a_problem(run: Path) -> None:
    write_attempt(run, 1, steps(workers=1, last=7), workers=1)
    lines = ledger(run, 1, 0).read_text().splitlines(keepends=True)
    lines[4] = lines[4][:30] + "\n"
    ledger(run, 1, 0).write_text("".join(lines))
    result = audit(run)
    assert any("line 5 is damaged" in problem for problem in result.problems)
    assert result.epochs[0].missing[0].start == 16


def test_a_change_of_the_dataset_inside_an_epoch_is_a_problem(run: Path) -> None:
    write_attempt(run, 1, steps(workers=1, last=4), workers=1)
    write_attempt(run, 2, steps(workers=1, first=5, last=7), workers=1, from_step=4, seed=4)
    (epoch,) = audit(run).epochs
    assert epoch.state == "broken" and "do not share one order" in epoch.says[0]


def test_a_worker_without_a_ledger_is_a_problem(run: Path) -> None:
    write_attempt(run, 1, steps(workers=2, last=7), workers=2)
    (run / "attempt_1" / "worker_2").mkdir()
    assert any("worker 2 left no readable ledger" in problem for problem in audit(run).problems)


def test_ledgers_that_lie_on_other_hosts_are_asked_for(run: Path) -> None:
    RunRecord.begin_attempt(run, job={}, workers=3)
    write_attempt(run, 1, steps(workers=2, last=7), workers=2)
    assert any("had 3 workers, but only 2 of their directories are here" in problem for problem in audit(run).problems)


def test_an_order_that_is_no_permutation_is_found(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_attempt(run, 1, steps(workers=1, last=7), workers=1)
    monkeypatch.setattr(sample_order, "sample_indices", lambda *, positions, **_: positions // 2)
    (epoch,) = audit(run).epochs
    assert epoch.state == "broken" and epoch.is_permutation is False


def test_a_directory_that_is_no_run_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_audit(tmp_path / "nowhere") == 2
    assert "does not exist" in capsys.readouterr().err
    assert main_audit(tmp_path) == 2
    assert "has no run.json" in capsys.readouterr().err


def test_a_run_without_ledgers_proves_nothing(run: Path) -> None:
    RunRecord.begin_attempt(run, job={}, workers=1).end_attempt("failed", 1)
    assert main_audit(run) == 1
    assert audit(run).verdict == "not clean"


def test_json_says_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_attempt(run, 1, steps(workers=2, last=7), workers=2)
    assert main_audit(run, json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["clean"] is True and told["epochs"][0]["num_used"] == 50


@pytest.mark.parametrize(
    ("last", "verdict", "line"),
    [
        (0, "nothing to prove yet", "nothing to prove yet: no finished epoch"),
        (6, "nothing to prove yet", "nothing to prove yet: no finished epoch"),
        (7, "clean", "clean: 1 finished epoch, no sample was lost and none was used twice"),
    ],
)
def test_a_run_without_a_finished_epoch_has_nothing_to_prove_yet(
    run: Path, last: int, verdict: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_attempt(run, 1, steps(workers=2, last=last), workers=2)
    assert main_audit(run) == 0
    assert capsys.readouterr().out.splitlines()[-1] == line
    assert main_audit(run, json=True) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == verdict


def test_equal_epochs_share_a_line_and_others_do_not(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_attempt(run, 1, steps(workers=2, last=30), workers=2)
    for worker in range(2):
        edit(ledger(run, 1, worker), 16, skipped=True)
    main_audit(run)
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].startswith("  train, epochs 1-2 (steps 1-14): in each, each of 50 samples was used exactly once")
    assert [line.split(":")[0] for line in shown[2:5]] == [
        "  train, epoch 3 (steps 15-21)",
        "    skipped (samples used, weights unchanged)",
        "  train, epoch 4 (steps 22-28)",
    ]
    assert shown[6] == "clean: 4 finished epochs, no sample was lost and none was used twice"


def test_a_billion_samples_cost_no_more_than_their_ranges(run: Path) -> None:
    batch = 50_000_000
    lines = steps(workers=2, last=20, samples=10**9, batch=batch, micro=batch // 4)
    write_attempt(run, 1, lines, workers=2, samples=10**9, batch=batch)
    result = audit(run)
    assert result.is_clean and result.epochs[0].num_used == 10**9
    assert result.epochs[0].is_permutation is None


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


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=25))
def test_the_cover_agrees_with_counting_each_position(ranges: list[tuple[int, int]]) -> None:
    columns = EpochColumns()
    for row, (start, length) in enumerate(ranges):
        columns.starts.append(start)
        columns.stops.append(start + length)
        columns.steps.append(row)
        columns.workers.append(0)
    uses = Counter(position for start, length in ranges for position in range(start, start + length))
    end = max(uses, default=-1) + 1
    cover = Coverage(columns)
    assert cover.end == end and cover.num_used == len(uses)
    assert cover.num_repeated == sum(count - 1 for count in uses.values())
    missing = {position for start, stop, _, _ in cover.gaps() for position in range(start, stop)}
    assert missing == set(range(end)) - set(uses)
    repeated = {position for start, stop, _, _ in cover.overlaps() for position in range(start, stop)}
    assert repeated == {position for position, count in uses.items() if count > 1}
