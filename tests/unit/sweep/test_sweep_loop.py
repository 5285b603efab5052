"""The sweep beside a simulated pool: whatever is interrupted, no trial is lost and none is run twice."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import run_lock
from paceline.cli.main import main
from paceline.errors import PacelineError, PlanError
from paceline.pool.pool_run import PoolRun, queued_runs
from paceline.sweep.run_metrics import RunMetrics
from paceline.sweep.study_file import read_study_file
from paceline.sweep.sweep import Sweep
from simulated_trials import SimulatedPool, write_study
from sweep_in_test import SweepInTest

optuna = pytest.importorskip("optuna")
ENDED = ("finished", "pruned", "failed")


class Killed(BaseException):
    """Stands for kill -9: nothing catches it."""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[SweepInTest]:
    found = SweepInTest(tmp_path)
    yield found
    found.release()


def test_trials_run_and_their_values_are_in_the_storage_the_record_and_the_table(own: SweepInTest) -> None:
    record = own.run()
    values = {trial.number: trial.value for trial in own.study.trials}
    assert len(values) == 4
    for trial in own.study.trials:
        assert trial.value == pytest.approx(3 * trial.params["x"])
        assert trial.intermediate_values == pytest.approx({n: n * trial.params["x"] for n in (1, 2, 3)})
    assert record.best == max(values, key=lambda number: values[number])
    assert [(row.number, row.state, row.step) for row in record.trials] == [(n, "finished", 30) for n in range(4)]
    assert record.trials[2].parameters == own.study.trials[2].params
    rows = list(csv.DictReader((own.folder / "trials.csv").open()))
    assert [float(row["value"]) for row in rows] == list(values.values())
    assert [float(row["x"]) for row in rows] == [trial.params["x"] for trial in own.study.trials]
    assert not queued_runs(own.pool.folder, known={}), "the pool keeps none of them"
    assert own.pool.starts == {f"study-trial-000{number}": 1 for number in range(4)}


def test_no_more_trials_than_at_once_are_in_the_pool(own: SweepInTest) -> None:
    sweep = own.start()
    most = 0
    while not sweep.look():
        most = max(most, len(queued_runs(own.pool.folder, known={})))
        own.pool.pass_time()
    assert most == 2


def test_a_pruned_run_leaves_the_pool_at_once_and_its_trial_keeps_its_values(tmp_path: Path) -> None:
    own = SweepInTest(tmp_path, trials=3, at_once=1)
    own.file.write_text(own.file.read_text() + '[pruner]\nkind = "threshold"\nlower = 0.5\nn_warmup_steps = 2\n')
    own.pool = SimulatedPool(tmp_path / "pool", evaluations=4, score=lambda x, n: x)
    own.run()
    xs = [trial.params["x"] for trial in own.study.trials]
    assert {x < 0.5 for x in xs} == {True, False}, "both cases are tried"
    assert own.states() == ["pruned" if x < 0.5 else "finished" for x in xs]
    for trial, x in zip(own.study.trials, xs, strict=True):
        assert list(trial.intermediate_values) == ([1, 2] if x < 0.5 else [1, 2, 3, 4])
    assert not queued_runs(own.pool.folder, known={})


class Writes:
    """Counts what is written to the storage and the pool, and ends the process (in its place: raises Killed) before or
    after one of these writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num = 0
        self.kill_at, self.is_before = 0, True
        storage = optuna.storages.JournalStorage
        for name in vars(optuna.storages.BaseStorage):
            if name.startswith(("set_", "create_")):
                self._count(monkeypatch, storage, name)
        self._count(monkeypatch, PoolRun, "add_to")
        self._count(monkeypatch, PoolRun, "remove_from")

    def kill(self, at: int, *, is_before: bool) -> None:
        self.num, self.kill_at, self.is_before = 0, at, is_before

    def _count(self, monkeypatch: pytest.MonkeyPatch, place: Any, name: str) -> None:
        original = getattr(place, name)

        def call(*args: Any, **keywords: Any) -> Any:
            self.num += 1
            if self.num == self.kill_at and self.is_before:
                raise Killed
            found = original(*args, **keywords)
            if self.num == self.kill_at:
                raise Killed
            return found

        monkeypatch.setattr(place, name, call)


