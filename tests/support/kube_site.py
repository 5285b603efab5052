"""A Kubernetes cluster of three nodes for tests of runs, and the runs that are given to it."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

from bridged_hosts import bridged_hosts
from engine_runs import Submitted, submitted, until
from kube_cluster import KubeCluster, kube_cluster
from network_hosts import NamespaceHost

__all__ = ["Site", "kube_site"]


@dataclasses.dataclass
class Site:
    """A cluster of three nodes, each with room for one pod of three cores."""

    cluster: KubeCluster
    control: NamespaceHost
    nodes: dict[str, NamespaceHost]
    volume: Path

    def options(self, program: Path, *, python: str = sys.executable) -> list[str]:
        settings = f"image=none,volume=runs,mount={self.volume},folder={program.parent},python={python},cpus=3"
        return ["--on", f"kubernetes({settings})", "--set", "engine.env=PYTHONPATH"]

    @contextlib.contextmanager
    def run(
        self, program: Path, *options: str, user: bool = False, python: str = sys.executable
    ) -> Iterator[Submitted]:
        config = self.cluster.user if user else self.cluster.admin
        name = f"{program.parent.name}-run"
        with submitted(
            self.control,
            program,
            *self.options(program, python=python),
            *options,
            run_dir=program.parent / name,
            files=self.volume / name,
            env={"KUBECONFIG": str(config)},
        ) as run:
            try:
                yield run
            finally:  # the run does not end with the command that follows it
                if (run.run_dir / "engine.json").exists():
                    run.command("stop")
                    until(lambda: not self.pods(), "its pods have ended", limit_s=60)

    def pods(self) -> dict[str, str]:
        """The node of each pod that runs."""
        code = """
for pod in core.list_namespaced_pod("default").items:
    if pod.status.phase == "Running" and not pod.metadata.deletion_timestamp:
        print(pod.metadata.name, pod.spec.node_name)
"""
        return dict(line.split() for line in self.cluster.ask(code).splitlines())


@contextlib.contextmanager
def kube_site(folder: Path, *, subnet: str) -> Iterator[Site]:
    """Start the cluster, with a volume in `folder`, and end it."""
    with contextlib.ExitStack() as stack:
        control, *nodes = stack.enter_context(bridged_hosts(folder, ["control", "n1", "n2", "n3"], subnet=subnet))
        volume = folder / "volume"
        volume.mkdir()
        cluster = stack.enter_context(kube_cluster(folder, control, nodes, volume=volume))
        yield Site(cluster, control, {node.name: node for node in nodes}, volume)
