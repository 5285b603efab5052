"""The same unchanged program under torchrun, mpirun and srun: the same losses, a whole run directory, a clear end.

Where jobs train the same they are started as users start them; how they fail and stop is shown with a `python` that is
forked (`warm.interpreter`).
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import quick
import warm
from network_hosts import NamespaceHost, two_hosts
from programs import (
    PACELINE,
    STEPS,
    Announcements,
    checkpoints,
    command,
    losses,
    record,
    reference_losses,
    run,
    started_workers,
    the_run,
    write_program,
)
from slurm_cluster import Cluster, needs_slurm, slurm_cluster

FAILED_S = 20.0  # from the error of a worker to the end of its job
TOKEN = {"PACELINE_TOKEN": "0123456789abcdef0123456789abcdef"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
MPIRUN = [str(Path(sys.executable).parent / "mpirun"), "--oversubscribe", "-n", "2", sys.executable]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.fixture
def train(tmp_path: Path) -> Path:
    return write_program(tmp_path)


@pytest.fixture
def python(tmp_path: Path) -> str:
    return str(warm.interpreter(tmp_path))


@pytest.fixture
def torchrun(python: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("PYTHON_EXEC", python)  # torchrun's own variable
    return TORCHRUN


@pytest.fixture
def mpirun(python: str) -> list[str]:
    return [*MPIRUN[:-1], python]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NamespaceHost]]:
    with two_hosts(tmp_path_factory.mktemp("network")) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(hosts: list[NamespaceHost], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), hosts) as made:
        yield made


def assert_trained(run_dir: Path, output: str, *, launcher: str) -> None:
    """A run as whole as one that Paceline started itself."""
    assert losses(run_dir) == pytest.approx(list(reference_losses()), rel=1e-5)
    assert output.count('value {"step": 8, "workers": 2}') == 2  # each worker returns its own
    assert checkpoints(run_dir) == [4, STEPS]
    assert json.loads((run_dir / "summary.json").read_text())["state"] == "finished"
    events = [json.loads(line) for line in (run_dir / "attempt_1" / "events.jsonl").read_text().splitlines()]
    assert (events[0]["event"], events[0]["launcher"]) == ("RunStarted", launcher)
    code, told = run(*PACELINE, "status", run_dir, "--json")
    status = json.loads(told)
    assert (code, status["state"], status["exit_code"], status["step"]) == (0, "finished", 0, STEPS)
    assert [(one["rank"], one["state"], one["step"]) for one in status["workers"]] == [
        (0, "finished", STEPS),
        (1, "finished", STEPS),
    ]
    assert len({one["pid"] for one in status["workers"]}) == 2


def assert_failed(run_dir: Path, code: int, output: str, ended: float) -> None:
    assert code != 0
    assert ended - json.loads((run_dir / "attempt_1" / "worker_1" / "error.json").read_text())["time"] < FAILED_S
    assert output.count("ValueError: worker 1 has had enough") == 1
    assert "frames in paceline" in output and "worker/session.py" not in output
    assert "the whole traceback of worker 1: " in output and "/attempt_1/worker_1/error.json" in output
    assert "Connection closed" not in output  # the other worker's echo is a line of words, if it lives to say it
    assert (record(run_dir)["state"], record(run_dir)["exit_code"]) == ("failed", 1)
    told = json.loads(run(*PACELINE, "status", run_dir, "--json")[1])
    assert (told["state"], told["workers"][1]["state"]) == ("failed", "failed")


# ------------------------------------------------------------------------------------------------- torchrun and mpirun


@pytest.mark.parametrize(
    ("words", "launcher"), [(TORCHRUN, "torchrun"), (MPIRUN, "openmpi")], ids=["torchrun", "mpirun"]
)
def test_an_engine_trains_the_same_and_its_workers_may_run_again(
    words: list[str], launcher: str, train: Path, tmp_path: Path
) -> None:
    again = "    value = paceline.run(lambda worker: worker.gather(('again', worker.rank)), run_dir='again')\n"
    again += "    print(f'{value}\\n', end='', flush=True)  # in one piece: there are two writers\n"
    train.write_text(train.read_text() + again)
    code, output = run(*words, train, environment=AS_ROOT)
    assert code == 0, output
    assert_trained(the_run(tmp_path), output, launcher=launcher)
    assert output.count("[('again', 0), ('again', 1)]") == 2
    assert record(tmp_path / "again")["state"] == "finished"


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_a_failing_worker_ends_the_job(
    launcher: str, train: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    words: list[str] = request.getfixturevalue(launcher)
    code, output = run(*words, train, "--fail", "1:5", "--epochs", "100000", environment=AS_ROOT)
    ended = time.time()
    assert_failed(the_run(tmp_path), code, output, ended)


def test_worlds_that_disagree_are_an_error_that_names_both(mpirun: list[str], train: Path, tmp_path: Path) -> None:
    one = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    code, output = run(*mpirun, train, environment=AS_ROOT | one)
    assert code != 0
    assert "torchrun: worker 1 of 4" in output and "PACELINE_WORLD" in output
    assert re.search(r"openmpi: worker [01] of 2", output), "mpirun ends the other one, perhaps before it has spoken"
    assert not (tmp_path / "runs").exists()


def test_the_command_itself_is_not_for_engines_to_multiply(mpirun: list[str], train: Path, tmp_path: Path) -> None:
    code, output = run(*mpirun, "-m", "paceline", "run", train, environment=AS_ROOT)
    assert code == 2
    assert "openmpi started this command 2 times" in output and "--hosts 2" in output
    assert not (tmp_path / "runs").exists()


def test_sigterm_to_mpirun_stops_the_run_in_good_order(mpirun: list[str], train: Path, tmp_path: Path) -> None:
    """It leaves a quarter of a second: the record says at once that the run is stopped, saved or not."""
    with closing(Announcements(tmp_path / "pipe")) as pipe:
        options = ["--epochs", "100000", "--tell", pipe.path]
        with command(*mpirun, train, *options, environment=AS_ROOT) as program:
            program.told(pipe, 2)
            program.process.terminate()
            code, output = program.end()
            assert program.left(limit_s=5.0) == []
    assert code != 0
    told = record(the_run(tmp_path))
    assert (told["state"], told["exit_code"] in (143, 75)) == ("stopped", True), output


# ---------------------------------------------------------------------------------------------------------------- slurm


@needs_slurm
@pytest.mark.parametrize("nodes", [quick.further(1), 2])
def test_srun_trains_the_same(nodes: int, cluster: Cluster, python: str, train: Path, tmp_path: Path) -> None:
    started = sys.executable if nodes == 2 else python
    words = cluster.srun(f"-N{nodes}", "-n2", "--export=ALL", started, str(train))
    code, output = run(*words, environment=cluster.environment | (TOKEN if nodes == 2 else {}))
    assert code == 0, output
    run_dir = the_run(tmp_path)
    assert_trained(run_dir, output, launcher="slurm")
    hosts = [one["host"] for one in started_workers(run_dir)]
    assert len(set(hosts)) == nodes, "each node has its own host name"


@needs_slurm
def test_srun_over_two_nodes_needs_a_token(cluster: Cluster, python: str, train: Path, tmp_path: Path) -> None:
    code, output = run(*cluster.srun("-N2", "-n2", python, str(train)), environment=cluster.environment)
    assert code != 0
    assert "The job has no token" in output
    assert not (tmp_path / "runs").exists()


@needs_slurm
@pytest.mark.parametrize("nodes", [quick.further(1), 2])
def test_a_failing_worker_ends_a_slurm_job(
    nodes: int, cluster: Cluster, python: str, train: Path, tmp_path: Path
) -> None:
    words = cluster.srun(f"-N{nodes}", "-n2", python, str(train), "--fail", "1:5", "--epochs", "100000")
    code, output = run(*words, environment=cluster.environment | TOKEN)
    ended = time.time()
    assert_failed(the_run(tmp_path), code, output, ended)


@needs_slurm
def test_slurm_starts_the_command_once_on_each_node(cluster: Cluster, python: str, train: Path, tmp_path: Path) -> None:
    words = [python, *PACELINE[1:], "run", str(train), "--workers", "4", "--hosts", "2", "--head", "n2:29517"]
    started = cluster.srun("-N2", "--ntasks-per-node=1", *words)
    code, output = run(*started, environment=cluster.environment | TOKEN)
    assert code == 0, output
    run_dir = the_run(tmp_path)  # the hosts share the disk: there is one run, and the coordinator writes its files
    assert losses(run_dir) == pytest.approx(list(reference_losses()), rel=1e-5)
    assert [(one["rank"], one["host"]) for one in started_workers(run_dir)] == [
        (0, "n2"), (1, "n2"), (2, "n1"), (3, "n1"),
    ]  # fmt: skip
    assert (record(run_dir)["state"], record(run_dir)["attempts"][-1]["attempt"]) == ("finished", 1)
