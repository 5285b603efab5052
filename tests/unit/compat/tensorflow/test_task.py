"""A task before its program begins: the addresses of the others, and orders that come too early."""

from __future__ import annotations

import dataclasses
import json
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.comm.messages.json_channel import LineBuffer, encode
from paceline.comm.rendezvous.kv_store import KeyValueStore
from paceline.compat.tensorflow import task
from paceline.plan import Assignment, Job


class Supervisor:
    """Answers one task's requests from a store, after it has sent `orders`."""

    def __init__(self, orders: list[dict[str, Any]]) -> None:
        ours, theirs = socket.socketpair()
        self.fd, self.heard, self.store = theirs.detach(), list[dict[str, Any]](), KeyValueStore()
        self._sock = ours
        for order in orders:
            ours.sendall(encode(order))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        lines = LineBuffer()
        while data := self._sock.recv(4096):
            for request in lines.feed(data):
                self.heard.append(request)
                if "id" in request:
                    self._sock.sendall(encode(self.store.handle(request)))

    def close(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._sock.close()


@pytest.fixture
def handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def ran(tmp_path: Path, orders: list[dict[str, Any]], **fields: Any) -> tuple[int, Supervisor, Path]:
    job = Job(program="train.py", run_for="tensorflow", workers=2, timeout_s=0.3)
    assignment = Assignment(
        rank=0, workers=2, local_rank=0, local_workers=2, host="east", host_index=0, hosts=1, address="127.0.0.1",
        run_dir=str(tmp_path / "run"), attempt=1, worker_dir=str(tmp_path / "run/attempt_1/worker_0"), channel_fd=-1,
        command_started=0.0, job=dataclasses.replace(job, **fields),
    )  # fmt: skip
    supervisor = Supervisor(orders)
    try:
        code = task.work(dataclasses.replace(assignment, channel_fd=supervisor.fd))
    finally:
        supervisor.close()
    return code, supervisor, Path(assignment.worker_dir)


@pytest.mark.usefixtures("handlers")
def test_a_task_that_does_not_come_is_named_with_the_remedy(tmp_path: Path) -> None:
    code, supervisor, place = ran(tmp_path, [])
    assert code == 1
    error = json.loads((place / "error.json").read_text())
    assert error["message"].startswith("worker 1 did not come within 0 s (timeout_s): look at its host")
    told = json.loads(task.base64.b64decode(supervisor.store.to_json()["paceline/task/0/address"]))
    assert told["host_index"] == 0 and told["address"].startswith("127.0.0.1:")


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(
    ("order", "code"), [({"op": "finish", "exit_code": 75, "reason": ""}, 75), ({"op": "end"}, 143)]
)
def test_a_task_that_is_to_go_before_all_are_there_starts_nothing(
    tmp_path: Path, order: dict[str, Any], code: int
) -> None:
    ended, _, place = ran(tmp_path, [order], timeout_s=60.0)
    assert ended == code and not (place / "error.json").exists()
    assert "TaskStarted" not in (place / "events.jsonl").read_text()
