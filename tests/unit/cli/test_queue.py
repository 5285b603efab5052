"""What `paceline run --pool` writes into a pool's queue, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.pool.pool_run import PoolRun, queued_runs
from paceline.pool.pool_state import PoolRecord, RunEntry

SCRIPT = "import paceline\nsize = 64\npaceline.run(print{plan})\n"
WRITTEN = ', plan="replicas=1-4+shard=2+zero=1+batch(size=64)"'


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def queued(*words: str, plan: str = WRITTEN) -> PoolRun:
    Path("train.py").write_text(SCRIPT.format(plan=plan))
    assert main(["run", "--pool", "pool", "--detach", *words]) == 0
    (run,) = queued_runs(Path("pool"), known={}).values()
    return run


def refused(capsys: pytest.CaptureFixture[str], *words: str, plan: str = WRITTEN) -> str:
    Path("train.py").write_text(SCRIPT.format(plan=plan))
    assert main(["run", *words]) == 2
    assert not Path("pool").exists(), "nothing is queued"
    return capsys.readouterr().err


def test_replicas_are_those_of_the_plan_wherever_it_is_written() -> None:
    run = queued("train.py", "--lr", "1")
    assert (run.least, run.most, run.workers_each) == (1, 4, 2)
    assert run.command == ("train.py", "--lr", "1")
    assert run.run_dir == str(Path("runs").resolve() / run.name)


def test_the_commands_plan_wins_and_what_the_pool_says_is_left_out() -> None:
    words = [
        "--plan",
        "replicas=3",
        "--run-dir=runs/a",
        "--workers",
        "3",
        "train.py",
        "--priority",
        "2",
        "--",
        "--pool",
    ]
    run = queued(*words)
    assert (run.name, run.least, run.most, run.workers_each) == ("a", 3, 3, 1)
    assert run.command == ("--plan", "replicas=3", "train.py", "--", "--pool")
    assert run.priority == 2.0


def test_two_runs_of_a_script_have_directories_of_their_own() -> None:
    queued("train.py")
    assert main(["run", "--pool", "pool", "--detach", "train.py"]) == 0
    runs = queued_runs(Path("pool"), known={})
    assert len(runs) == 2 == len({run.run_dir for run in runs.values()})


def test_a_deadline_is_counted_from_now() -> None:
    run = queued("train.py", "--deadline-s", "60")
    assert run.deadline is not None
    assert math.isclose(run.deadline - run.submitted, 60.0)


@pytest.mark.parametrize(
    "plan", [', plan=f"replicas=1-2+batch(size={size})"', ", plan=paceline.Plan(layout=paceline.Layout(replicas=size))"]
)
def test_a_plan_that_the_script_computes_is_refused_before_it_runs_on_a_wrong_size(
    capsys: pytest.CaptureFixture[str], plan: str
) -> None:
    written = plan.replace("size", "len(str(3))") if "Layout" in plan else plan
    err = refused(capsys, "--pool", "pool", "--workers", "2", "train.py", plan=written)
    assert "computes its plan" in err and "--plan" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--pool", "pool", "--priority", "0", "train.py"], "--priority is 0; it must be above 0"),
        (["--pool", "pool", "--deadline-s", "-1", "train.py"], "--deadline-s is -1; it must be above 0"),
        (["--priority", "2", "train.py"], "--priority is about a run in a pool: add --pool POOL"),
        (["--pool", "pool", "--on", "ssh", "--hosts", "a", "train.py"], "--pool and --on exclude each other"),
        (["--pool", "pool", "--launcher", "inline", "train.py"], "local workers"),
        (["--pool", "pool", "--head", "n1:29500", "train.py"], "hosts that it chooses"),
        (["--pool", "pool", "--slots", "2", "train.py"], "leave --hosts, --head, --slots"),
        (["--pool", "pool", "--plan", "auto", "train.py"], "choose first"),
        (["--pool", "pool", "--plan", "replicas=3", "--workers", "2", "train.py"], "3 replicas"),
        (["--pool", "pool", "gone.py"], "no file gone.py"),
    ],
)
def test_what_cannot_be_queued_is_refused(capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    assert says in refused(capsys, *words)


GROWS = ("--pool", "pool", "--batch-grows")
PLAN = ("--plan", "replicas=1-4+batch(size=64)")


def test_a_batch_that_may_grow_keeps_its_micro_batch() -> None:
    run = queued("train.py", "--batch-grows", "256", *PLAN)
    assert run.growth is not None
    assert (run.growth.least, run.growth.most, run.growth.micro) == (64, 256, 8)
    assert run.command == ("train.py", *PLAN)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--batch-grows", "256", *PLAN), "add --pool POOL"),
        ((*GROWS, "256"), "needs the plan on the command line"),
        ((*GROWS, "256", "--plan", "replicas=2+batch(size=64)"), "elastic replicas"),
        ((*GROWS, "100", *PLAN), "give 128 or more"),
        ((*GROWS, "256", "--max-steps", "9", *PLAN), "End it by epochs"),
        ((*GROWS, "256", "--no-noise-scale", *PLAN), "noise scale"),
    ],
)
def test_a_batch_that_cannot_grow_is_refused(
    words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(capsys, *words, "train.py")
    assert not Path("runs").exists(), "nothing was made"


def test_a_run_that_is_over_is_queued_again_in_its_directory_and_one_that_waits_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = queued("train.py", "--run-dir", "runs/a")
    assert "nobody serves pool now, so the run waits: paceline pool pool" in capsys.readouterr().out
    again = ("run", "--pool", "pool", "--detach", "train.py", "--run-dir", "runs/a", "--epochs", "9")
    assert main(again) == 2
    assert "has a run named a already" in capsys.readouterr().err
    PoolRecord(runs={"a": RunEntry(phase="finished", submitted=first.submitted)}).save(Path("pool"))
    assert main(again) == 0
    (found,) = queued_runs(Path("pool"), known={}).values()
    assert found.submitted > first.submitted
    assert found.command == ("train.py", "--epochs", "9")
    PoolRecord(runs={"a": RunEntry(phase="finished", submitted=found.submitted)}).save(Path("pool"))
    assert main([*again, "--run-dir", "elsewhere/a"]) == 2, "another run of that name"
