"""Seconds from the command to the first step on an engine, beside the engine's own way to start the same torch program.

    python benchmarks/engine_start.py [--pairs 3] [--engines ssh,slurm,kubernetes,ray]

Two hosts with one worker each, as network namespaces of this machine, with real OpenSSH servers, a real Slurm, a real
control plane of Kubernetes (PACELINE_KUBE) whose nodes run pods as processes, and a Ray cluster of two nodes. The peers
are `torchrun` by two parallel `ssh`, by `srun` in a batch script, and in two plain Jobs; and Ray
Train. Needs root, OpenSSH's server, Slurm, etcd, and the packages of `make test-engines`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

from driving.options import options_of
from driving.ports import free_port
from driving.progress import doing

PROGRAMS = Path(__file__).resolve().parent / "programs"
SUPPORT = Path(__file__).resolve().parent.parent / "tests" / "support"
LIMIT_S = 180.0
TORCHRUN = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]

# Starts a job whose first step is noted in FOLDER/when.
Start: TypeAlias = Callable[[Path], list[subprocess.Popen[bytes]]]


def measured(start: Start) -> float:
    """Start one job, wait for its end, and return how long its first step took from the command on."""
    with tempfile.TemporaryDirectory(prefix="paceline-start-") as scratch:
        out = Path(scratch) / "when"
        began = time.time()
        for process in start(Path(scratch)):
            process.wait(LIMIT_S)
        deadline = time.monotonic() + LIMIT_S
        while not out.exists() or not out.read_text():
            if time.monotonic() > deadline:
                raise SystemExit(f"a job did not take its first step:\n{_logs(Path(scratch))}")
            time.sleep(0.05)
        noted = Path(scratch) / "began"
        return float(out.read_text()) - (float(noted.read_text()) if noted.exists() else began)


def _logs(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-2000:] for path in folder.rglob("*.log"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--engines", default="ssh,slurm,kubernetes,ray")
    asked = options_of(parser, takes="five minutes", quick={"pairs": 1, "engines": "ssh"})
    sys.path.insert(0, str(SUPPORT))
    from bridged_hosts import bridged_hosts

    with tempfile.TemporaryDirectory(prefix="paceline-engines-") as folder, ExitStack() as stack:
        names = ["login", "a", "b"]
        login, *hosts = stack.enter_context(bridged_hosts(Path(folder), names, subnet="10.90.0"))
        os.environ["OMP_NUM_THREADS"] = "1"
        for engine in asked.engines.split(","):
            make = {"ssh": _ssh, "slurm": _slurm, "kubernetes": _kubernetes, "ray": _ray}[engine]
            ours, theirs = make(Path(folder), login, hosts, stack)
            times: dict[str, list[float]] = {"Paceline": [], "peer": []}
            for number in range(asked.pairs):
                for name, start in (("Paceline", ours), ("peer", theirs)):
                    doing(f"{engine}, pair {number + 1} of {asked.pairs}: {name}")
                    times[name].append(measured(start))
            own, peer = statistics.median(times["Paceline"]), statistics.median(times["peer"])
            ratio = statistics.median(a / b for a, b in zip(times["Paceline"], times["peer"], strict=True))
            print(f"| {engine} | {own:.2f} | {peer:.2f} | **{ratio:.2f}x** |", flush=True)
    return 0


def _ssh(folder: Path, login, hosts, stack: ExitStack):
    from ssh_servers import ssh_servers

    servers = stack.enter_context(ssh_servers(folder, hosts))
    ssh = [*login.prefix, "ssh", "-o", "BatchMode=yes", *servers.options]

    def ours(scratch: Path) -> list[subprocess.Popen[bytes]]:
        words = ["run", str(PROGRAMS / "tiny_paceline.py"), "--on", "ssh", "--hosts", "a,b", "--workers", "2"]
        words += ["--set", f"engine.options={','.join(servers.options)}", "--set", "engine.env=OMP_NUM_THREADS"]
        words += ["--run-dir", f"{scratch}/run", "--", f"{scratch}/when"]
        return [_started([*login.prefix, sys.executable, "-m", "paceline", *words], scratch)]

    def theirs(scratch: Path) -> list[subprocess.Popen[bytes]]:
        port = str(free_port())
        found = list[subprocess.Popen[bytes]]()
        for rank, host in enumerate(hosts):
            words = [*TORCHRUN, "--node-rank", str(rank), "--master-addr", hosts[0].address, "--master-port", port]
            remote = ["env", "OMP_NUM_THREADS=1", sys.executable, *words, str(PROGRAMS / "tiny_ddp.py")]
            found.append(_started([*ssh, host.name, " ".join([*remote, f"{scratch}/when"])], scratch))
        return found

    return ours, theirs


def _slurm(folder: Path, login, hosts, stack: ExitStack):
    from slurm_cluster import slurm_cluster

    cluster = stack.enter_context(slurm_cluster(folder, hosts, login=login))
    os.environ.update(cluster.environment)

    def ours(scratch: Path) -> list[subprocess.Popen[bytes]]:
        words = ["run", str(PROGRAMS / "tiny_paceline.py"), "--on", "slurm", "--hosts", "2", "--workers", "2"]
        words += ["--run-dir", f"{scratch}/run", "--", f"{scratch}/when"]
        return [_started([*login.prefix, sys.executable, "-m", "paceline", *words], scratch)]

    def theirs(scratch: Path) -> list[subprocess.Popen[bytes]]:
        rendezvous = [
            "--rdzv-id",
            "1",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"{hosts[0].address}:{free_port()}",
        ]
        words = [sys.executable, *TORCHRUN, *rendezvous, str(PROGRAMS / "tiny_ddp.py"), f"{scratch}/when"]
        script = scratch / "job.sh"
        lines = ["#!/bin/bash", "#SBATCH --nodes=2 --ntasks-per-node=1", f"srun {' '.join(words)}"]
        script.write_text("\n".join(lines) + "\n")
        options = ["--wait", f"--output={scratch}/job.log", f"--chdir={scratch}"]
        return [_started([*login.prefix, "sbatch", *options, str(script)], scratch)]

    return ours, theirs


def _kubernetes(folder: Path, login, hosts, stack: ExitStack):
    from kube_cluster import kube_cluster

    volume = folder / "volume"
    volume.mkdir()
    cluster = stack.enter_context(kube_cluster(folder, login, hosts, volume=volume))
    os.environ["KUBECONFIG"] = str(cluster.admin)
    settings = f"image=none,volume=runs,mount={volume},folder={PROGRAMS},python={sys.executable}"

    def ours(scratch: Path) -> list[subprocess.Popen[bytes]]:
        words = ["run", str(PROGRAMS / "tiny_paceline.py"), "--on", f"kubernetes({settings})"]
        words += ["--set", "engine.env=OMP_NUM_THREADS,PYTHONPATH", "--hosts", "2", "--workers", "2"]
        words += ["--run-dir", f"{scratch}/run", "--", f"{scratch}/when"]
        return [_started([*login.prefix, sys.executable, "-m", "paceline", *words], scratch)]

    def theirs(scratch: Path) -> list[subprocess.Popen[bytes]]:
        number = str(free_port())
        rendezvous = ["--master-addr", f"peer-{number}", "--master-port", number]
        jobs = list[dict[str, Any]]()
        for rank in range(2):
            container = {
                "name": "torchrun",
                "image": "none",
                "command": [sys.executable, *TORCHRUN, "--node-rank", str(rank), *rendezvous],
                "args": [str(PROGRAMS / "tiny_ddp.py"), f"{scratch}/when"],
                # In a real pod its own name is known, and gloo needs no word on where to listen.
                "env": [
                    {"name": "OMP_NUM_THREADS", "value": "1"},
                    {"name": "GLOO_SOCKET_IFNAME", "value": hosts[0].device},
                ],
                "resources": {"requests": {"cpu": "1"}},
            }
            pod: dict[str, Any] = {"metadata": {"labels": {"peer": f"{number}-{rank}"}}}
            pod["spec"] = {"restartPolicy": "Never", "containers": [container]}
            jobs.append({"metadata": {"name": f"peer-{number}-{rank}"}, "spec": {"template": pod}})
        spec = {"clusterIP": "None", "selector": {"peer": f"{number}-0"}, "ports": [{"port": int(number)}]}
        service = {"metadata": {"name": f"peer-{number}"}, "spec": spec}
        program = scratch / "create.py"
        text = CREATE.format(config=str(cluster.admin), service=json.dumps(service), jobs=json.dumps(jobs))
        program.write_text(text.replace("BEGAN", f"{scratch}/began"))
        return [_started([*login.prefix, sys.executable, str(program)], scratch)]

    return ours, theirs


# Creates the peer's objects. What it takes to load the client is not the peer's: `kubectl` loads in no time.
CREATE = """
import json, time
from kubernetes import client, config
config.load_kube_config({config!r})
core, batch = client.CoreV1Api(), client.BatchV1Api()
open("BEGAN", "w").write(str(time.time()))
core.create_namespaced_service("default", json.loads({service!r}))
jobs = json.loads({jobs!r})
for job in jobs:
    batch.create_namespaced_job("default", job)
