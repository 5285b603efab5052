"""Strangers at a run: on one host they find nothing to connect to, and between hosts a flood keeps nobody out."""

from __future__ import annotations

import contextlib
import json
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from paceline.comm.messages import unproved_connections
from paceline.comm.messages.unproved_connections import MAX_UNPROVED
from paceline.comm.peer_sockets.meeting import connect_members
from paceline.launch.io import authentication
from paceline.launch.io.authentication import AuthenticatedConnection, AuthenticatedListener
from paceline.launch.io.event_loop import EventLoop
from programs import PACELINE, command, losses, reference_losses, the_run, write_program
from strangers import TOKEN, turn_until
from supervised_launch import marked

FLOOD = 20_000
PLANS = ("replicas=2-2+batch(size=8)", "replicas=2+parameterserver(staleness=1)+batch(size=8)")


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    with closing(EventLoop()) as made:
        yield made


def network_sockets(mark: str) -> set[str]:
    """The internet sockets that a command's processes have now."""
    found: set[str] = set()
    for line in marked(mark):
        try:
            process = psutil.Process(int(line.partition(":")[0]))
            found |= {f"{one.status} {one.laddr}" for one in process.net_connections(kind="inet")}
        except psutil.Error:
            continue  # it has ended
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_a_run_on_one_host_has_no_network_socket_and_a_private_directory(tmp_path: Path, plan: str) -> None:
    train = write_program(tmp_path)
    words = ("run", train, "--workers", "2", "--plan", plan, "--run-dir", tmp_path / "runs" / "one")
    seen: set[str] = set()
    with command(*PACELINE, *words, cwd=tmp_path) as program:
        while program.process.poll() is None:
            seen |= network_sockets(program.mark)
            time.sleep(0.02)
        code, output = program.end()
    assert (code, seen) == (0, set()), output
    assert stat.S_IMODE(the_run(tmp_path).stat().st_mode) == 0o700


def test_a_token_gets_in_while_strangers_hold_all_places(loop: EventLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast it is under 20,000 of them, `tests/long/test_floods.py` measures."""
    monkeypatch.setattr(authentication, "HANDSHAKE_TIMEOUT_S", 600.0)  # so none of them goes by itself
    listener = socket.create_server(("127.0.0.1", 0))
    address, proved, said = listener.getsockname(), list[socket.socket](), list[str]()
    entrance = AuthenticatedListener(listener, TOKEN, loop, on_proved=proved.append, say=said.append)
    is_over = threading.Event()
    count = [0]

    def flood() -> None:
        """Knock without a word, and keep as many connections open as may be."""
        held: list[socket.socket] = []
        while count[0] < FLOOD and not is_over.is_set():
            try:
                held.append(socket.create_connection(address, timeout=0.5))
                count[0] += 1
            except OSError:
                time.sleep(0.001)
            if len(held) > 2 * MAX_UNPROVED:
                held.pop(0).close()
        for sock in held:
            sock.close()

    strangers = threading.Thread(target=flood)
    strangers.start()
    try:
        turn_until(loop, lambda: count[0] > 1000)
        for _ in range(3):
            mine = list[socket.socket]()
            call = AuthenticatedConnection(
                TOKEN, loop, on_proved=mine.append, on_failed=lambda *why: pytest.fail(str(why))
            )
            call.begin(socket.AF_INET, address)
            before = len(proved)
            turn_until(loop, lambda mine=mine, before=before: bool(mine) and len(proved) > before)
            mine[0].close()
    finally:
        is_over.set()
        strangers.join()
        entrance.close()
        for sock in proved:
            sock.close()
    assert len(said) < 20, "strangers fill the console"


def test_a_workers_port_lets_a_member_in_while_strangers_hold_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from the member's own address and send a byte; each newcomer drives out the oldest."""
    monkeypatch.setattr(unproved_connections, "HANDSHAKE_TIMEOUT_S", 600.0)  # so none of them goes by itself
    store, results = dist.HashStore(), dict[int, dict[int, socket.socket]]()

    def join(index: int) -> None:
        results[index] = connect_members(
            store, index=index, size=2, address="127.0.0.1", timeout_s=60.0, check=lambda: None
        )

    first = threading.Thread(target=join, args=(0,))
    first.start()
    store.wait(["peer_0"])
    place = tuple(json.loads(store.get("peer_0")))
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_UNPROVED + 30):
            stack.enter_context(closing(socket.create_connection(place))).send(b"P")
        join(1)
        first.join()
    assert {index: list(met) for index, met in results.items()} == {0: [1], 1: [0]}
    for met in results.values():
        for sock in met.values():
            sock.close()


def test_what_a_stranger_writes_into_torchruns_store_is_not_used_between_hosts(tmp_path: Path) -> None:
    """This process serves the store, as torchrun does, and writes what the workers would exchange there."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    reader = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    evil = {"run_dir": str(tmp_path / "evil"), "attempt": 7, "hosts": ["a", "b"]}
    forged = {"paceline_0/run": json.dumps(evil), "paceline/object_key": "00" * 32, "secret": "00" * 32}
    forged |= {f"peer_{index}": json.dumps(str(tmp_path / "evil")) for index in range(2)}
    for prefix in ("", "/worker/attempt_0/", "/worker/attempt_0/default_pg/0//"):
        for key, value in forged.items():
            store.set(prefix + key, value)
    before, train = store.num_keys(), write_program(tmp_path)  # asked by the one that has written them
    world = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "one"}
    world |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1"}
    world |= {"MASTER_PORT": str(store.port), "PACELINE_TOKEN": TOKEN.decode()}
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(command(sys.executable, train, cwd=tmp_path, environment=world | {"RANK": str(rank)}))
            for rank in range(2)
        ]
        ends = [worker.end() for worker in workers]
    assert [code for code, _ in ends] == [0, 0], ends
    assert losses(the_run(tmp_path)) == pytest.approx(list(reference_losses()), rel=1e-5)
    assert reader.num_keys() == before + 2, "torch's count of clients, and the port at which the workers meet"
    assert not (tmp_path / "evil").exists()
