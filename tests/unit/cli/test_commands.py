"""The commands: fast, complete help; arguments reach what they are for; a mistake is one message and exit status 2."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commands import Record, refused, run
from paceline.cli import main as cli
from paceline.cli.parity.request import ParityRequest
from paceline.errors import CheckpointError, LaunchError, PlanError
from paceline.launch.coordinator.control_socket import ask_to_end
from paceline.plan import Cast, Plan

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
    (["stop", "R"], "paceline.monitor.status.stop", "main_stop", (Path("R"), ask_to_end), {}),
    (["audit", "R", "--json"], "paceline.monitor.audit.audit", "main_audit", (Path("R"),), {"json": True}),
    (
        ["export", "R", "m.st"],
        "paceline.checkpoint.export",
        "main_export",
        (Path("R"), Path("m.st")),
        {"is_huggingface": False, "dtype": None, "max_shard_bytes": None, "config": None},
    ),
    (
        ["export", "R", "hf/", "--max-shard-size", "1.5GB", "--config", "c"],
        "paceline.checkpoint.export",
        "main_export",
        (Path("R"), Path("hf")),
        {"is_huggingface": False, "dtype": None, "max_shard_bytes": 1_500_000_000, "config": Path("c")},
    ),
    (
        ["export", "R", "Llama-3.1", "--format", "huggingface", "--dtype", "bf16"],
        "paceline.checkpoint.export",
        "main_export",
        (Path("R"), Path("Llama-3.1")),
        {"is_huggingface": True, "dtype": "bf16", "max_shard_bytes": None, "config": None},
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
    assert "model.safetensors is one file: --format huggingface writes a folder" in refused(
        capsys, "export", "RUN", "model.safetensors", "--format", "huggingface"
    )
    assert calls == []

    def export(_: Path, target: Path, **options: object) -> int:
        target.parent.mkdir(parents=True)
        return 0

    monkeypatch.setattr(sys.modules["paceline.checkpoint.export"], "main_export", export)
    assert run(capsys, "export", "RUN", "here/a/b/m.st") == (0, "made the folders here/a, here/a/b\n", "")
