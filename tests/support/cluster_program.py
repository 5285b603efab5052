"""A program as TensorFlow starts them, without TensorFlow: it finds its place in TF_CONFIG, listens at its own address,
meets the other tasks there, and does what its arguments tell its task.

Arguments are words "TASK:BEHAVIOUR", with TASK as "worker1", "chief0", "ps0", or "*". A task without one ends well when
it has met the others; beside a chief all others serve for ever. Started without TF_CONFIG it is "alone0".
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

LIMIT_S = 60.0
asked_by: list[socket.socket] = []  # connections of those that have asked for this task's name


class UnavailableError(Exception):
    """What TensorFlow raises where another task has gone."""


UnavailableError.__module__ = "tensorflow.python.framework.errors_impl"


def main() -> None:
    config: dict[str, Any] = json.loads(os.environ.get("TF_CONFIG", "{}"))
    cluster, own = config.get("cluster", {}), config.get("task", {"type": "alone", "index": 0})
    name = f"{own['type']}{own['index']}"
    print(f"{name} has {os.environ.get('TF_CONFIG')}; torch {'torch' in sys.modules}; argv {sys.argv[1:]}", flush=True)
    if cluster:
        listen(cluster[own["type"]][own["index"]], name)
    words = dict(word.split(":", 1) for word in sys.argv[1:] if ":" in word)
    behaviour = words.get(name, words.get("*", "serve" if "chief" in cluster and own["type"] != "chief" else "end"))
    if behaviour != "serve":
        others = [(kind, place) for kind, places in cluster.items() for place in places]
        print(f"{name} met {' '.join(sorted(ask(place) for _, place in others))}", flush=True)
    behave(behaviour, name, cluster)
    wait_until_asked(0 if "chief" in cluster else len(cluster.get("worker", ())))


def behave(behaviour: str, name: str, cluster: dict[str, list[str]]) -> None:
    kind, _, detail = behaviour.partition("=")
    match kind:
        case "end":
            return
        case "serve":
            wait_for_ever()
        case "raise":  # when all have met this task: who still meets it would have an error of its own
            wait_until_asked(0 if "chief" in cluster else len(cluster.get("worker", ())))
            raise ValueError(detail or f"{name} has had enough")
        case "exit":
            sys.exit(int(detail))
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "kill-once":  # the next start ends well
            mark = Path(detail)
            if mark.exists():
                return
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        case "until":  # a file is there
            while not Path(detail).exists():
                time.sleep(0.02)
        case "scalars":  # for TensorBoard, into this folder, and wait until "FOLDER.read" is there
            write_scalars(Path(detail))
        case "echo":  # until worker 0 has gone, which TensorFlow tells by an error of its own
            with contextlib.suppress(OSError), connected(cluster["worker"][0]) as sock:
                sock.recv(100)
                sock.recv(1)
            raise UnavailableError("Collective ops is aborted by: Connection reset by peer")
        case "linger":  # as `echo`, and the process does not come to its end
            threading.Thread(target=time.sleep, args=(LIMIT_S,)).start()
            raise ValueError("it lingers")
        case "save":  # at SIGTERM
            Path(detail).with_suffix(".ready").touch()
            signal.signal(signal.SIGTERM, lambda *_: (Path(detail).touch(), sys.exit(42)))
            wait_for_ever()
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            Path(detail).touch()
            wait_for_ever()
        case _:
            raise ValueError(f"unknown behaviour {behaviour!r}")


def write_scalars(folder: Path) -> None:
    """Three losses, as TensorFlow 1 writes them, in a file that stays open."""
    from tensorboard.compat.proto import event_pb2
    from tensorboard.summary.writer.record_writer import RecordWriter

    messages: Any = event_pb2  # its classes are made at run time
    folder.mkdir()
    writer = RecordWriter((folder / "events.out.tfevents.1.host").open("wb"))
    for step in (10, 20, 30):
        event = messages.Event(wall_time=time.time(), step=step)
        event.summary.value.add(tag="loss", simple_value=1 / step)
        writer.write(event.SerializeToString())
    writer.flush()
    while not folder.with_suffix(".read").exists():
        time.sleep(0.02)
    writer.close()


def wait_for_ever() -> None:
    while True:
        signal.pause()


def wait_until_asked(count: int) -> None:
    """Do not end before all others have met this task."""
    deadline = time.monotonic() + LIMIT_S
    while len(asked_by) < count and time.monotonic() < deadline:
        time.sleep(0.01)


def listen(address: str, name: str) -> None:
    """Answer everybody with this task's name, in a thread, as TensorFlow's server does."""
    port = address.rpartition(":")[2]
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(os.environ.get("TF_GRPC_REUSE_PORT") == "true"))
    server.bind(("", int(port)))
    server.listen()

    def serve() -> None:
        while True:
            sock, _ = server.accept()
            sock.sendall(name.encode())
            asked_by.append(sock)

    threading.Thread(target=serve, daemon=True).start()


def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            return socket.create_connection((host.strip("[]"), int(port)))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def ask(address: str) -> str:
    with connected(address) as sock:
        return sock.recv(100).decode()


if __name__ == "__main__":
    main()