def killed_and_gone_on_with(folder: Path, pruner: str, writes: Writes, kills: list[tuple[int, bool]]) -> int:
    """Run a sweep of three trials, which is killed at these writes of its first, second, ... start; check what it has
    done, and return how many of the kills came."""
    own = SweepInTest(folder, trials=3)
    more = "" if pruner == "none" else "lower = 0.5\n"
    own.file.write_text(own.file.read_text() + f'[pruner]\nkind = "{pruner}"\n{more}')
    own.pool = SimulatedPool(folder / "pool", evaluations=4, score=lambda x, n: x)
    num_kills = 0
    for at, is_before in [*kills, (0, True)]:
        writes.kill(at, is_before=is_before)
        try:
            own.start()
            own.run()
            break
        except Killed:
            num_kills += 1
            own.sweep = None
            own.pool.pass_time()
    own.release()
    trials = own.study.trials
    assert len(trials) == 3
    for trial in trials:
        is_pruned = pruner != "none" and trial.params["x"] < 0.5
        if not is_pruned or len(kills) == 1:  # killed often, a run may have come to its end meanwhile
            assert trial.state.name == ("PRUNED" if is_pruned else "COMPLETE")
        keys = list(trial.intermediate_values)
        assert keys == [1, 2, 3, 4][: len(keys)], "each value once"
        assert len(keys) == 4 or trial.state.name == "PRUNED"
        assert set(trial.intermediate_values.values()) == {trial.params["x"]}
    assert own.pool.starts == {f"study-trial-000{number}": 1 for number in range(3)}, "each run once"
    assert not queued_runs(own.pool.folder, known={})
    return num_kills


