"""Asked to leave under torchrun, mpirun, srun, or in a world made by hand: a step is finished, all save and exit 75.

The launchers start a `python` that is forked (`warm.interpreter`); `test_launchers` has them start what users do.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import quick
import warm
from network_hosts import NamespaceHost, free_port, two_hosts
from paceline.monitor.audit.audit import audit
from programs import (
    LIMIT_S,
    STEPS,
    TRAIN,
    Announcements,
    Program,
    checkpoints,
    child_environment,
    command,
    losses,
    record,
    reference_losses,
    run,
    write_program,
)
from slurm_cluster import Cluster, needs_slurm, slurm_cluster

PREEMPTED = 75
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
MPIRUN = [str(Path(sys.executable).parent / "mpirun"), "--oversubscribe", "-n", "2"]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
TOKEN = {"PACELINE_TOKEN": "0123456789abcdef0123456789abcdef"}


@pytest.fixture
def python(tmp_path: Path) -> str:
    return str(warm.interpreter(tmp_path))


@pytest.fixture
def torchrun(python: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("PYTHON_EXEC", python)  # torchrun's own variable
    return TORCHRUN


@pytest.fixture
def mpirun(python: str) -> list[str]:
    return [*MPIRUN, python]


@pytest.fixture
def train(tmp_path: Path) -> Path:
    """The program of `programs`, which can also ask itself to leave, in the middle of a step."""
    text = TRAIN
    for before, after in (
        ("import sys\n", "import signal\nimport sys\nimport time\n"),
        (
            "options = parser",
            'parser.add_argument("--ask", nargs="*", default=[], help="WORKER:STEP:SIGNAL")\n'
            'parser.add_argument("--hang", action="store_true", help="the step of --ask has no end")\n'
            'parser.add_argument("--steps", type=int)\n'
            'parser.add_argument("--pause", type=float, default=0.0)\n'
            'parser.add_argument("--grace", type=float, default=30.0)\n'
            "options = parser",
        ),
        (
            "def train(worker)",
            "def asked(worker, step):\n"
            '    for rank, at, name in (text.split(":") for text in options.ask):\n'
            '        if (worker.rank, step, os.path.exists(f"asked_{at}")) == (int(rank), int(at), False):\n'
            '            open(f"asked_{at}", "w").close()\n'
            "            os.kill(os.getpid(), getattr(signal, name))\n"
            "            while options.hang:\n"
            "                pass\n\n\n"
            "def train(worker)",
        ),
        (
            "        worker.report(loss=step(batch))\n",
            "        asked(worker, worker.step + 1)\n"
            "        worker.report(loss=step(batch))\n"
            "        time.sleep(options.pause)\n",
        ),
        ("save_every=4", 'run_dir="run", max_steps=options.steps, grace_s=options.grace'),
    ):
        assert before in text
        text = text.replace(before, after, 1)
    return write_program(tmp_path, text=text)


def assert_preempted(run_dir: Path, *, at_steps: list[int] | None = None) -> int:
    """All steps that were taken are in the one checkpoint, or in the last of `at_steps`; returns its step."""
    assert (record(run_dir)["state"], record(run_dir)["exit_code"]) == ("stopped", PREEMPTED)
    (*before, saved) = checkpoints(run_dir)
    assert saved == len(losses(run_dir)) and [*before, saved] == (at_steps or [saved])
    assert not list(run_dir.glob("attempt_*/worker_*/error.json"))
    assert json.loads((run_dir / "summary.json").read_text())["state"] == "stopped"
    return saved


def assert_goes_on(run_dir: Path, code: int, output: str, *, after: int) -> None:
    assert code == 0, output
    assert f"resumed from step {after} " in output
    assert losses(run_dir)[:STEPS] == pytest.approx(list(reference_losses()), rel=1e-5)
    assert audit(run_dir).verdict == "clean"


@pytest.mark.parametrize("launcher, asked", [("torchrun", {5: 1}), ("mpirun", {5: 0, 7: 1})])
def test_sigterm_to_any_one_worker_has_all_finish_the_step_save_and_leave(
    launcher: str, asked: dict[int, int], train: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Each start is asked at one of these steps, by one of the workers."""
    words: list[str] = request.getfixturevalue(launcher)
    again = [*words, train, "--ask", *(f"{worker}:{step}:SIGTERM" for step, worker in asked.items())]
    for number in range(len(asked)):
        code, output = run(*again, environment=AS_ROOT)
        assert code == (1 if launcher == "torchrun" else PREEMPTED), (
            output
        )  # torchrun's own exit code is 1 for everything
        assert_preempted(tmp_path / "run", at_steps=[*asked][: number + 1])
    assert_goes_on(tmp_path / "run", *run_alone(train, max(asked)), after=max(asked))


