"""A worker waits for a server that waits for another worker: the server is not lost, and who holds it up is named."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import SGD

from paceline.comm.flight_recorder import FILE_NAME, FlightRecorder
from paceline.comm.messages.tensor_messages import ServerLost, TensorClient, TensorMessage, TensorServer
from paceline.errors import SyncError
from paceline.monitor.hang.hang_detection import absences, finding_text, mismatches
from paceline.monitor.hang.worker_activity import WorkerActivity, read_activity
from paceline.sync.parameter_server import client
from paceline.sync.parameter_server.async_server import AsyncServer
from paceline.sync.parameter_server.client import ServerClient
from paceline.sync.parameter_server.served_parameters import ServerParameters

SECRET, LIMIT_S = b"s" * 32, 60.0
STREAM = {"stream": "one", "limit": 1, "workers": [0, 1], "saves": [0, 0, 1], "step": 0, "epoch": 0, "position": 0}


class Worker(ServerClient):
    """One of two workers of one server that deals one batch."""

    def __init__(self, rank: int, endpoint: str, recorder: FlightRecorder, *, timeout_s: float) -> None:
        self.rank, self.about = rank, {"worker": rank, "name": f"name {rank}", **STREAM}
        self.count = 1
        self._recorder, self._timeout_s = recorder, timeout_s
        self._callers = [TensorClient(endpoint, SECRET, name="the server", timeout_s=timeout_s)]
        self.tell({"op": "hello"})

    def tell(self, question: dict[str, Any]) -> TensorMessage:
        return self.ask_first(question, about=self.about, worker_rank=self.rank)

    def turn(self) -> Any:
        return self.tell({"op": "turn", "num_losses": 0}).header["turn"]

    def note(self) -> None:
        """What it has done is in its log."""
        self._callers[0].send({"op": "noted", **self.about})

    def end(self) -> None:
        self._callers[0].close()


@pytest.fixture
def endpoint() -> Iterator[str]:
    listener = TensorServer("127.0.0.1", SECRET)
    weight = Parameter(torch.zeros(1))
    server = AsyncServer(
        ServerParameters({0: weight}, [SGD([weight], lr=0.1)]),
        listener,
        is_deserted=lambda: False,
        staleness=1,
        buffers=[],
    )
    thread = threading.Thread(target=server.serve)
    thread.start()
    yield listener.endpoint
    thread.join(LIMIT_S)
    listener.close()
    assert not thread.is_alive(), "a server is left, though all callers have gone"


def test_who_waits_longer_than_the_limit_for_a_slow_worker_has_lost_no_server(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "ASK_S", 0.02)
    rings = [FlightRecorder.create(folder(tmp_path, rank) / FILE_NAME, worker=rank, limit_s=0.5) for rank in (0, 1)]
    slow, told = Worker(1, endpoint, rings[1], timeout_s=LIMIT_S), list[Any]()
    assert slow.turn() == "batch"

    def wait() -> None:
        waiting = Worker(0, endpoint, rings[0], timeout_s=2.0)
        try:
            told.append(waiting.turn())
        except SyncError as error:
            told.append(error)
        finally:
            waiting.end()

    waiter = threading.Thread(target=wait)
    waiter.start()
    deadline = time.monotonic() + LIMIT_S
    while doing(tmp_path, 0).waited_s < 3.0 and not told and time.monotonic() < deadline:
        time.sleep(0.02)  # nothing tells how long somebody has waited
    activities = {rank: doing(tmp_path, rank) for rank in (0, 1)}
    slow.tell({"op": "skip", "number": 0})
    slow.note()
    over = slow.turn()
    slow.end()
    waiter.join(LIMIT_S)
    assert (over, told) == ("over", ["over"])
    (finding,) = absences(activities)
    assert (finding.named, finding.waiting) == ((1,), (0,)) and mismatches(activities) == []
    assert "pid" in (text := finding_text(finding, activities, {1: "train.py:12"}))
    assert "keeps the parameter servers from answering; it is at train.py:12; worker 0 has waited 3" in text
    assert doing(tmp_path, 0).groups == () and not doing(tmp_path, 0).waits_for


def test_where_nobody_ends_the_wait_its_limit_names_who_is_awaited(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "ASK_S", 0.02)
    monkeypatch.setattr(client, "MARGIN_S", 0.0)
    slow = Worker(1, endpoint, FlightRecorder.unread(), timeout_s=LIMIT_S)
    waiting = Worker(0, endpoint, FlightRecorder.unread(), timeout_s=LIMIT_S)
    waiting._timeout_s = 0.5
    try:
        assert slow.turn() == "batch"
        with pytest.raises(SyncError, match=r"the server has held an answer back .* it waits for worker 1 ") as raised:
            waiting.turn()
        assert not isinstance(raised.value, ServerLost), "which would have the server ended"
    finally:
        slow.end()
        waiting.end()


def folder(run_dir: Path, rank: int) -> Path:
    path = run_dir / f"worker_{rank}"
    path.mkdir(exist_ok=True)
    return path


def doing(run_dir: Path, rank: int) -> WorkerActivity:
    found = read_activity(folder(run_dir, rank), rank, host="here")
    assert found is not None
    return found
