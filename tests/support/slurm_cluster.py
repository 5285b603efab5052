"""A Slurm cluster for tests: nodes on hosts of their own (`network_hosts`, `bridged_hosts`), and the daemons they need.

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
    """Nodes, up and idle."""

    def __init__(self, folder: Path, login: NamespaceHost) -> None:
        self.folder, self.configuration = folder, folder / "slurm.conf"
        self.login = login.prefix  # where commands are given
        self._stack = contextlib.ExitStack()

    def start_node(self, host: NamespaceHost) -> None:
        """Start the daemon of a node, also one that was killed."""
        (self.folder / f"spool.{host.name}").mkdir(exist_ok=True)
        node = [*host.prefix, "slurmd", "-D", "-N", host.name, "-f", str(self.configuration)]
        self._stack.enter_context(_daemon(node, self.folder))

    def close(self) -> None:
        self._stack.close()

    def ask(self, *words: str) -> str:
        """What one of Slurm's commands prints on the login host."""
        done = subprocess.run(
            [*self.login, *words],
            env=os.environ | self.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout + done.stderr

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
def slurm_cluster(
    folder: Path, hosts: Sequence[NamespaceHost], *, login: NamespaceHost | None = None, more: str = ""
) -> Iterator[Cluster]:
    """Start the cluster, wait until its nodes are idle, and end all of it. `login`: where the controller runs, and
    commands are given (the first node). `more`: lines of its configuration.
    """
    first = login or hosts[0]
    cluster = Cluster(folder, first)
    nodes = [f"NodeName={host.name} NodeAddr={host.address} Port=17001 CPUs=2 RealMemory=2000" for host in hosts]
    cluster.configuration.write_text(
        CONFIGURATION.format(folder=folder, controller=first.name, address=first.address, nodes="\n".join(nodes)) + more
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
    controller = [*first.prefix, "slurmctld", "-D", "-c", "-f", str(cluster.configuration)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_daemon(munged, folder))
        _until(lambda: (folder / "munge.sock").exists(), "munged listens", folder)
        stack.enter_context(_daemon(controller, folder))
        stack.callback(cluster.close)
        for host in hosts:
            cluster.start_node(host)
        _until(lambda: _idle(cluster) == len(hosts), "all nodes are idle", folder)
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
    return cluster.ask("sinfo", "--noheader", "--Node", "--partition=debug", "--format=%T").split().count("idle")


def _until(holds: Callable[[], bool], what: str, folder: Path) -> None:
    deadline = time.monotonic() + UP_S
    while not holds():
        if time.monotonic() > deadline:
            logs = "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in folder.glob("*.log"))
            raise TimeoutError(f"not within {UP_S:.0f} s: {what}\n{logs}")
        time.sleep(LOOK_S)  # daemons tell nobody when they are ready