@pytest.mark.further
def test_ctrl_c_to_torchrun_which_passes_it_on_to_all(torchrun: list[str], train: Path, tmp_path: Path) -> None:
    with asked_while_running([*torchrun, train], tmp_path) as program:
        program.process.send_signal(signal.SIGINT)
        code, output = program.end()
    assert code != 0
    assert "go on with: " in output and "PACELINE_RUN_DIR=" in output
    saved = assert_preempted(tmp_path / "run")
    assert "asked to leave" not in output, "somebody did not come to the end of a step"
    assert_goes_on(tmp_path / "run", *run_alone(train, saved), after=saved)


def test_a_signal_of_ones_choice_to_mpirun_which_passes_it_on_to_all(
    mpirun: list[str], train: Path, tmp_path: Path
) -> None:
    environment = AS_ROOT | {"PACELINE_NOTICE": "USR1"}
    with asked_while_running([*mpirun, train], tmp_path, environment=environment) as program:
        program.process.send_signal(signal.SIGUSR1)
        code, output = program.end()
    assert code == PREEMPTED, output
    saved = assert_preempted(tmp_path / "run")
    assert_goes_on(tmp_path / "run", *run_alone(train, saved), after=saved)


def test_in_a_world_made_by_hand_each_worker_exits_with_75(python: str, train: Path, tmp_path: Path) -> None:
    assert by_hand(python, train, "--ask", "1:5:SIGINT") == [PREEMPTED, PREEMPTED]
    saved = assert_preempted(tmp_path / "run", at_steps=[5])
    assert_goes_on(tmp_path / "run", *run_alone(train, saved), after=saved)


def test_a_step_without_an_end_is_ended_by_the_grace_time(torchrun: list[str], train: Path, tmp_path: Path) -> None:
    words = [*torchrun, train, "--ask", "1:5:SIGTERM", "--hang", "--grace", "2"]
    code, output = run(*words)
    assert code != 0
    assert "was asked to leave by SIGTERM, and did not come to the end of its step and save within 2 s" in output
    assert checkpoints(tmp_path / "run") == []


@contextlib.contextmanager
def asked_while_running(words: list[Any], folder: Path, **more: Any) -> Iterator[Program]:
    """A run in which all workers take one step after the other."""
    with closing(Announcements(folder / "pipe")) as pipe:
        options = ["--epochs", "100000", "--pause", "0.1", "--tell", pipe.path]
        with command(*words, *options, **more) as program:
            program.told(pipe, 2)
            yield program


def run_alone(train: Path, saved: int) -> tuple[int, str]:
    """Go on without an engine, which is a start like any other, for two steps or to the program's end."""
    return run(sys.executable, train, "--steps", str(max(saved + 2, STEPS)))


def by_hand(python: str, train: Path, *arguments: str) -> list[int]:
    """The exit codes of two workers that were told where they are in variables."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    workers = [
        subprocess.Popen([python, str(train), *arguments], env=child_environment() | place | {"RANK": rank})
        for rank in "01"
    ]
    try:
        return [worker.wait(LIMIT_S) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


# ---------------------------------------------------------------------------------------------------------------- slurm


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NamespaceHost]]:
    with two_hosts(tmp_path_factory.mktemp("network"), subnet="10.79.0") as made:
        yield made


@pytest.fixture(scope="module")
def cluster(hosts: list[NamespaceHost], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), hosts) as made:
        yield made


@needs_slurm
@pytest.mark.parametrize("name", [quick.further("USR1"), "TERM"])
def test_what_slurm_sends_to_a_step_over_two_nodes(
    name: str, cluster: Cluster, python: str, train: Path, tmp_path: Path
) -> None:
    """SIGUSR1 as by `--signal=USR1@60`; SIGTERM as at the end of the time, KillWait seconds before SIGKILL."""
    environment = cluster.environment | TOKEN
    words = cluster.srun("-N2", "-n2", "--job-name=notice", python, str(train))
    with asked_while_running(words, tmp_path, environment=environment) as program:
        cancel = [*cluster.login, "scancel", f"--signal={name}", "--name=notice"]
        subprocess.run(cancel, env=os.environ | environment, check=True, timeout=30)
        code, output = program.end()
    assert code == PREEMPTED, output
    saved = assert_preempted(tmp_path / "run")
    assert_goes_on(tmp_path / "run", *run_alone(train, saved), after=saved)
