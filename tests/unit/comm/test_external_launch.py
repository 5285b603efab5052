"""Workers that somebody else started meet at worker 0, whose thread takes them in as long as it is there."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

import pytest

from paceline.comm.rendezvous import external_launch as meeting
from paceline.comm.rendezvous.external_launch import KeyValueServer, join_external_launch


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files"),
        ConnectionAbortedError(errno.ECONNABORTED, "Software caused connection abort"),
        RuntimeError("can't start new thread"),
    ],
    ids=["files", "aborted", "threads"],
)
def test_worker_0_takes_others_in_also_after_it_could_not_once(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    accept, errors, said = socket.socket.accept, [error, error], list[str]()

    def failing(sock: socket.socket) -> tuple[socket.socket, Any]:
        if errors:
            raise errors.pop()
        return accept(sock)

    monkeypatch.setattr(socket.socket, "accept", failing)
    monkeypatch.setattr(meeting, "PAUSE_S", 0.01)
    address = f"\0paceline-test-{os.getpid()}"
    kv_store = KeyValueServer(address, None, said.append)
    try:
        channel, _ = join_external_launch(worker_rank=1, address=address, token=None, timeout_s=20.0, log=said.append)
        channel._sock.settimeout(20.0)
        assert channel.call("add", key="n", amount=3) == 3
        channel.close()
    finally:
        kv_store.close()
    told = [] if isinstance(error, ConnectionError) else [f"cannot accept a connection, and tries again: {error}"]
    assert [text.removeprefix("worker 0 ") for text in said] == told
