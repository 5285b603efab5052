"""The command: fast, complete help; arguments reach what they are for; a mistake is one message and exit status 2."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main as cli
from paceline.cli.arguments import Parser, split_script
from paceline.cli.parity.request import ParityRequest
from paceline.cli.run import OPTIONS
from paceline.errors import CheckpointError, LaunchError, PlanError
from paceline.plan import Batch, Cast, CommandPlan, Job, Layout, Plan

Record = list[tuple[tuple[Any, ...], dict[str, Any]]]


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text("")
    return "train.py"  # tests run in tmp_path


@pytest.fixture
def takes_the_place_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Record]:
    """Put a recorder where a sub-command finds the function that does its work."""

    def put(module: str, function: str, *, returns: int = 0, raises: BaseException | None = None) -> Record:
        calls: Record = []

        def recorder(*args: Any, **keywords: Any) -> int:
            calls.append((args, keywords))
            if raises is not None:
                raise raises
            return returns

        stand_in = types.ModuleType(module)
        setattr(stand_in, function, recorder)
        monkeypatch.setitem(sys.modules, module, stand_in)
        return calls

    return put


@pytest.fixture
def started(takes_the_place_of: Callable[..., Record]) -> Iterator[Record]:
    yield takes_the_place_of("paceline.runs.run", "start", returns=7)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = cli.main(words)
    said = capsys.readouterr()
    return status, said.out, said.err


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the message of a command that is refused: exit status 2, one message, nothing on stdout."""
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "")
    assert err.startswith("paceline: ")
    return err.removeprefix("paceline: ")


# ------------------------------------------------------------------------------------------------ help and start


def test_the_help_needs_no_heavy_import_and_little_time() -> None:
    code = (
        "import sys, time\n"
        "from paceline.cli.main import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "except SystemExit as end:\n"
        "    heavy = {'torch', 'numpy', 'rich', 'psutil', 'asyncio', 'importlib.metadata'} & set(sys.modules)\n"
        "    print('HEAVY', sorted(heavy), 'EXIT', end.code, file=sys.stderr)\n"
        "print('CPU', time.process_time(), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert "HEAVY [] EXIT 0" in done.stderr, done.stderr
    assert float(done.stderr.split("CPU ")[1]) < 0.5


def test_the_help_names_every_command_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for command in ("run", "plan", "parity", "status", "logs", "stop", "resize", "report", "audit", "export"):
        assert f"\n    {command} " in text
    assert "examples:\n  paceline run train.py --workers 4" in text


@pytest.mark.parametrize(
    "command", ["run", "plan", "parity", "status", "logs", "stop", "resize", "report", "audit", "export"]
)
def test_every_command_explains_itself_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: paceline {command}" in text
    assert f"examples:\n  paceline {command}" in text


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "paceline", "plan"], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("plan ")


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("paceline ")


# ----------------------------------------------------------------------------------------------------------- run


def test_every_job_field_is_an_option_or_positional() -> None:
    names = {field.name for field in dataclasses.fields(Job)}
    assert names == set(OPTIONS) | {"program", "args"}


