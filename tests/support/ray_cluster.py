"""A Ray cluster for tests: pretended nodes on this machine, which can be lost."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["RayCluster", "ray_cluster"]

# Runs in a process of its own, so that no daemon of Ray's is this process's child.
CLUSTER = """
import json, sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = {}
for line in sys.stdin:
    what, name = line.split()
    if what == "add":
        nodes[name] = cluster.add_node(num_cpus=4, resources={name: 1})
    if what == "remove":
        cluster.remove_node(nodes.pop(name), allow_graceful=False)
    print(cluster.address, flush=True)
cluster.shutdown()
"""


@dataclasses.dataclass
class RayCluster:
    """A head, which runs no work, and nodes of four CPUs."""

    process: subprocess.Popen[str]
    errors: Path  # what it writes to its standard error
    address: str = ""

    def ask(self, what: str, name: str) -> None:
        """Add or remove a node; raises RuntimeError where the cluster has ended, as it does on a busy machine."""
        if self.process.stdin is None or self.process.stdout is None:
            raise RuntimeError("it has no pipes")
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{what} {name}\n")
            self.process.stdin.flush()
        self.address = self.process.stdout.readline().strip()
        if not self.address:
            raise RuntimeError(f"the Ray cluster has ended:\n{self.errors.read_text()[-4000:]}")


@contextlib.contextmanager
def ray_cluster(*, nodes: Sequence[str]) -> Iterator[RayCluster]:
    """Start a cluster with nodes of these names, each of which is a resource, too."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # short: sockets with long names lie below it
    environment = os.environ | {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled"}
    errors = Path(folder) / "stderr.log"
    with errors.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        )
    made = RayCluster(process, errors)
    try:
        for name in nodes:
            made.ask("add", name)
        yield made
    finally:
        with contextlib.suppress(OSError, ValueError):
            process.communicate(timeout=60)
        if process.poll() is None:
            process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)
