"""A node of the Kubernetes cluster of tests: it runs each pod that is bound to it as a process, and is its kubelet.

    python kube_node.py KUBECONFIG NAME ADDRESS FOLDER

Pods get their command, environment, folder, termination grace and exit codes; a name of their own as host; and the
addresses of headless Services in /etc/hosts, as there is no DNS. Logs and `exec` are served at the kubelet's port. The
pods' processes end with this one.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import datetime
import hashlib
import http.server
import importlib
import json
import os
import signal
import socketserver
import ssl
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any

# `make test-engines` installs it; its models say of every field that it may be missing.
client, config, watch = (importlib.import_module(f"kubernetes.{name}") for name in ("client", "config", "watch"))

KUBELET_PORT = 10250
BEAT_S, NAMES_S = 1.0, 0.2
GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # of RFC 6455
BECOME = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat()


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Node:
    """The node itself."""

    def __init__(self, name: str, address: str, folder: Path) -> None:
        self.name, self.address, self.folder = name, address, folder
        self.core = client.CoreV1Api()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}  # by the pod's uid
        self.hosts_file = folder / f"names.{name}"
        self.hosts_file.write_text("127.0.0.1 localhost\n")
        self.names: set[str] = set()  # of its pods
        self._seen: set[str] = set()
        self._ending: set[str] = set()

    def register(self) -> None:
        body = {"metadata": {"name": self.name, "labels": {"kubernetes.io/hostname": self.name}}}
        try:
            self.core.create_node(body)
        except client.ApiException as error:
            if error.status != 409:
                raise
        size = {"cpu": "4", "memory": "8Gi", "pods": "20", "ephemeral-storage": "10Gi"}
        self.beat({"capacity": size, "allocatable": size})

    def beat(self, more: dict[str, Any] | None = None) -> None:
        ready = {"type": "Ready", "status": "True", "reason": "Up", "message": "", "lastHeartbeatTime": now()}
        addresses = [{"type": "InternalIP", "address": self.address}, {"type": "Hostname", "address": self.name}]
        status = {
            "conditions": [ready],
            "addresses": addresses,
            "daemonEndpoints": {"kubeletEndpoint": {"Port": KUBELET_PORT}},
            **(more or {}),
        }
        self.core.patch_node_status(self.name, {"status": status})

    def keep_alive(self) -> None:
        while True:
            with contextlib.suppress(Exception):
                self.beat()
            time.sleep(BEAT_S)

    def keep_names(self) -> None:
        """Write the addresses of headless Services where the pods look for them."""
        while True:
            with contextlib.suppress(Exception):
                lines = ["127.0.0.1 localhost"]
                for service in self.core.list_service_for_all_namespaces().items:
                    if service.spec.cluster_ip == "None" and service.spec.selector:
                        wanted = ",".join(f"{name}={value}" for name, value in service.spec.selector.items())
                        pods = self.core.list_namespaced_pod(service.metadata.namespace, label_selector=wanted).items
                        there = [pod for pod in pods if pod.status.pod_ip and not pod.metadata.deletion_timestamp]
                        lines += [f"{pod.status.pod_ip} {service.metadata.name}" for pod in there[-1:]]
                lines += [f"{self.address} {name}" for name in sorted(self.names)]  # as kubelet enters a pod's own name
                text = "\n".join(lines) + "\n"
                if text != self.hosts_file.read_text():
                    with self.hosts_file.open("r+") as file:  # in place: pods have the file itself
                        file.truncate()
                        file.write(text)
            time.sleep(NAMES_S)

    def follow(self) -> None:
        """Run the pods that are bound to this node, and end those that are deleted."""
        while True:
            try:
                pods = watch.Watch().stream(
                    self.core.list_pod_for_all_namespaces,
                    field_selector=f"spec.nodeName={self.name}",
                    timeout_seconds=60,
                )
                for event in pods:
                    self.take(event["type"], event["object"])
            except Exception as error:
                print("watch:", type(error).__name__, error, flush=True)
                time.sleep(0.2)

    def take(self, kind: str, pod: Any) -> None:
        uid = pod.metadata.uid
        if kind == "DELETED":
            self.end_now(uid)
        elif pod.metadata.deletion_timestamp:
            if uid not in self._ending:
                self._ending.add(uid)
                threading.Thread(target=self.end, args=(pod,), daemon=True).start()
        elif uid not in self._seen:
            self._seen.add(uid)
            if pod.status.phase == "Pending":
                threading.Thread(target=self.run, args=(pod,), daemon=True).start()
            elif pod.status.phase == "Running":  # of before this node was lost
                self.say(pod, "Failed", {"terminated": {"exitCode": 137, "reason": "NodeLost"}})

    def environment(self, pod: Any) -> dict[str, str]:
        found = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/root"), "HOSTNAME": pod.metadata.name}
        for entry in pod.spec.containers[0].env or ():
            source = entry.value_from
            if source is None:
                found[entry.name] = entry.value or ""
            elif source.field_ref is not None:
                fields = {"status.podIP": self.address, "metadata.name": pod.metadata.name, "spec.nodeName": self.name}
                found[entry.name] = fields[source.field_ref.field_path]
            else:
                secret = self.core.read_namespaced_secret(source.secret_key_ref.name, pod.metadata.namespace)
                found[entry.name] = base64.b64decode(secret.data[source.secret_key_ref.key]).decode()
        return found

    def run(self, pod: Any) -> None:
        container, uid = pod.spec.containers[0], pod.metadata.uid
        deadline = time.monotonic() + 30
        while True:  # a Secret may come a moment later
            try:
                env = self.environment(pod)
                break
            except client.ApiException:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        self.names.add(pod.metadata.name)
        words = [*(container.command or ()), *(container.args or ())]
        for name, value in env.items():
            words = [word.replace(f"$({name})", value) for word in words]
        become = ["unshare", "--uts", "--mount", "sh", "-c", BECOME, pod.metadata.name, str(self.hosts_file), *words]
        with self.log(uid).open("ab") as log:
            process = subprocess.Popen(
                become,
                env=env,
                cwd=container.working_dir or self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        self.processes[uid] = process
        began = now()
        self.say(pod, "Running", {"running": {"startedAt": began}})
        code = process.wait()
        self.names.discard(pod.metadata.name)
        code = code if code >= 0 else 128 - code
        ended = {
            "exitCode": code,
            "reason": "Completed" if code == 0 else "Error",
            "startedAt": began,
            "finishedAt": now(),
        }
        self.say(pod, "Succeeded" if code == 0 else "Failed", {"terminated": ended})

    def log(self, uid: str) -> Path:
        return self.folder / f"{uid}.log"

    def say(self, pod: Any, phase: str, state: dict[str, Any]) -> None:
        container = pod.spec.containers[0]
        ready = "True" if phase == "Running" else "False"
        statuses = [
            {
                "name": container.name,
                "image": container.image,
                "imageID": "",
                "ready": phase == "Running",
                "restartCount": 0,
                "state": state,
            }
        ]
        conditions = [{"type": kind, "status": ready} for kind in ("Ready", "ContainersReady")]
        conditions += [{"type": kind, "status": "True"} for kind in ("Initialized", "PodScheduled")]
        status = {
            "phase": phase,
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
            "hostIP": self.address,
            "startTime": now(),
            "containerStatuses": statuses,
            "conditions": conditions,
        }
        with contextlib.suppress(client.ApiException):  # it was deleted
            self.core.patch_namespaced_pod_status(pod.metadata.name, pod.metadata.namespace, {"status": status})

    def end(self, pod: Any) -> None:
        """SIGTERM, the grace period, SIGKILL; then the pod goes."""
        process = self.processes.get(pod.metadata.uid)
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(pod.metadata.deletion_grace_period_seconds or 30)
            except subprocess.TimeoutExpired:
                self.end_now(pod.metadata.uid)
            time.sleep(0.2)  # its end is told first
        with contextlib.suppress(client.ApiException):
            self.core.delete_namespaced_pod(pod.metadata.name, pod.metadata.namespace, grace_period_seconds=0)

    def end_now(self, uid: str) -> None:
        process = self.processes.get(uid)
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def pod(self, namespace: str, name: str) -> Any:
        return self.core.read_namespaced_pod(name, namespace)


class Kubelet(http.server.BaseHTTPRequestHandler):
    """Serves logs and exec."""

    node: Node
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        path = urllib.parse.urlsplit(self.path)
        _, kind, namespace, pod, _ = path.path.split("/", 4)
        asked = urllib.parse.parse_qs(path.query)
        about = self.node.pod(namespace, pod)
        if kind == "containerLogs":
            self.logs(about, follows=asked.get("follow") == ["true"])
        elif kind == "exec":
            self.execute(about, asked["command"])
        self.close_connection = True

    do_POST = do_GET

    def logs(self, pod: Any, *, follows: bool) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        process = self.node.processes.get(pod.metadata.uid)
        with self.node.log(pod.metadata.uid).open("rb") as file:
            while True:
                is_over = process is None or process.poll() is not None
                while data := file.read(1 << 16):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                    self.wfile.flush()
                if is_over or not follows:
                    break
                time.sleep(0.05)
        self.wfile.write(b"0\r\n\r\n")

    def execute(self, pod: Any, words: list[str]) -> None:
        key = self.headers["Sec-WebSocket-Key"].encode()
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key + GUID).digest()).decode())
        self.send_header("Sec-WebSocket-Protocol", "v4.channel.k8s.io")
        self.end_headers()
        process = self.node.processes[pod.metadata.uid]
        enter = [
            "nsenter",
            f"--target={process.pid}",
            "--uts",
            "--mount",
            f"--wd={os.readlink(f'/proc/{process.pid}/cwd')}",
        ]
        done = subprocess.run(
            [*enter, *words], env=self.node.environment(pod), stdin=subprocess.DEVNULL, capture_output=True, timeout=60
        )
        for channel, data in ((1, done.stdout), (2, done.stderr)):
            for start in range(0, len(data), 1 << 15):
                self.frame(2, bytes([channel]) + data[start : start + (1 << 15)])
        causes = {"causes": [{"reason": "ExitCode", "message": str(done.returncode)}]}
        status: dict[str, Any] = {"status": "Success"}
        if done.returncode:
            status = {"status": "Failure", "reason": "NonZeroExitCode", "details": causes}
        self.frame(2, bytes([3]) + json.dumps(status).encode())
        self.frame(8, struct.pack(">H", 1000))

    def frame(self, kind: int, data: bytes) -> None:
        size = struct.pack(">BH", 126, len(data)) if len(data) > 125 else bytes([len(data)])
        self.wfile.write(bytes([0x80 | kind]) + size + data)
        self.wfile.flush()


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True


def main() -> None:
    kubeconfig, name, address, folder = sys.argv[1:]
    config.load_kube_config(kubeconfig)
    node = Node(name, address, Path(folder))
    Kubelet.node = node
    server = Server((address, KUBELET_PORT), Kubelet)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(f"{folder}/api.crt", f"{folder}/api.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    for serve in (server.serve_forever, node.keep_alive, node.keep_names):
        threading.Thread(target=serve, daemon=True).start()
    node.register()
    print("up", flush=True)
    node.follow()


if __name__ == "__main__":
    main()
