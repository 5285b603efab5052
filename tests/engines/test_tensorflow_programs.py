"""`paceline run --for tensorflow` over SSH, on Kubernetes and on Ray: two hosts each, by a program without TensorFlow,
and by one of TensorFlow itself where `make test-tensorflow` has made its environment."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridged_hosts import bridged_hosts
from engine_runs import submitted
from kube_cluster import needs_kubernetes
from kube_site import Site, kube_site
from network_hosts import NamespaceHost
from ray_cluster import RayCluster, ray_cluster
from ssh_servers import SshServers, needs_ssh, ssh_servers

ROOT = Path(__file__).resolve().parents[2]
MEETING = ROOT / "tests/support/cluster_program.py"
LOOP = ROOT / "tests/compat/tensorflow/programs/multi_worker_loop.py"
TENSORFLOW = ROOT / ".venv-tensorflow/bin/python"
LIMIT_S = 400.0
FOR = ("--for", "tensorflow", "--hosts", "2", "--workers", "2")
HAS_TENSORFLOW = (TENSORFLOW.parents[1] / ".made").exists()

needs_tensorflow = pytest.mark.skipif(not HAS_TENSORFLOW, reason="needs TensorFlow: make test-tensorflow installs it")
pytestmark = pytest.mark.timeout(600)


def require_installed(package: str) -> None:
    """Skip the test where it is not; importing Ray would change this process's environment."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}: make test-engines installs it")


def copied(program: Path, folder: Path) -> Path:
    """The program in a folder of the run's own."""
    return Path(shutil.copy(program, folder / program.name))


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^(?:\[\S+\] )?epoch \d+ loss (\S+)", text, re.MULTILINE)]


def alone(folder: Path) -> list[float]:
    """The losses of TensorFlow's program in one process, without Paceline."""
    done = subprocess.run(
        [TENSORFLOW, LOOP], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    return losses(done.stdout)


def require_meeting(attempt: Path, *, addresses: str) -> None:
    """That the chief has met all others, and that their addresses are on both hosts."""
    said = (attempt / "worker_0/stdout.log").read_text()
    assert "chief0 met chief0 ps0 worker0 worker1" in said
    cluster = json.loads(re.search(r"has (\{.*\}); torch", said)[1])["cluster"]  # type: ignore[index]
    places = [place.rpartition(":")[0] for kind in cluster.values() for place in kind]
    assert len(places) == 4 and all(re.fullmatch(addresses, place) for place in places)
    assert len(set(places)) == 2 or addresses == SAME_HOST


SAME_HOST = r"127\.0\.0\.1|\d+\.\d+\.\d+\.\d+"  # pretended nodes of Ray have one address


@pytest.fixture
def ssh_hosts(tmp_path: Path) -> Iterator[tuple[NamespaceHost, SshServers]]:
    with (
        bridged_hosts(tmp_path, ["login", "a", "b"], subnet="10.95.0") as (login, *hosts),
        ssh_servers(tmp_path, hosts) as servers,
    ):
        yield login, servers


def on_ssh(servers: SshServers, python: str) -> list[str]:
    named = ["--on", "ssh", "--hosts", "a,b", "--set", f"engine.options={','.join(servers.options)}"]
    return [*FOR[:2], *named, "--set", f"engine.python={python}", *FOR[4:]]


@needs_ssh
def test_a_chief_meets_workers_and_servers_over_ssh(
    ssh_hosts: tuple[NamespaceHost, SshServers], tmp_path: Path
) -> None:
    login, servers = ssh_hosts
    options = [*on_ssh(servers, sys.executable), "--servers", "1"]
    with submitted(login, copied(MEETING, tmp_path), *options, run_dir=tmp_path / "r") as run:
        assert run.wait() == 0, run.output
        assert "tensorflow: chief, 2 workers, 1 server" in run.command("status").stdout
    require_meeting(tmp_path / "r/attempt_1", addresses=r"10\.95\.0\.[23]")


@needs_ssh
@needs_tensorflow
def test_workers_of_tensorflow_over_ssh_have_the_losses_of_one_process(
    ssh_hosts: tuple[NamespaceHost, SshServers], tmp_path: Path
) -> None:
    login, servers = ssh_hosts
    program = copied(LOOP, tmp_path)
    with submitted(login, program, *on_ssh(servers, str(TENSORFLOW)), run_dir=tmp_path / "r") as run:
        assert run.wait(LIMIT_S) == 0, run.output
    told = losses((tmp_path / "r/attempt_1/worker_0/stdout.log").read_text())
    assert told == pytest.approx(alone(tmp_path), rel=1e-4) and len(told) == 3


@pytest.fixture
def kubernetes(tmp_path: Path) -> Iterator[Site]:
    require_installed("kubernetes")
    with kube_site(tmp_path, subnet="10.101.0") as cluster:
        yield cluster


@needs_kubernetes
def test_a_chief_meets_workers_and_servers_on_kubernetes(kubernetes: Site, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    program = copied(MEETING, tmp_path / "work")
    with kubernetes.run(program, *FOR, "--servers", "1") as run:
        assert run.wait() == 0, run.output
        require_meeting(run.files / "attempt_1", addresses=r"10\.101\.0\.[234]")


@needs_kubernetes
@needs_tensorflow
def test_workers_of_tensorflow_on_kubernetes_have_the_losses_of_one_process(kubernetes: Site, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    program = copied(LOOP, tmp_path / "work")
    with kubernetes.run(program, *FOR, python=str(TENSORFLOW)) as run:
        assert run.wait(LIMIT_S) == 0, run.output
        told = losses((run.files / "attempt_1/worker_0/stdout.log").read_text())
    assert told == pytest.approx(alone(tmp_path), rel=1e-4) and len(told) == 3


@pytest.fixture
def ray_nodes() -> Iterator[RayCluster]:
    require_installed("ray")
    with ray_cluster(nodes=("n1", "n2")) as made:
        yield made


def run_on_ray(nodes: RayCluster, program: Path, python: str, *options: str) -> str:
    """Run it to its end; what the command has shown."""
    on = f"ray(address={nodes.address},python={python})"
    words = [sys.executable, "-m", "paceline", "run", str(program), "--on", on, *FOR, *options, "--run-dir", "r"]
    with (program.parent / "console").open("w+") as log:
        process = subprocess.Popen(
            words, cwd=program.parent, stdout=log, stderr=log, env=os.environ | {"RAY_AUTH_MODE": "disabled"}
        )
        try:
            code = process.wait(LIMIT_S)
        finally:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(60)
            process.kill()
            process.wait()
        shown = Path(log.name).read_text()
    assert code == 0, shown
    return shown


def test_a_chief_meets_workers_and_servers_on_ray(ray_nodes: RayCluster, tmp_path: Path) -> None:
    run_on_ray(ray_nodes, copied(MEETING, tmp_path), sys.executable, "--servers", "1")
    require_meeting(tmp_path / "r/attempt_1", addresses=SAME_HOST)


@needs_tensorflow
def test_workers_of_tensorflow_on_ray_have_the_losses_of_one_process(ray_nodes: RayCluster, tmp_path: Path) -> None:
    run_on_ray(ray_nodes, copied(LOOP, tmp_path), str(TENSORFLOW))
    told = losses((tmp_path / "r/attempt_1/worker_0/stdout.log").read_text())
    assert told == pytest.approx(alone(tmp_path), rel=1e-4) and len(told) == 3