OPTION_VALUES: dict[str, tuple[list[str], object]] = {
    "workers": (["--workers", "4"], 4),
    "launcher": (["--launcher", "inline"], "inline"),
    "hosts": (["--hosts", "2", "--head", "node1:1"], 2),
    "head": (["--head", "node1:29500"], "node1:29500"),
    "token_file": (["--token-file", "token"], "token"),
    "private_network": (["--private-network"], True),
    "run_dir": (["--run-dir", "runs/x"], "runs/x"),
    "fresh": (["--fresh"], True),
    "save_every": (["--save-every", "100"], 100),
    "save_every_s": (["--save-every-s", "60"], 60.0),
    "save_at_end": (["--no-save-at-end"], False),
    "keep": (["--keep=5"], 5),
    "timeout_s": (["--timeout-s", "30"], 30.0),
    "balance": (["--balance"], True),
    "noise_scale": (["--no-noise-scale"], False),
    "silence_s": (["--silence-s", "3"], 3.0),
    "patience_s": (["--patience-s", "5"], 5.0),
    "grace_s": (["--grace-s", "90"], 90.0),
    "device": (["--device", "cpu"], "cpu"),
    "capture_dir": (["--capture-dir", "c"], "c"),
    "threads": (["--threads", "2"], 2),
    "metrics_port": (["--metrics-port", "0"], 0),
    "metrics_host": (["--metrics-host", "0.0.0.0"], "0.0.0.0"),
    "tensorboard": (["--no-tensorboard"], False),
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
            ["train.py", "--plan", "compute(precision=fp8)"],
            "Compute(precision='fp8'): fp8 arithmetic is not built yet.",
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


# ---------------------------------------------------------------------------------------------------------- plan


def test_plan_shows_text_python_and_the_share_of_each_worker(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "plan", "batch(size=10)", "--workers", "3", "--set", "plan.compute.precision=bf16")
    assert (status, err) == (0, "")
    assert "plan     replicas=3+batch(size=10,micro=2)+compute(precision=bf16)\n" in out
    assert "python   Plan(layout=Layout(replicas=3)," in out
    assert "10 samples a step, 5 micro-batches of 2; each worker runs 1 or 2\n" in out


def test_plan_says_that_the_last_micro_batch_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "plan", "batch(size=10,micro=4)", "--workers", "3")
    assert "10 samples a step, 3 micro-batches of 4 (the last of 2); each worker runs 1\n" in out


def test_plan_without_workers_uses_those_of_the_layout(capsys: pytest.CaptureFixture[str]) -> None:
    assert "workers  4\n" in run(capsys, "plan", "replicas=4")[1]
    assert "workers  1\n" in run(capsys, "plan")[1]


def test_plan_tells_all_broken_rules_and_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "plan", "replicas=5+batch(size=8,micro=4)", "--workers", "3")
    assert status == 2
    assert out.startswith("plan ")
    assert err.count("paceline: ") == 2
    status, out, err = run(capsys, "plan", "replicas=5", "--workers", "3", "--check")
    assert (status, out) == (2, "")
    assert "Layout needs 5 workers" in err
    assert run(capsys, "plan", "replicas=3", "--workers", "3", "--check") == (0, "", "")


def test_plan_refuses_what_is_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert "has a term 'nonsense'" in refused(capsys, "plan", "nonsense")
    assert "--workers is 0; it must be at least 1" in refused(capsys, "plan", "--workers", "0")


# -------------------------------------------------------------------------------------------- the other commands

PASSED_ON: list[tuple[list[str], str, str, tuple[Any, ...], dict[str, Any]]] = [
    (["status", "R"], "paceline.monitor.status.status", "main_status", (Path("R"),), {"json": False}),
    (["status", "R", "--json"], "paceline.monitor.status.status", "main_status", (Path("R"),), {"json": True}),
    (
        ["logs", "R", "--worker", "2", "--stream", "stderr", "-f"],
        "paceline.monitor.status.logs",
        "main_logs",
        (Path("R"),),
        {"worker": 2, "stream": "stderr", "follow": True},
    ),
    (
        ["logs", "R"],
        "paceline.monitor.status.logs",
        "main_logs",
        (Path("R"),),
        {"worker": None, "stream": None, "follow": False},
    ),
    (["stop", "R"], "paceline.monitor.status.stop", "main_stop", (Path("R"),), {}),
    (["audit", "R", "--json"], "paceline.monitor.audit.audit", "main_audit", (Path("R"),), {"json": True}),
    (
        ["export", "R", "m.st"],
        "paceline.checkpoint.export",
        "main_export",
        (Path("R"), Path("m.st")),
        {"max_shard_bytes": None, "config": None},
    ),
    (
        ["export", "R", "hf/", "--max-shard-size", "1.5GB", "--config", "c"],
        "paceline.checkpoint.export",
        "main_export",
        (Path("R"), Path("hf")),
        {"max_shard_bytes": 1_500_000_000, "config": Path("c")},
    ),
    (
        [
            "parity",
            "train.py",
            "--workers",
            "1,2",
            "--plan",
            "cast(dtype=bf16)",
            "--tolerance",
            "1e-3",
            "--",
            "--w",
            "8",
        ],
        "paceline.cli.parity.run",
        "main_parity",
        (
            ParityRequest(
                script=Path("train.py"),
                args=("--w", "8"),
                plans=(Plan(wire=Cast(dtype="bf16")),),
                tolerance=1e-3,
            ),
        ),
        {},
    ),
    (
        ["parity", "train.py", "--float64", "--steps", "3", "--width", "4"],
        "paceline.cli.parity.run",
        "main_parity",
        (ParityRequest(script=Path("train.py"), args=("--width", "4"), steps=3, float64=True),),
        {},
    ),
]


