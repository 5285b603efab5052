"""Loss of a whole node in mid-training, which the engine then replaces, beside torchrun or Ray Train on that engine.

    python benchmarks/node_loss.py [--losses 3] [--engines ssh,slurm,kubernetes,ray]

Two workers on two nodes do the work of `recovery.py` (a step takes some 20 ms here), and note each committed step.
kill -9 hits all that runs on one of the nodes, and another node (or the same one, over SSH) is there in its place after
a second. Under Slurm a third node is there from the beginning: it looks for the jobs of a node that is back only once a
minute. The nodes are network namespaces of this machine with real daemons of Slurm or OpenSSH, or run pods of a real
control plane of Kubernetes (PACELINE_KUBE) as processes; Ray's are those of its cluster_utils. Beside Paceline, in
turn: torchrun with `--nnodes 1:2` and a checkpoint every 5 steps, given to the engine as its users do it, and Ray
Train with FailureConfig. torchrun loses the node without its rendezvous; Paceline also loses the coordinator's. Needs
root, OpenSSH's server, Slurm, etcd, and the packages of `make test-engines`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from driving.options import options_of
from driving.ports import free_port
from driving.progress import doing
from driving.step_logs import Line, Logs, median_step

PROGRAMS = Path(__file__).resolve().parent / "programs"
SUPPORT = Path(__file__).resolve().parent.parent / "tests" / "support"
LIMIT_S = 300.0  # Slurm takes minutes to start a requeued job
CALM_STEPS = 20
STEPS = str(10**6)
WIDTH, RATE = "256", "0.01"
PLAN = "replicas=1-2+batch(size=128,micro=16)"
TORCHRUN = ["-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "1000"]
TORCHRUN += ["--rdzv-id", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint"]
LOOK_S = 0.002
RESOURCES = "--static_resource_list="  # an option of the raylet


@dataclasses.dataclass(kw_only=True)
class Site:
    """An engine with two nodes at work and one to spare."""

    ours: Callable[[Path], list[str]]
    theirs: Callable[[Path], list[str]]
    lose: Callable[[int], None]  # the node on which this process runs
    replace: Callable[[], None]
    peer: str = "torchrun"
    returns_s: float = 1.0  # until there is another node
    is_first: Callable[[int], bool] | None = None  # a process on the node with the peer's rendezvous; None: has none


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """Seconds from the kill on."""

    next_s: float
    progress_s: float
    replaced_s: float
    repeated: int


class RunEnded(Exception):
    """A run that was to be measured has ended, or takes too long; with its last words."""


def incident(command: list[str], folder: Path, site: Site, *, rank: int | None) -> tuple[float, Loss]:
    """Run a program, take a worker's node away, and see what that costs. Without `rank`: that of a worker which is not
    on the first node."""
    logs = Logs(folder)
    with running(command, folder) as process:

        def wait_for(holds: Callable[[], bool], what: str) -> None:
            deadline = time.monotonic() + LIMIT_S
            while not holds():
                logs.poll()
                if process.poll() is not None or time.monotonic() > deadline:
                    text = "\n".join(path.read_text(errors="replace")[-2500:] for path in folder.rglob("*output*"))
                    raise RunEnded(f"waiting for {what}: the run has ended, or takes too long\n{command}\n{text}")
                time.sleep(LOOK_S)  # files tell nobody when they grow

        wait_for(lambda: logs.top() >= CALM_STEPS and len(logs.pids()) == 2, "both workers")
        calm = len(logs.lines)
        wait_for(lambda: len(logs.lines) >= calm + 2 * CALM_STEPS, "calm")
        pids, is_first = logs.pids(), site.is_first
        if rank is not None or is_first is None:
            victim = pids[rank or 0]
        else:
            victim = next(pid for pid in pids.values() if not is_first(pid))
        step_s, place = median_step(logs.lines), len(logs.lines)
        when = time.time()
        site.lose(victim)
        returns = time.monotonic() + site.returns_s
        logs.poll()
        old = {line.pid for line in logs.lines[:place]}
        top = max(line.step for line in logs.lines if line.time <= when)

        def after() -> list[Line]:
            return [line for line in logs.lines[place:] if line.time > when and line.pid != victim]

        is_back = False

        def is_over() -> bool:
            nonlocal is_back
            if not is_back and time.monotonic() > returns:
                site.replace()
                is_back = True
            found = after()
            fresh = {line.pid for line in found if line.pid not in old}
            return (
                any(line.step > top for line in found) and bool(fresh) and len({line.rank for line in found[-40:]}) == 2
            )

        try:
            wait_for(is_over, "the successor")
        finally:
            if not is_back:
                site.replace()
        before = {(line.rank, line.step) for line in logs.lines if line.time <= when}
        done = [line for line in after() if line.step > top or (line.rank, line.step) in before]
        return step_s, Loss(
            next_s=done[0].time - when,
            progress_s=next(line for line in done if line.step > top).time - when,
            replaced_s=next(line for line in after() if line.pid not in old).time - when,
            repeated=len({line.step for line in done if line.step <= top}),
        )


@contextlib.contextmanager
def running(command: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a session of its own, ended afterwards."""
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, start_new_session=True)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", type=int, default=3)
    parser.add_argument("--engines", default="ssh,slurm,kubernetes,ray")
    asked = options_of(parser, takes="an hour", quick={"losses": 1, "engines": "ssh"})
    sys.path.insert(0, str(SUPPORT))
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("PYTHONPATH", os.pathsep.join(sys.path[:1]))
    os.environ["RAY_AUTH_MODE"] = "disabled"
    print("| engine | what | step, s | next step, s | new progress, s | successor's first step, s | steps repeated |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for engine in asked.engines.split(","):
        with contextlib.ExitStack() as stack:
            site = {"ssh": _ssh, "slurm": _slurm, "kubernetes": _kubernetes, "ray": _ray}[engine](stack)
            rows = {
                "Paceline": (site.ours, 1),
                "Paceline, the coordinator's node": (site.ours, 0),
                site.peer: (site.theirs, 1 if site.is_first is None else None),
            }
            found: dict[str, list[tuple[float, Loss]]] = {name: [] for name in rows}
            for number in range(asked.losses):
                for name, (command, rank) in rows.items():
                    doing(f"{engine}, loss {number + 1} of {asked.losses}: {name}")
                    with tempfile.TemporaryDirectory(prefix="paceline-loss-", ignore_cleanup_errors=True) as folder:
                        try:
                            found[name].append(incident(command(Path(folder)), Path(folder), site, rank=rank))
                        except RunEnded as end:  # what the others have shown is not to be lost
                            print(end, file=sys.stderr)
            for name in rows:
                print(row(engine, name, found[name]) if found[name] else f"| {engine} | {name} | its run ended |||||")
    return 0


def row(engine: str, name: str, found: list[tuple[float, Loss]]) -> str:
    middle = {
        field: statistics.median(getattr(loss, field) for _, loss in found)
        for field in ("next_s", "progress_s", "replaced_s", "repeated")
    }
    step_s = statistics.median(each for each, _ in found)
    return (
        f"| {engine} | {name} | {step_s:.3f} | {middle['next_s']:.2f} | {middle['progress_s']:.2f} "
        f"| {middle['replaced_s']:.2f} | {middle['repeated']:.0f} |"
    )


def _paceline(folder: Path, on: str, *options: str, hosts: str = "2") -> list[str]:
    words = [sys.executable, "-m", "paceline", "run", str(PROGRAMS / "recover_paceline.py"), "--on", on]
    words += ["--hosts", hosts, "--workers", "2", "--plan", PLAN, "--no-tensorboard", "--no-save-at-end"]
    return [*words, *options, "--run-dir", f"{folder}/run", "--", str(folder), WIDTH, RATE]


def _stopped_afterwards(folder: Path, command: list[str]) -> list[str]:
    """The command, and `paceline stop` when it gets SIGTERM: the run does not end with the command that follows it."""
    script = folder / "ours.sh"
    stop = f"{sys.executable} -m paceline stop {folder}/run"
    script.write_text(f"trap '{stop}; exit 1' TERM\n{shlex.join(command)} & wait\n")
    return ["bash", str(script)]


def _torchrun(folder: Path, endpoint: str) -> list[str]:
    return [sys.executable, *TORCHRUN, endpoint, str(PROGRAMS / "recover_torchrun.py"), str(folder), WIDTH, RATE, STEPS]


def _hosts(stack: contextlib.ExitStack):
    """A folder, the host where commands are given, and three nodes; what takes away the node of a process."""
    from bridged_hosts import bridged_hosts, end_host, processes_on

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-nodes-")))
    login, *nodes = stack.enter_context(bridged_hosts(folder, ["login", "n1", "n2", "n3"], subnet="10.91.0"))
    lost = []

    def lose(pid: int) -> None:
        node = next(node for node in nodes if pid in processes_on(node))
        end_host(node)
        lost.append(node)

    def is_first(pid: int) -> bool:
        return pid in processes_on(nodes[0])

    return folder, login, nodes, lost, lose, is_first


def _ssh(stack: contextlib.ExitStack) -> Site:
    from ssh_servers import ssh_servers

    folder, login, nodes, lost, lose, is_first = _hosts(stack)
    servers = stack.enter_context(ssh_servers(folder, nodes[:2]))
    ssh = [*login.prefix, "ssh", "-o", "BatchMode=yes", *servers.options]

    def ours(scratch: Path) -> list[str]:
        options = ["--set", f"engine.options={','.join(servers.options)}", "--set", "engine.env=OMP_NUM_THREADS"]
        return [*login.prefix, *_paceline(scratch, "ssh", *options, hosts="n1,n2")]

    def theirs(scratch: Path) -> list[str]:
        inner = " ".join(["env", "OMP_NUM_THREADS=1", *_torchrun(scratch, f"{nodes[0].address}:{free_port()}")])
        script = scratch / "start.sh"
        each = [
            f"(while :; do {shlex.join(ssh)} -n {node.name} {shlex.quote(inner)}; sleep 1; done) &"
            for node in nodes[:2]
        ]
        script.write_text("\n".join(["trap 'kill 0' TERM", *each, "wait"]) + "\n")
        return ["bash", str(script)]

    return Site(ours=ours, theirs=theirs, lose=lose, replace=lambda: servers.start(lost.pop()), is_first=is_first)


def _slurm(stack: contextlib.ExitStack) -> Site:
    from slurm_cluster import slurm_cluster

    folder, login, nodes, lost, lose, is_first = _hosts(stack)
    cluster = stack.enter_context(slurm_cluster(folder, nodes, login=login))
    os.environ.update(cluster.environment)

    def ours(scratch: Path) -> list[str]:
        return [*login.prefix, *_stopped_afterwards(scratch, _paceline(scratch, "slurm(cpus=2)"))]

    def theirs(scratch: Path) -> list[str]:
        command = " ".join(_torchrun(scratch, f"$(scontrol show hostnames | head -n 1):{free_port()}"))
        script = scratch / "job.sh"
        lines = ["#!/bin/bash", "#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=2 --requeue"]
        script.write_text("\n".join([*lines, f"srun {command}"]) + "\n")
        wait = scratch / "wait.sh"  # its end is the job's
        options = f"--wait --open-mode=append --output={scratch}/output.job --chdir={scratch} --job-name=peer"
        lines = [f"trap 'scancel --name=peer; exit 1' TERM; sbatch {options} {script} & wait"]
        wait.write_text("\n".join(lines) + "\n")
        return [*login.prefix, "bash", str(wait)]

    return Site(
        ours=ours,
        theirs=theirs,
        lose=lose,
        replace=lambda: cluster.start_node(lost.pop()),
        returns_s=LIMIT_S,
        is_first=is_first,
    )


def _kubernetes(stack: contextlib.ExitStack) -> Site:
    from kube_cluster import kube_cluster

    folder, login, nodes, lost, lose, is_first = _hosts(stack)
    volume = folder / "volume"
    volume.mkdir()
    cluster = stack.enter_context(kube_cluster(folder, login, nodes, volume=volume))
    os.environ["KUBECONFIG"] = str(cluster.admin)

    def ours(scratch: Path) -> list[str]:
        settings = f"image=none,volume=runs,mount={volume},folder={PROGRAMS},python={sys.executable},cpus=3"
        command = _paceline(scratch, f"kubernetes({settings})", "--set", "engine.env=OMP_NUM_THREADS,PYTHONPATH")
        return [*login.prefix, *_stopped_afterwards(scratch, command)]

    def theirs(scratch: Path) -> list[str]:
        number = str(free_port())
        program = scratch / "create.py"
        jobs = []
        for name in ("first", "second"):
            container = {
                "name": "torchrun",
                "image": "none",
                "command": _torchrun(scratch, f"peer-{number}:{number}"),
                "env": [
                    {"name": "OMP_NUM_THREADS", "value": "1"},
                    {"name": "GLOO_SOCKET_IFNAME", "value": nodes[0].device},
                ],
                "resources": {"requests": {"cpu": "3"}},
            }
            pod: dict[str, Any] = {"metadata": {"labels": {"peer": f"{number}-{name}"}}}
            pod["spec"] = {"restartPolicy": "Never", "containers": [container]}
            if name == "first":
                pod["spec"]["nodeSelector"] = {"kubernetes.io/hostname": nodes[0].name}
            jobs.append({"metadata": {"name": f"peer-{number}-{name}"}, "spec": {"template": pod, "backoffLimit": 100}})
        spec = {"clusterIP": "None", "selector": {"peer": f"{number}-first"}, "ports": [{"port": int(number)}]}
        service = {"metadata": {"name": f"peer-{number}"}, "spec": spec}
        program.write_text(PEER.format(config=str(cluster.admin), service=json.dumps(service), jobs=json.dumps(jobs)))
        return [*login.prefix, sys.executable, str(program)]

    return Site(ours=ours, theirs=theirs, lose=lose, replace=lambda: cluster.start_node(lost.pop()), is_first=is_first)


PEER = """
import json, signal, sys, time
from kubernetes import client, config
config.load_kube_config({config!r})
core, batch = client.CoreV1Api(), client.BatchV1Api()
service, jobs = json.loads({service!r}), json.loads({jobs!r})
def end(*_):
    for job in jobs:
        name, how = job["metadata"]["name"], {{"propagation_policy": "Foreground", "grace_period_seconds": 0}}
        batch.delete_namespaced_job(name, "default", **how)
    core.delete_namespaced_service(service["metadata"]["name"], "default")
    while any(pod.metadata.name.startswith("peer-") for pod in core.list_namespaced_pod("default").items):
        time.sleep(0.2)  # as `kubectl delete` waits
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
core.create_namespaced_service("default", service)
for job in jobs:
    batch.create_namespaced_job("default", job)
while True:
    time.sleep(1)  # until SIGTERM
"""


def _ray(stack: contextlib.ExitStack) -> Site:
    """Each run has a cluster of its own, with the same names of nodes."""
    from ray_cluster import RayCluster, ray_cluster

    present = stack.enter_context(contextlib.ExitStack())  # the cluster of one run
    nodes = list[str]()
    clusters = list[RayCluster]()

    def address() -> str:
        present.close()
        nodes[:] = ["n1", "n2"]
        clusters[:] = [present.enter_context(ray_cluster(nodes=nodes))]
        return clusters[0].address

    def lose(pid: int) -> None:
        node, processes = _ray_node(pid, nodes)
        nodes.remove(node)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        clusters[0].ask("remove", node)

    def replace() -> None:
        nodes.append("n3")
        clusters[0].ask("add", "n3")

    def ours(scratch: Path) -> list[str]:
        settings = ["--set", "engine.cpus=3", "--set", "engine.env=OMP_NUM_THREADS"]
        return _paceline(scratch, f"ray(address={address()})", *settings)

    def theirs(scratch: Path) -> list[str]:
        words = [str(PROGRAMS / "recover_ray.py"), str(scratch), WIDTH, RATE, STEPS, "2", address()]
        return [sys.executable, *words]

    return Site(ours=ours, theirs=theirs, lose=lose, replace=replace, peer="Ray Train")


def _ray_node(pid: int, nodes: list[str]) -> tuple[str, list[psutil.Process]]:
    """The node of a process, and all its processes: they descend from a raylet that has the node's name as resource."""
    for parent in psutil.Process(pid).parents():
        words = parent.cmdline()
        resources = {name for word in words if word.startswith(RESOURCES) for name in word.partition("=")[2].split(",")}
        if found := resources & set(nodes):
            return found.pop(), [parent, *parent.children(recursive=True)]
    raise LookupError(f"process {pid} is on none of {nodes}")


if __name__ == "__main__":
    sys.exit(main())
