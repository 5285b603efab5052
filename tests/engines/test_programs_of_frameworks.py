"""Programs that another framework distributes, on a real Slurm cluster: two nodes, started once, and again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bridged_hosts import bridged_hosts
from engine_runs import submitted, until
from network_hosts import NamespaceHost
from slurm_cluster import Cluster, needs_slurm, slurm_cluster

PROGRAM = Path(__file__).resolve().parents[1] / "support" / "cluster_program.py"
FOR = ("--for", "tensorflow", "--on", "slurm", "--hosts", "2")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, NamespaceHost]]:
    folder = tmp_path_factory.mktemp("slurm")
    with ExitStack() as stack:
        login, *nodes = stack.enter_context(bridged_hosts(folder, ["login", "n1", "n2"], subnet="10.93.0"))
        yield stack.enter_context(slurm_cluster(folder, nodes, login=login)), login


def said(run_dir: Path, rank: int, *, attempt: int = 1) -> str:
    path = run_dir / f"attempt_{attempt}/worker_{rank}/stdout.log"
    return path.read_text() if path.exists() else ""


@needs_slurm
def test_a_chief_meets_workers_and_servers_of_two_nodes(site: tuple[Cluster, NamespaceHost], tmp_path: Path) -> None:
    cluster, login = site
    program = Path(shutil.copy(PROGRAM, tmp_path))  # a console is written beside it
    options = [*FOR, "--workers", "2", "--servers", "1"]
    with submitted(login, program, *options, run_dir=tmp_path / "r", env=cluster.environment) as run:
        assert run.wait() == 0, run.output
    assert "chief0 met chief0 ps0 worker0 worker1" in said(tmp_path / "r", 0)
    assert '"chief": ["10.93.0.' in said(tmp_path / "r", 0)


@needs_slurm
def test_a_notice_of_slurm_has_the_job_requeued_and_the_program_starts_again(
    site: tuple[Cluster, NamespaceHost], tmp_path: Path
) -> None:
    cluster, login = site
    program, gate = Path(shutil.copy(PROGRAM, tmp_path)), tmp_path / "gate"
    options = [*FOR, "--workers", "2", f"*:until={gate}"]
    with submitted(login, program, *options, run_dir=tmp_path / "r", env=cluster.environment) as run:
        until(lambda: all(" met " in said(tmp_path / "r", rank) for rank in range(2)), "all have met")
        job = run.output.partition("as job ")[2].partition(";")[0]
        cluster.ask("scancel", "--signal=USR1", job)
        met = lambda: all(" met " in said(tmp_path / "r", rank, attempt=2) for rank in range(2))  # noqa: E731
        until(met, "all have met again", limit_s=200)
        gate.touch()
        assert run.wait(200) == 0, run.output
    first, second = run.record["attempts"]
    assert (first["exit_code"], second["exit_code"]) == (75, 0)
