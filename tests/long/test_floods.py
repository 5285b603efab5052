"""Twenty thousand strangers, from many addresses and from the host's own: a true token gets in within a second.

Some connect and leave, some stay silent, and some send a byte a second. Each flood comes from processes of its own.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import resource
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import pytest
import torch.distributed as dist

from paceline.comm.messages.tensor_messages import TensorClient, TensorServer
from paceline.comm.peer_sockets.meeting import _connect, _Listener
from paceline.launch.io.authentication import AuthenticatedConnection, AuthenticatedListener
from paceline.launch.io.event_loop import EventLoop
from strangers import TOKEN, turn_until

STRANGERS, PROCESSES = 20_000, 4
LOGINS = 9
SLOW_S = 1.0  # between two bytes of a slow sender
forking = multiprocessing.get_context("fork")


def flood(place: tuple[str, int], kind: str, source: str, count: Synchronized[int], most_held: int) -> None:
    """Connect for ever; hold as many as may be, and let the oldest go."""
    held: list[socket.socket] = []
    next_bytes = 0.0
    while True:
        try:
            held.append(socket.create_connection(place, timeout=1.0, source_address=(source, 0)))
            held[-1].setblocking(False)
            with count.get_lock():
                count.value += 1
        except OSError:
            time.sleep(0.001)
        if kind == "slow" and time.monotonic() > next_bytes:
            next_bytes = time.monotonic() + SLOW_S
            for sock in held:
                with contextlib.suppress(OSError):
                    sock.send(b"P")
        if held and (kind == "brief" or len(held) > most_held):
            held.pop(0).close()


@contextlib.contextmanager
def flooded(place: tuple[str, int], kind: str, sources: list[str]) -> Iterator[Callable[[], int]]:
    """While strangers come; yields how many have come."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = forking.Value("q", 0)
    most_held = min(STRANGERS // PROCESSES, hard - 200)
    strangers = [
        forking.Process(target=flood, args=(place, kind, sources[number % len(sources)], count, most_held), daemon=True)
        for number in range(PROCESSES)
    ]
    for one in strangers:
        one.start()
    try:
        yield lambda: count.value
    finally:
        for one in strangers:
            one.kill()
            one.join()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


ELSEWHERE = [f"127.0.0.{number}" for number in range(2, 2 + PROCESSES)]
KINDS = pytest.mark.parametrize("kind", ["silent", "slow", "brief"])
SOURCES = pytest.mark.parametrize("sources", [ELSEWHERE, ["127.0.0.1"]], ids=["other addresses", "the same address"])


def logged_in(login: Callable[[], Any], come: Callable[[], int]) -> list[float]:
    """Seconds of each login, spread over the whole flood."""
    took = list[float]()
    for number in range(LOGINS):
        while come() < STRANGERS * (number + 1) // (LOGINS + 1):
            time.sleep(0.01)
        begun = time.monotonic()
        login()
        took.append(time.monotonic() - begun)
    return took


@KINDS
@SOURCES
def test_a_host_with_the_token_gets_in(kind: str, sources: list[str]) -> None:
    proved = list[socket.socket]()
    with contextlib.closing(EventLoop()) as loop:
        listener = socket.create_server(("127.0.0.1", 0))
        place = listener.getsockname()
        entrance = AuthenticatedListener(listener, TOKEN, loop, on_proved=proved.append, say=lambda _: None)
        with flooded(place, kind, sources) as come:
            took = list[float]()
            for number in range(LOGINS):
                due = STRANGERS * (number + 1) // (LOGINS + 1)
                turn_until(loop, lambda due=due: come() >= due, limit_s=300.0)
                begun, mine, before = time.monotonic(), list[socket.socket](), len(proved)
                call = AuthenticatedConnection(TOKEN, loop, on_proved=mine.append, on_failed=_fail)
                call.begin(socket.AF_INET, place)
                turn_until(loop, lambda mine=mine, before=before: bool(mine) and len(proved) > before)
                took.append(time.monotonic() - begun)
                mine[0].close()
        entrance.close()
        for sock in proved:
            sock.close()
    print(f"{kind}, {len(sources)} addresses: {statistics.median(took):.3f} s, at most {max(took):.3f} s")
    assert statistics.median(took) < 1.0, took


@KINDS
@SOURCES
def test_a_member_reaches_a_workers_port(kind: str, sources: list[str]) -> None:
    store = dist.HashStore()
    with contextlib.closing(_Listener("127.0.0.1", store, index=0)) as listener:
        store.set("peer_0", json.dumps(listener.place))
        place = ("127.0.0.1", int(listener.place[1]))

        def login() -> None:
            while (sock := _connect(place, listener.secret, index=1)) is None:
                time.sleep(0.02)
            listener.proved.get(timeout=20.0)[1].close()
            sock.close()

        with flooded(place, kind, sources) as come:
            took = logged_in(login, come)
    print(f"{kind}, {len(sources)} addresses: {statistics.median(took):.3f} s, at most {max(took):.3f} s")
    assert statistics.median(took) < 1.0, took


@KINDS
def test_a_worker_reaches_a_parameter_server(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As between hosts: with CURVE, at a port."""
    monkeypatch.setattr("paceline.comm.messages.tensor_messages.is_loopback", lambda _: False)
    server = TensorServer("127.0.0.1", TOKEN)
    host, _, port = server.endpoint.removeprefix("tcp://").rpartition(":")
    is_over = False

    def serve() -> None:
        while not is_over:
            server.receive(0.05)

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        with flooded((host, int(port)), kind, ELSEWHERE) as come:
            took = logged_in(
                lambda: TensorClient(server.endpoint, TOKEN, name="it", timeout_s=60.0).close(at_once=True), come
            )
    finally:
        is_over = True
        serving.join()
        server.close()
    print(f"{kind}: {statistics.median(took):.3f} s, at most {max(took):.3f} s")
    assert statistics.median(took) < 1.0, took


def _fail(*why: object) -> None:
    pytest.fail(str(why))