names = [job["metadata"]["name"] for job in jobs]
while not all(batch.read_namespaced_job(name, "default").status.succeeded for name in names):
    time.sleep(0.2)  # as `kubectl wait` does
"""


def _ray(folder: Path, login, hosts, stack: ExitStack):
    from ray_cluster import ray_cluster

    cluster = stack.enter_context(ray_cluster(nodes=("n1", "n2")))

    def ours(scratch: Path) -> list[subprocess.Popen[bytes]]:
        words = ["run", str(PROGRAMS / "tiny_paceline.py"), "--on", f"ray(address={cluster.address})"]
        words += ["--set", "engine.env=OMP_NUM_THREADS", "--hosts", "2", "--workers", "2"]
        words += ["--run-dir", f"{scratch}/run", "--", f"{scratch}/when"]
        return [_started([sys.executable, "-m", "paceline", *words], scratch)]

    def theirs(scratch: Path) -> list[subprocess.Popen[bytes]]:
        words = [str(PROGRAMS / "tiny_ray.py"), cluster.address, f"{scratch}/when"]
        return [_started([sys.executable, *words], scratch)]

    return ours, theirs


def _started(words: list[str], scratch: Path) -> subprocess.Popen[bytes]:
    with (scratch / "output.log").open("ab") as log:
        return subprocess.Popen(words, cwd=scratch, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


if __name__ == "__main__":
    sys.exit(main())
