"""The audit proves an exact run exact, and names every way in which a run can be wrong."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from audit_ledgers import SAMPLES, Line, edit, ledger, states, steps, write_attempt
from paceline.monitor.audit.audit import audit, main_audit
from paceline.monitor.audit.epoch import Coverage
from paceline.monitor.audit.epoch_columns import EpochColumns
from paceline.monitor.records.run_record import RunRecord
from paceline.schedule import sample_order


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
    shown = capsys.readouterr().out
    assert "50 samples of an iterable were used: no position twice, none left out" in shown
    line = "where an iterable ends is not known; so far no position was left out and none was used twice"
    assert shown.splitlines()[-1] == f"nothing to prove yet: {line}"


def test_an_iterables_lost_and_repeated_positions_are_found(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_attempt(run, 1, steps(workers=1, last=7), workers=1, samples=0, shuffle=False)
    edit(ledger(run, 1, 0), 3, ranges=[[12, 20]])  # instead of 16 to 24
    (epoch,) = audit(run).epochs
    assert epoch.state == "broken"
    assert [(gap.start, gap.stop) for gap in epoch.missing] == [(20, 24)]
    assert [(twice.start, twice.stop) for twice in epoch.repeated] == [(12, 14), (14, 16)]
    assert main_audit(run) == 1
    assert "missing   positions 20-23, between steps 3 and 4" in capsys.readouterr().out


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