@pytest.mark.parametrize("pruner", ["none", "threshold"])
@pytest.mark.thorough
def test_killed_again_and_again_it_goes_on_and_no_trial_is_lost_or_run_twice(
    tmp_path: Path, pruner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(1)
    kills = [(dice.randint(4, 7), dice.random() < 0.5) for _ in range(40)]
    assert killed_and_gone_on_with(tmp_path, pruner, Writes(monkeypatch), kills) > 10


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("pruner", ["none", "threshold"])
@pytest.mark.further
@pytest.mark.timeout(600)
def test_killed_at_every_single_write_it_goes_on_and_no_trial_is_lost_or_run_twice(
    tmp_path: Path, pruner: str, is_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that is written to the storage and the pool is a place at which the process may end."""
    writes, at = Writes(monkeypatch), 1
    while True:
        folder = tmp_path / str(at)
        folder.mkdir()
        if not killed_and_gone_on_with(folder, pruner, writes, [(at, is_before)]):
            break
        at += 1
    assert at > 30


def test_a_failed_run_is_a_failed_trial_and_is_tried_again_as_often_as_the_study_says(tmp_path: Path) -> None:
    own = SweepInTest(tmp_path, trials=2, at_once=1, retries=2)
    own.pool.fails = {"study-trial-0000", "study-trial-0001"}
    own.run()
    trials = own.study.trials
    assert [trial.state.name for trial in trials] == ["FAIL", "FAIL", "COMPLETE", "COMPLETE"]
    assert trials[0].user_attrs["error"] == "RuntimeError: its data is broken"
    assert [trial.params["x"] == trials[0].params["x"] for trial in trials] == [True, True, True, False]
    assert [trial.user_attrs.get("retry_of") for trial in trials] == [None, 0, 1, None], (
        "retries do not count as trials"
    )
    assert own.record.trials[0].why == "RuntimeError: its data is broken"


def test_where_the_first_trials_fail_the_sweep_ends_and_says_why(tmp_path: Path) -> None:
    own = SweepInTest(tmp_path, trials=20)
    own.pool.fails = {f"study-trial-{number:04}" for number in range(20)}
    with pytest.raises(PacelineError, match=r"The first 3 trials of this start have failed.*its data is broken"):
        own.run()
    assert len(own.study.trials) <= 4


def test_a_metric_that_never_comes_ends_the_sweep_at_the_first_evaluation_and_a_later_start_begins_anew(
    own: SweepInTest,
) -> None:
    own.pool.measure = "scores"
    with pytest.raises(PlanError, match=r"does not report 'eval/score'\. Did you mean 'eval/scores'\? .* loss"):
        own.run()
    assert sum(own.pool.starts.values()) == 2, "only the two that ran at once"
    assert not queued_runs(own.pool.folder, known={})
    assert {trial.state.name for trial in own.study.trials} == {"FAIL"}
    own.file.write_text(own.file.read_text().replace("eval/score", "eval/scores"))
    own.start()
    own.run()
    assert own.states() == ["failed"] * 2 + ["finished"] * 4, "those that were refused do not count"


def test_a_value_that_is_not_finite_fails_the_trial(tmp_path: Path) -> None:
    own = SweepInTest(tmp_path, trials=3, at_once=1)
    own.pool = SimulatedPool(tmp_path / "pool", score=lambda x, n: float("nan") if x < 0.5 else x)
    own.run()
    xs = [trial.params["x"] for trial in own.study.trials]
    assert {x < 0.5 for x in xs} == {True, False}
    assert own.states() == ["failed" if x < 0.5 else "finished" for x in xs]
    assert "eval/score is nan at its end" in own.record.trials[xs.index(min(xs))].why
    json.loads((own.folder / "sweep.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.parametrize(("value", "expected"), [("last", 1.0), ("best", 3.0)])
def test_a_trial_counts_by_its_last_value_or_by_its_best(tmp_path: Path, value: str, expected: float) -> None:
    own = SweepInTest(tmp_path, trials=1)
    own.file.write_text(own.file.read_text().replace('"maximize"', f'"maximize"\nvalue = "{value}"'))
    own.pool = SimulatedPool(tmp_path / "pool", score=lambda x, n: [2.0, 3.0, 1.0][n - 1])
    own.run()
    assert own.study.best_value == expected


def test_a_run_that_its_user_takes_out_is_a_failed_trial_that_is_not_tried_again(tmp_path: Path) -> None:
    own = SweepInTest(tmp_path, trials=2, retries=3)
    sweep = own.start()
    sweep.look()
    own.pool.pass_time()
    sweep.look()
    queued_runs(own.pool.folder, known={})["study-trial-0000"].remove_from(own.pool.folder)
    own.run()
    assert own.states() == ["failed", "finished"]
    assert own.record.trials[0].why == "its run was taken out of the pool"


def test_trials_that_were_cancelled_while_no_sweep_ran_go_on_with_the_next_start(own: SweepInTest) -> None:
    sweep = own.start()
    sweep.look()
    own.pool.pass_time()
    own.pool.pass_time()
    for run in queued_runs(own.pool.folder, known={}).values():
        run.remove_from(own.pool.folder)
    own.pool.pass_time()
    before = [trial.params for trial in own.study.trials]
    own.start()
    own.run()
    assert own.states() == ["finished"] * 4
    assert [trial.params for trial in own.study.trials][:2] == before


def test_two_sweeps_of_one_study_are_refused(own: SweepInTest, tmp_path: Path) -> None:
    own.release()  # a lock of this process would be given to it again
    write_study(tmp_path, storage=f"journal:{tmp_path}/trials.log")
    own.start()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "train.py").write_text((tmp_path / "train.py").read_text())
    (elsewhere / "study.toml").write_text(own.file.read_text().replace('"pool"', f'"{own.pool.folder}"'))
    with pytest.raises(PlanError, match=r"has a study 'study' of .*runs/study, and this one's folder is .*elsewhere"):
        Sweep(read_study_file(elsewhere / "study.toml"), say=print)


def test_two_studies_of_one_name_do_not_share_a_pool(own: SweepInTest, tmp_path: Path) -> None:
    own.start().look()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    other = read_study_file(write_study(elsewhere, pool=str(own.pool.folder)))
    with pytest.raises(
        PlanError, match=r"has the run study-trial-0000 of another study with this name, in .*runs/stud"
    ):
        Sweep(other, say=print)


def test_a_trial_that_is_ended_in_the_storage_by_others_leaves_the_pool(tmp_path: Path) -> None:
    own = SweepInTest(tmp_path, trials=2)
    sweep = own.start()
    sweep.look()
    own.pool.pass_time()
    sweep.look()
    own.study.tell(0, state=optuna.trial.TrialState.FAIL)
    sweep.look()
    assert list(queued_runs(own.pool.folder, known={})) == ["study-trial-0001"]
    own.run()
    assert own.states() == ["failed", "finished"]


def test_after_its_timeout_no_new_trial_begins_and_those_that_run_end(tmp_path: Path) -> None:
    own = SweepInTest(tmp_path, trials=50, timeout_s=1e-6)
    assert own.start().look(), "nothing runs, and nothing may begin"
    write_study(tmp_path, trials=50, timeout_s=1e6)
    sweep = own.start()
    sweep.look()
    sweep._began -= 1e6
    own.run()
    assert own.states() == ["finished"] * 2
    assert own.record.wanted == 50


def test_a_storage_that_fails_ends_the_sweep_with_one_sentence(
    own: SweepInTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = own.start()

    def fail(*args: Any, **keywords: Any) -> Any:
        raise optuna.exceptions.StorageInternalError("the disk is gone")

    monkeypatch.setattr(optuna.storages.JournalStorage, "get_all_trials", fail)
    with pytest.raises(PacelineError, match=r"storage has failed, and the sweep ends.* the disk is gone"):
        sweep.run()
    assert not run_lock.is_held(own.folder)


def test_what_the_commands_show_of_a_sweep(own: SweepInTest, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", str(own.file), "--show"]) == 2
    assert "the sweep has not been started yet" in capsys.readouterr().err
    sweep = own.start()
    sweep.look()
    own.pool.pass_time()
    own.pool.pass_time()
    sweep.look()
    assert main(["sweep", str(own.file), "--show"]) == 0
    head, columns, first, second = capsys.readouterr().out.splitlines()
    assert head.strip() == "study: running, 2 of 4 trials: 2 running"
    assert columns.split() == ["trial", "state", "x", "eval/score", "step", "replicas"]
    assert first.split()[:2] == ["0", "running"]
    assert second.split()[-2:] == ["10", "1"]
    assert main(["sweep", str(own.file), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["is_alive"], [row["step"] for row in shown["trials"]]) == (True, [10, 10])
    own.release()
    assert main(["sweep", str(own.file), "--cancel"]) == 0
    assert "taken out of the pool: trial-0000, trial-0001." in capsys.readouterr().out
    assert not queued_runs(own.pool.folder, known={})
    assert main(["sweep", str(own.file), "--cancel"]) == 0
    assert "taken out of the pool: none." in capsys.readouterr().out


def test_without_its_pool_a_sweep_does_not_start_and_one_that_runs_waits_and_says_so(own: SweepInTest) -> None:
    own.pool.end()
    with pytest.raises(PlanError, match=r"the pool .*pool does not run. Start it with `paceline pool"):
        own.start()
    own.pool.serve()
    sweep = own.start()
    sweep.look()
    own.pool.end()
    for _ in range(3):
        sweep.look()
    assert sum("the pool does not run" in text for text in own.said) == 1
    own.pool.serve()
    own.run()
    assert own.states() == ["finished"] * 4


def test_runs_of_a_study_whose_storage_is_gone_are_not_gone_on_with(own: SweepInTest) -> None:
    own.run()
    (own.file.parent / "trials.log").unlink()
    with pytest.raises(PlanError, match=r"trial-0000 has a run, and trial 0 is new.* Move .*trials away"):
        own.start().look()


def test_a_trial_of_a_user_is_run_before_those_that_the_sampler_proposes(own: SweepInTest) -> None:
    own.start()
    own.study.enqueue_trial({"x": 0.25})
    own.run()
    assert own.study.trials[0].params == {"x": 0.25}
    assert len(own.study.trials) == 4


@pytest.mark.thorough
def test_a_seed_proposes_the_same_values_whatever_was_interrupted(tmp_path: Path) -> None:
    values: list[list[float]] = []
    for name, is_interrupted in (("a", False), ("b", True)):
        folder = tmp_path / name
        folder.mkdir()
        own = SweepInTest(folder, at_once=1)
        if is_interrupted:
            for _ in range(7):
                own.start().look()
                own.pool.pass_time()
        own.start()
        own.run()
        own.release()
        values.append([trial.params["x"] for trial in own.study.trials])
    assert values[0] == values[1]
    assert len(set(values[0])) == 4


def test_a_grid_has_each_point_once_also_after_a_kill(tmp_path: Path) -> None:
    own = SweepInTest(tmp_path, trials=100)
    text = own.file.read_text().replace('kind = "random"', 'kind = "grid"')
    own.file.write_text(text.replace("high = 1.0", "high = 1.0, step = 0.25"))
    for _ in range(4):
        own.start().look()
        own.pool.pass_time()
    own.start()
    own.run()
    assert sorted(trial.params["x"] for trial in own.study.trials) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert own.record.wanted == 5


@pytest.mark.parametrize(
    ("sampler", "pruner", "is_pruning"),
    [
        ('kind = "tpe"\nn_startup_trials = 2', 'kind = "median"\nn_startup_trials = 1', True),
        ('kind = "cmaes"', 'kind = "asha"\nreduction_factor = 2\nmin_resource = 1', True),
        ('kind = "qmc"', 'kind = "hyperband"\nmin_resource = 1\nmax_resource = 4\nreduction_factor = 2', True),
        (
            'kind = "random"',
            'kind = "patient"\npatience = 1\nwrapped = { kind = "median", n_startup_trials = 1 }',
            False,
        ),
        pytest.param(
            'kind = "gp"\nn_startup_trials = 2',
            'kind = "percentile"\npercentile = 50.0\nn_startup_trials = 1',
            True,
            marks=pytest.mark.further,
        ),
    ],
)
@pytest.mark.thorough
def test_samplers_and_pruners_work_through_restarts(
    tmp_path: Path, sampler: str, pruner: str, is_pruning: bool
) -> None:
    own = SweepInTest(tmp_path, trials=8)
    text = own.file.read_text().replace('kind = "random"', sampler)
    own.file.write_text(
        f'{text}y = {{ kind = "int", low = 1, high = 64, log = true }}\n[pruner]\n{pruner}\n'.replace(
            "--x {x}", "--x {x} --y {y}"
        )
    )
    own.pool = SimulatedPool(tmp_path / "pool", evaluations=4)
    for _ in range(3):
        own.start().look()
        own.pool.pass_time()
    own.start()
    own.run()
    states = own.states()
    assert len(states) == 8
    assert set(states) <= {"finished", "pruned"}
    assert ("pruned" in states) == is_pruning, "runs get better with x at every evaluation, and never worse with time"
    assert len({tuple(trial.params.values()) for trial in own.study.trials}) > 4, "no value is proposed again and again"


def test_the_reader_of_a_run_is_closed_with_its_trial(own: SweepInTest, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[RunMetrics] = []
    closed: list[RunMetrics] = []
    begin, end = RunMetrics.__init__, RunMetrics.close
    monkeypatch.setattr(RunMetrics, "__init__", lambda self, *args: (opened.append(self), begin(self, *args))[1])
    monkeypatch.setattr(RunMetrics, "close", lambda self: (closed.append(self), end(self))[1])
    own.run()
    assert len(opened) == 4
    assert closed == opened
