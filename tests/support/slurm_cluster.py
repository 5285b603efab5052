"""A Slurm cluster for tests: two nodes, each on a host of its own (`network.two_hosts`), and the daemons they need.

Everything is below one folder and belongs to root; nothing of the machine's own Slurm or munge is touched. The daemons
run in the foreground, as children, and end with the cluster.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from network_hosts import TOOLS, NamespaceHost, needs_network

__all__ = ["Cluster", "needs_slurm", "slurm_cluster"]

Test = TypeVar("Test", bound=Callable[..., None])
UP_S = 90.0  # from starting the daemons until both nodes are idle
END_S = 2.0  # from SIGTERM to SIGKILL: slurmd does not always heed the first
LOOK_S = 0.05

CONFIGURATION = """\
ClusterName=paceline
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
SlurmctldPort=16817
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=15
KillWait=2
SchedulerParameters=sched_interval=1,sched_min_interval=1,bf_interval=1,batch_sched_delay=0
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """Two nodes, up and idle."""

    def __init__(self, folder: Path, hosts: Sequence[NamespaceHost]) -> None:
        self.configuration = folder / "slurm.conf"
        self.login = hosts[0].prefix  # where commands are given

    def srun(self, *options: str) -> list[str]:
        """The words of an srun command, given on the first node."""
        return [*self.login, "srun", "--immediate=60", *options]

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.configuration), "PATH": TOOLS}


def needs_slurm(test: Test) -> Test:
    """Skip a test, with the reason, where there is no Slurm."""
    marked: Test = pytest.mark.needs("slurmctld", "slurmd", "srun", "munged")(test)
    return needs_network(marked)


@contextlib.contextmanager
def slurm_cluster(folder: Path, hosts: Sequence[NamespaceHost]) -> Iterator[Cluster]:
    """Start the cluster, wait until its nodes are idle, and end all of it."""
    cluster = Cluster(folder, hosts)
    nodes = [f"NodeName={host.name} NodeAddr={host.address} Port=17001 CPUs=2 RealMemory=2000" for host in hosts]
    cluster.configuration.write_text(
        CONFIGURATION.format(folder=folder, controller=hosts[0].name, address=hosts[0].address, nodes="\n".join(nodes))
    )
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    (folder / "state").mkdir()
    munged = ["munged", "--force", "--foreground", f"--key-file={key}", f"--socket={folder}/munge.sock"]
    munged += [
        f"--pid-file={folder}/munged.pid",
        f"--log-file={folder}/munged.log",
        f"--seed-file={folder}/munged.seed",
    ]
    first, _ = hosts
    controller = [*first.prefix, "slurmctld", "-D", "-c", "-f", str(cluster.configuration)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_daemon(munged, folder))
        _until(lambda: (folder / "munge.sock").exists(), "munged listens", folder)
        stack.enter_context(_daemon(controller, folder))
        for host in hosts:
            (folder / f"spool.{host.name}").mkdir()
            node = [*host.prefix, "slurmd", "-D", "-N", host.name, "-f", str(cluster.configuration)]
            stack.enter_context(_daemon(node, folder))
        _until(lambda: _idle(cluster) == len(hosts), "both nodes are idle", folder)
        yield cluster


@contextlib.contextmanager
def _daemon(words: Sequence[str], folder: Path) -> Iterator[None]:
    with open(folder / "daemons.log", "ab") as log:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | {"PATH": TOOLS}
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _idle(cluster: Cluster) -> int:
    asked = subprocess.run(
        [*cluster.login, "sinfo", "--noheader", "--Node", "--format=%T"],
        env=os.environ | cluster.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return asked.stdout.split().count("idle")


def _until(holds: Callable[[], bool], what: str, folder: Path) -> None:
    deadline = time.monotonic() + UP_S
    while not holds():
        if time.monotonic() > deadline:
            logs = "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in folder.glob("*.log"))
            raise TimeoutError(f"not within {UP_S:.0f} s: {what}\n{logs}")
        time.sleep(LOOK_S)  # daemons tell nobody when they are ready
