"""`paceline run`: options, job file and plan reach the run, and a mistake is refused before anything starts."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from commands import Record, refused, run
from paceline.cli import main as cli
from paceline.cli.arguments import Parser, split_script
from paceline.cli.run import OPTIONS
from paceline.errors import PlanError
from paceline.launch.fork.warm_parent_client import WarmParent
from paceline.plan import Batch, Cast, CommandPlan, Job, Layout, Plan


@pytest.fixture
def started(takes_the_place_of: Callable[..., Record], monkeypatch: pytest.MonkeyPatch) -> Iterator[Record]:
    monkeypatch.setattr(WarmParent, "start", lambda **_: contextlib.nullcontext())  # no process for a run that is none
    yield takes_the_place_of("paceline.runs.run", "start", returns=7)


def test_every_job_field_is_an_option_or_positional() -> None:
    names = {field.name for field in dataclasses.fields(Job)}
    assert names == set(OPTIONS) | {"program", "args"}


def test_the_warm_parent_starts_before_the_supervisor_is_imported(tmp_path: Path, script: str) -> None:
    code = (
        "import sys\n"
        "from paceline.cli import main as cli\n"
        "from paceline.launch.fork.warm_parent_client import WarmParent\n"
        "def started():\n"
        "    late = {'paceline.launch.coordinator.coordinator', 'paceline.monitor.watch'} & set(sys.modules)\n"
        "    print('LATE', sorted(late))\n"
        "    sys.exit(7)\n"
        "WarmParent.start = started\n"
        "cli.main(['run', sys.argv[1]])\n"
    )
    command = [sys.executable, "-c", code, script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout.strip()) == (7, "LATE []"), done.stderr


OPTION_VALUES: dict[str, tuple[list[str], object]] = {
    "run_as": (["--as", "horovod"], "horovod"),
    "run_for": (["--for", "tensorflow"], "tensorflow"),
    "workers": (["--workers", "4"], 4),
    "servers": (["--for", "tensorflow", "--servers", "2"], 2),
    "launcher": (["--launcher", "inline"], "inline"),
    "hosts": (["--hosts", "2", "--head", "node1:1"], 2),
    "head": (["--head", "node1:29500"], "node1:29500"),
    "token_file": (["--token-file", "token"], "token"),
    "private_network": (["--private-network"], True),
    "run_dir": (["--run-dir", "runs/x"], "runs/x"),
    "fresh": (["--fresh"], True),
    "slots": (["--slots", "3"], 3),
    "save_every": (["--save-every", "100"], 100),
    "save_every_s": (["--save-every-s", "60"], 60.0),
    "save_at_end": (["--no-save-at-end"], False),
    "keep": (["--keep=5"], 5),
    "remote_dir": (["--remote-dir", "file:///far/run"], "file:///far/run"),
    "remote_wait_s": (["--remote-wait-s", "5"], 5.0),
    "timeout_s": (["--timeout-s", "30"], 30.0),
    "restart_lost": (["--restart-lost"], True),
    "balance": (["--balance"], True),
    "noise_scale": (["--no-noise-scale"], False),
    "silence_s": (["--silence-s", "3"], 3.0),
    "patience_s": (["--patience-s", "5"], 5.0),
    "grace_s": (["--grace-s", "90"], 90.0),
    "device": (["--device", "cpu"], "cpu"),
    "cluster": (["--cluster", "lab.toml"], "lab.toml"),
    "capture_dir": (["--capture-dir", "c"], "c"),
    "threads": (["--threads", "2"], 2),
    "metrics_port": (["--metrics-port", "0"], 0),
    "metrics_host": (["--metrics-host", "0.0.0.0"], "0.0.0.0"),
    "tensorboard": (["--no-tensorboard"], False),
    "log": (["--log", "wandb", "--log", "mlflow"], ("wandb", "mlflow")),
    "show": (["--show", "all"], "all"),
    "max_steps": (["--max-steps", "10"], 10),
}


@pytest.mark.parametrize("name", list(OPTIONS))
def test_each_option_sets_its_field_and_says_that_it_was_given(name: str, script: str, started: Record) -> None:
    words, value = OPTION_VALUES[name]
    assert cli.main(["run", script, *words]) == 7
    (((job,), keywords),) = started
    assert getattr(job, name) == value
    assert name in keywords["given"]
    assert keywords["given"][0] == "program"
    changed = {
        field.name for field in dataclasses.fields(Job) if getattr(job, field.name) != getattr(Job(), field.name)
    }
    assert changed == set(keywords["given"])


def test_options_may_stand_on_both_sides_and_the_rest_is_the_scripts(script: str, started: Record) -> None:
    cli.main(["run", "--workers", "2", script, "--lr", "0.1", "--keep", "4", "data", "--", "--workers", "9", "--"])
    (((job,), keywords),) = started
    assert (job.workers, job.keep, job.program) == (2, 4, "train.py")
    assert job.args == ("--lr", "0.1", "data", "--workers", "9", "--")
    assert keywords["given"] == ("program", "workers", "keep", "args")
    assert keywords["plan"] == CommandPlan()
    assert keywords["command_started"] > 0


def test_another_frameworks_program_has_no_plan_and_no_pool(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    start = ("run", "--for", "tensorflow", script, "--workers", "2")
    for plan in (["--plan", "replicas=2"], ["--set", "plan.batch.size=8"]):
        assert "with --for tensorflow the program takes its steps by itself" in refused(capsys, *start, *plan)
    assert "max_steps=5 cannot be used with run_for='tensorflow'" in refused(capsys, *start, "--max-steps", "5")
    assert "a program of tensorflow has none: start it without --pool" in refused(capsys, *start, "--pool", "here")
    assert refused(capsys, "run", "--for", "tensorflaw", script).startswith("--for is 'tensorflaw'; it must be")
    said = refused(capsys, "parity", script, "--for", "tensorflow")
    assert "--for is for programs that take their steps by themselves" in said


def test_a_dry_run_of_another_frameworks_program_counts_its_tasks(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "--for", "tensorflow", script, "--workers", "2", "--servers", "1", "--dry-run"]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "tasks  chief, 2 workers, 1 server; what they compute is the program's own matter" in said
    assert "start  4 processes on this host, each a new Python with the script" in said
    assert "torch" not in said and "plan " not in said


def test_plan_and_overrides_reach_the_run(script: str, started: Record) -> None:
    overrides = [
        "--set",
        "plan.batch.size=64",
        "--set",
        "keep=5",
        "--set",
        "job.show=all",
        "--set",
        "plan.wire.dtype=fp16",
    ]
    cli.main(["run", script, "--plan", "cast(dtype=bf16)", *overrides])
    (((job,), keywords),) = started
    assert keywords["plan"].whole == Plan(wire=Cast(dtype="fp16"), batch=Batch(size=64))
    assert (job.keep, job.show) == (5, "all")
    assert keywords["given"] == ("program", "keep", "show")


def test_a_job_file_is_changed_by_the_command(tmp_path: Path, script: str, started: Record) -> None:
    (tmp_path / "job.toml").write_text('program = "train.py"\nhosts = 2\nkeep = 9\nplan = "batch(size=64)"\n')
    cli.main(["run", "job.toml", "--head", "node1:29500", "--keep", "5", "--lr", "1"])
    (((job,), keywords),) = started
    assert job == Job(program="train.py", args=("--lr", "1"), hosts=2, head="node1:29500", keep=5)
    assert keywords["plan"].whole == Plan(batch=Batch(size=64))
    assert set(keywords["given"]) == {"program", "args", "hosts", "head", "keep"}


def test_the_commands_plan_wins_over_the_job_files(tmp_path: Path, script: str, started: Record) -> None:
    (tmp_path / "job.toml").write_text('program = "train.py"\nplan = "batch(size=64)"\n')
    cli.main(["run", "job.toml", "--plan", "replicas=2"])
    assert started[0][1]["plan"].whole == Plan(layout=Layout(replicas=2))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train.py", "--workers", "x"], "--workers is 'x'; it must be a whole number or none."),
        (["train.py", "--workers", "0"], "Job.workers is 0; it must be at least 1."),
        (["train.py", "--workers"], "argument --workers: expected one argument"),
        (["train.py", "--launcher", "slurm"], "Job(launcher='slurm') is not built yet."),
        (["train.py", "--show", "none"], "--show is 'none'; it must be 'first' or 'all'."),
        (["train.py", "--hosts", "2"], "A job on 2 hosts needs a rendezvous address"),
        (["train.py", "--worker", "2"], "unknown option --worker: did you mean --workers?"),
        (["--lr", "2", "train.py"], "unknown option --lr. The script's own arguments follow its name."),
        (["--wokers", "2", "train.py"], "unknown option --wokers. Did you mean --workers?"),
        ([], "the following arguments are required: SCRIPT.py|JOB.toml"),
        (["absent.py"], "There is no file absent.py."),
        (
            ["train.py", "--plan", "compute(fp8_recipe=rowwise)"],
            "Compute(precision='fp8', fp8_recipe='rowwise')",
        ),
        (["train.py", "--plan", "default", "--set", "plan.batch.siz=4"], "Did you mean 'size'?"),
        (["train.py", "--set", "batch.size=4"], "batch.size belongs to the plan; write --set plan.batch.size=4."),
        (["train.py", "--set", "kep=4"], "job.kep: Job has no field 'kep'. Did you mean 'keep'?"),
        (["train.py", "--set", "keep"], "--set keep sets nothing"),
        (["train.py", "--set", "keep=x"], "--set keep is 'x'; it must be a whole number."),
    ],
)
def test_a_mistake_is_refused_before_anything_starts(
    words: list[str], says: str, script: str, started: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(capsys, "run", *words)
    assert started == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("workers = 2", "does not say what to run"),
        ('program = "absent.py"', "names the program absent.py, which does not exist"),
        ("worker = 2", "job.toml: worker: Job has no field 'worker'. Did you mean 'workers'?"),
    ],
)
def test_a_mistake_in_the_job_file_is_refused(
    text: str, says: str, tmp_path: Path, started: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.toml").write_text(text)
    assert says in refused(capsys, "run", "job.toml")
    assert started == []


def test_a_dry_run_shows_job_plan_and_what_would_start(
    script: str, started: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", script, "--dry-run", "--plan", "replicas=4", "--set", "plan.batch.size=64", "--lr", "1"]
    status, out, err = run(capsys, *words)
    assert (status, err, started) == (0, "", [])
    assert "job    Job(program='train.py', args=('--lr', '1'))" in out
    assert "plan   replicas=4+batch(size=64,micro=8)\n" in out
    assert "Plan(layout=Layout(replicas=4), batch=Batch(size=64, micro=8))" in out
    assert "start  train.py --lr 1\n" in out
    assert "start  4 workers on this host" in out


def test_a_dry_run_of_several_hosts_says_who_gets_how_many(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", script, "--dry-run", "--workers", "5", "--hosts", "2", "--head", "node1:29500"]
    status, out, _ = run(capsys, *words)
    assert status == 0
    assert "plan   the script's own\n" in out
    assert "start  5 workers on 2 hosts that meet at node1:29500, 2 or 3 on each\n" in out


def test_a_dry_run_refuses_a_plan_that_cannot_work(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Layout needs 4 workers" in cli_error(
        capsys, "run", script, "--dry-run", "--plan", "replicas=4", "--workers", "3"
    )


def cli_error(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    status, _, err = run(capsys, *words)
    assert status == 2
    return err


def test_an_option_that_resembles_ours_is_the_scripts_where_its_text_has_it(tmp_path: Path) -> None:
    parser = Parser(prog="x")
    parser.add_argument("--show")
    script = tmp_path / "train.py"
    script.write_text('parser.add_argument("--slow", type=float)\nprint("--showing")\n')
    name = str(script)
    assert split_script([name, "--slow", "0.05", "--show=all"], parser) == ([name, "--show=all"], ("--slow", "0.05"))
    for option in ("--shwo", "--sho", "--showin"):  # a part of a word is not the word
        with pytest.raises(PlanError, match=f"unknown option {option}: did you mean --show"):
            split_script([name, option, "1"], parser)
        assert split_script([name, "--", option, "1"], parser) == ([name], (option, "1"))


def test_words_that_may_take_a_value_are_split_from_the_scripts() -> None:
    parser = Parser(prog="x")
    parser.add_argument("--workers")
    parser.add_argument("--fresh", action="store_true")
    split = split_script(["a.py", "--fresh", "in", "--workers=2", "-v", "--workers"], parser)
    assert split == (["a.py", "--fresh", "--workers=2", "--workers"], ("in", "-v"))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("plan.bacth.size=4", "plan.bacth: Plan has no field 'bacth'. Did you mean 'batch'?"),
        ("plan.batch.sise=4", "plan.batch.sise: Batch has no field 'sise'. Did you mean 'size'?"),
        ("plan.batch.size=four", "plan.batch.size is 'four'; it must be a whole number"),
        ("plan.batch.size=0", "Batch.size is 0; it must be at least 1 sample."),
        ("plan.guard.window=2", "Guard.window is 2; it must be at least 8 steps."),
        ("plan.wire.dtype=fp17", "plan.wire.dtype is 'fp17'; it must be 'bf16' or 'fp16'"),
        ("plan.wire.type=fp16", "Raw has no field 'type'"),
    ],
)
def test_an_override_that_no_plan_takes_is_refused_before_there_is_a_run(
    override: str, says: str, script: str, started: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(capsys, "run", script, "--set", override)
    assert started == []


@pytest.mark.parametrize(
    "overrides",
    [
        ["plan.wire.dtype=fp16", "plan.batch.size=8"],
        ["plan.guard.window=64"],  # of use beside the script's on_spike
        ["plan.layout.zero=2"],  # beside its shard
        ["plan.guard.window=64", "plan.guard.on_spike=rollback"],
    ],
)
def test_an_override_that_the_script_s_plan_may_take_is_left_to_it(
    overrides: list[str], script: str, started: Record
) -> None:
    assert cli.main(["run", script, *(word for text in overrides for word in ("--set", text))]) == 7
    assert started[0][1]["plan"].settings_text == ", ".join(overrides)
