"""A Kubernetes cluster for tests: a real control plane, and nodes that run pods as processes, on hosts of their own.

The binaries (kube-apiserver, kube-controller-manager, kube-scheduler) are packed in the folder that PACELINE_KUBE
names, or in `../shared/kube` beside the checkout; they are unpacked once into the user's cache. etcd comes from Debian.
"""

from __future__ import annotations

import contextlib
import lzma
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from network_hosts import TOOLS, NamespaceHost, needs_network

__all__ = ["KubeCluster", "kube_cluster", "needs_kubernetes"]

Test = TypeVar("Test", bound=Callable[..., None])
PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
ROOT = Path(__file__).resolve().parent.parent.parent
UP_S, END_S = 60.0, 5.0
PORT = 26443
KUBECONFIG = """\
apiVersion: v1
kind: Config
clusters: [{{name: t, cluster: {{server: "https://{address}:{port}", certificate-authority: {folder}/api.crt}}}}]
users: [{{name: u, user: {{token: "{token}"}}}}]
contexts: [{{name: t, context: {{cluster: t, user: u}}}}]
current-context: t
"""


def packed() -> Path | None:
    """The folder with the binaries."""
    named = os.environ.get("PACELINE_KUBE")
    for folder in [Path(named)] if named else [ROOT.parent / "shared" / "kube", ROOT.parent.parent / "shared" / "kube"]:
        if all((folder / f"{name}.xz").is_file() for name in PROGRAMS):
            return folder
    return None


def needs_kubernetes(test: Test) -> Test:
    """Skip a test, with the reason, where there is no control plane."""
    missing = pytest.mark.skipif(
        packed() is None, reason="needs Kubernetes' binaries: name their folder in PACELINE_KUBE"
    )
    marked: Test = pytest.mark.needs("etcd", "openssl")(missing(test))
    return needs_network(marked)


class KubeCluster:
    """A control plane on one host, and nodes on others."""

    def __init__(self, folder: Path, control: NamespaceHost) -> None:
        self.folder, self.control = folder, control
        self.admin, self.user = folder / "admin.kubeconfig", folder / "user.kubeconfig"
        self._stack = contextlib.ExitStack()

    def daemon(self, host: NamespaceHost, name: str, *words: str) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                [*host.prefix, *words],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"PATH": TOOLS},
            )
        self._stack.callback(_end, process)
        return process

    def start_node(self, host: NamespaceHost) -> None:
        """Start a node, also one that was killed."""
        program = str(Path(__file__).with_name("kube_node.py"))
        self.daemon(
            host, host.name, sys.executable, program, str(self.admin), host.name, host.address, str(self.folder)
        )

    def ask(self, code: str) -> str:
        """Run a few lines of Python with the client (`core`, `batch`, `client`) on the control plane's host."""
        head = (
            "from kubernetes import client, config\n"
            f"config.load_kube_config({str(self.admin)!r})\n"
            "core, batch = client.CoreV1Api(), client.BatchV1Api()\n"
        )
        done = subprocess.run(
            [*self.control.prefix, sys.executable, "-c", head + code], capture_output=True, text=True, timeout=60
        )
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        return done.stdout

    def close(self) -> None:
        self._stack.close()