@pytest.mark.parametrize(("words", "module", "function", "args", "keywords"), PASSED_ON)
def test_a_command_passes_its_arguments_on_and_returns_the_exit_status(
    words: list[str],
    module: str,
    function: str,
    args: tuple[Any, ...],
    keywords: dict[str, Any],
    script: str,
    takes_the_place_of: Callable[..., Record],
) -> None:
    calls = takes_the_place_of(module, function, returns=1)
    assert cli.main(words) == 1
    assert calls == [(args, keywords)]


@pytest.mark.parametrize(("module", "function"), sorted({(row[1], row[2]) for row in PASSED_ON}))
def test_what_a_command_calls_exists(module: str, function: str) -> None:
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["stats"], "invalid choice: 'stats'"),
        (["status"], "the following arguments are required: RUN"),
        (["logs", "R", "--stream", "std"], "invalid choice: 'std'"),
        (["logs", "R", "--worker", "x"], "--worker is 'x'; it must be a whole number."),
        (["parity", "absent.py"], "There is no file absent.py."),
        (["parity", "train.py", "--workers", "1,x"], "--workers is 'x'; it must be a whole number."),
        (["parity", "train.py", "--workers", "0,1"], "must be at least 1 each"),
        (["parity", "train.py", "--tolerance", "0"], "--tolerance is 0.0; it must be more than 0"),
    ],
)
def test_a_usage_mistake_is_one_message(
    words: list[str], says: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(capsys, *words)


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (PlanError("no such plan"), 2, "paceline: no such plan\n"),
        (LaunchError("no such host"), 2, "paceline: no such host\n"),
        (CheckpointError("disk full"), 1, "paceline: disk full\n"),
        (KeyboardInterrupt(), 130, "paceline: interrupted\n"),
    ],
)
def test_an_error_is_one_message_and_its_exit_status(
    error: BaseException,
    status: int,
    says: str,
    takes_the_place_of: Callable[..., Record],
    capsys: pytest.CaptureFixture[str],
) -> None:
    takes_the_place_of("paceline.monitor.status.stop", "main_stop", raises=error)
    assert run(capsys, "stop", "R") == (status, "", says)


def test_a_reader_that_leaves_early_is_no_error() -> None:
    """`paceline plan --help | head -0`: the pipe is closed before anything is written."""
    command = [sys.executable, "-m", "paceline", "plan"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()  # pyright: ignore[reportOptionalMemberAccess]  # it is a pipe
        _, err = process.communicate(timeout=30)
    assert "Traceback" not in err
    assert "BrokenPipe" not in err


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


def test_an_export_refuses_a_folders_options_for_a_file_and_tells_the_folders_that_it_makes(
    takes_the_place_of: Callable[..., Record], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = takes_the_place_of("paceline.checkpoint.export", "main_export")
    Path("here").mkdir()
    assert "m.st is one file: --max-shard-size and --config are for a folder" in refused(
        capsys, "export", "RUN", "m.st", "--max-shard-size", "1GB"
    )
    assert "--max-shard-size is 'big'; it must be a size such as" in refused(
        capsys, "export", "RUN", "here", "--max-shard-size", "big"
    )
    assert calls == []

    def export(_: Path, target: Path, **options: object) -> int:
        target.parent.mkdir(parents=True)
        return 0

    monkeypatch.setattr(sys.modules["paceline.checkpoint.export"], "main_export", export)
    assert run(capsys, "export", "RUN", "here/a/b/m.st") == (0, "made the folders here/a, here/a/b\n", "")