@contextlib.contextmanager
def kube_cluster(
    folder: Path, control: NamespaceHost, nodes: Sequence[NamespaceHost], *, volume: Path
) -> Iterator[KubeCluster]:
    """Start a control plane and nodes; `volume` is a directory that the claim `runs` stands for."""
    cluster = KubeCluster(folder, control)
    programs = _programs()
    _credentials(cluster)
    api = f"https://{control.address}:{PORT}"
    try:
        cluster.daemon(
            control,
            "etcd",
            shutil.which("etcd", path=TOOLS) or "etcd",
            *("--data-dir", "etcd.d", "--unsafe-no-fsync"),
            *("--listen-client-urls", "http://127.0.0.1:23790", "--advertise-client-urls", "http://127.0.0.1:23790"),
            *("--listen-peer-urls", "http://127.0.0.1:23800"),
            *("--initial-advertise-peer-urls", "http://127.0.0.1:23800"),
            *("--initial-cluster", "default=http://127.0.0.1:23800"),
        )
        cluster.daemon(
            control,
            "apiserver",
            str(programs / "kube-apiserver"),
            "--etcd-servers=http://127.0.0.1:23790",
            f"--bind-address={control.address}",
            f"--advertise-address={control.address}",
            f"--secure-port={PORT}",
            "--tls-cert-file=api.crt",
            "--tls-private-key-file=api.key",
            "--token-auth-file=tokens.csv",
            "--authorization-mode=Node,RBAC",
            "--service-account-key-file=sa.key",
            "--service-account-signing-key-file=sa.key",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-cluster-ip-range=10.120.0.0/24",
            "--disable-admission-plugins=ServiceAccount",
            "--anonymous-auth=false",
            f"--cert-dir={folder}",
            "--endpoint-reconciler-type=none",
            "--kubelet-preferred-address-types=InternalIP",
            "--default-not-ready-toleration-seconds=2",
            "--default-unreachable-toleration-seconds=2",
        )
        _until(cluster, "print(core.list_namespace().items[0].metadata.name)", "the API server answers")
        cluster.daemon(
            control,
            "controllers",
            str(programs / "kube-controller-manager"),
            "--kubeconfig=admin.kubeconfig",
            "--service-account-private-key-file=sa.key",
            "--leader-elect=false",
            f"--cert-dir={folder}",
            "--controllers=*,-nodeipam,-route,-service,-cloud-node-lifecycle,-attachdetach",
            "--node-monitor-grace-period=6s",
            "--node-monitor-period=1s",
            "--secure-port=0",
            "--port=0",
        )
        scheduler = [str(programs / "kube-scheduler"), "--kubeconfig=admin.kubeconfig", "--leader-elect=false"]
        cluster.daemon(control, "scheduler", *scheduler, "--secure-port=0", "--port=0")
        for node in nodes:
            cluster.start_node(node)
        ready = (
            "nodes = core.list_node().items\n"
            "up = [n for n in nodes for c in n.status.conditions or () if c.type == 'Ready' and c.status == 'True']\n"
            f"raise SystemExit(len(up) != {len(nodes)})"
        )
        _until(cluster, ready, f"{len(nodes)} nodes are ready at {api}")
        cluster.ask(
            f"""
claim = {{"storageClassName": "", "accessModes": ["ReadWriteMany"], "resources": {{"requests": {{"storage": "1Gi"}}}}}}
core.create_persistent_volume({{"metadata": {{"name": "runs"}}, "spec": {{"capacity": {{"storage": "1Gi"}},
    "accessModes": ["ReadWriteMany"], "storageClassName": "", "hostPath": {{"path": {str(volume)!r}}},
    "claimRef": {{"name": "runs", "namespace": "default"}}}}}})
core.create_namespaced_persistent_volume_claim("default", {{"metadata": {{"name": "runs"}},
    "spec": {{**claim, "volumeName": "runs"}}}})
"""
        )
        yield cluster
    finally:
        cluster.close()


def _programs() -> Path:
    """Unpack the binaries into the user's cache."""
    place = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "paceline-kube"
    source = packed()
    if source is None:
        raise RuntimeError("there are no binaries")
    place.mkdir(parents=True, exist_ok=True)
    for name in PROGRAMS:
        if not (place / name).exists():
            part = place / f"{name}.{os.getpid()}"
            with lzma.open(source / f"{name}.xz") as packed_file, part.open("wb") as file:
                shutil.copyfileobj(packed_file, file)
            part.chmod(0o755)
            part.replace(place / name)
    return place


def _credentials(cluster: KubeCluster) -> None:
    """Keys, a certificate, and the tokens of an administrator and of a user without any rights."""
    folder, address = cluster.folder, cluster.control.address
    subprocess.run(["openssl", "genrsa", "-out", "sa.key", "2048"], cwd=folder, check=True, capture_output=True)
    names = f"subjectAltName=IP:{address},IP:10.120.0.1,DNS:localhost"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "api.key", "-out", "api.crt"]
    made += ["-days", "2", "-subj", f"/CN={address}", "-addext", names]
    subprocess.run(made, cwd=folder, check=True, capture_output=True)
    tokens = {"admin": secrets.token_hex(16), "user": secrets.token_hex(16)}
    (folder / "tokens.csv").write_text(f'{tokens["admin"]},admin,1,system:masters\n{tokens["user"]},some-user,2,""\n')
    for name, token in tokens.items():
        text = KUBECONFIG.format(address=address, port=PORT, folder=folder, token=token)
        (folder / f"{name}.kubeconfig").write_text(text)


def _until(cluster: KubeCluster, code: str, what: str) -> None:
    deadline = time.monotonic() + UP_S
    while True:
        try:
            cluster.ask(code)
            return
        except RuntimeError as error:
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text()[-1500:] for path in cluster.folder.glob("*.log"))
                raise TimeoutError(f"not within {UP_S:.0f} s: {what}\n{error}\n{logs}") from error
            time.sleep(0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
