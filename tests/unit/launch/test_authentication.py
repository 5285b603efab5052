"""The event loop, message streams and token authentication: bytes arrive whole, strangers are refused."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from paceline.comm.messages.json_channel import encode
from paceline.comm.messages.secure_socket import channel_proof, prove_and_encrypt, prove_token, tls_context
from paceline.comm.messages.token_handshake import HANDSHAKE_TIMEOUT_S
from paceline.launch.coordinator.host_admission import HostAdmission
from paceline.launch.coordinator.join_request import JobTerms
from paceline.launch.io import authentication
from paceline.launch.io.authentication import MAX_REPORTED, MAX_UNPROVED, AuthenticatedListener, TokenExchange
from paceline.launch.io.event_loop import READ, EventLoop, MessageStream
from paceline.plan import Job

TOKEN = b"a token of sufficient length"


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    with closing(EventLoop()) as made:
        yield made


def turn_until(loop: EventLoop, done: Callable[[], bool], *, limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < deadline, "nothing more happens"
        loop.turn(0.05)


class Party:
    """A link that keeps what it hears."""

    def __init__(self, sock: socket.socket, loop: EventLoop) -> None:
        self.messages: list[dict[str, Any]] = []
        self.ends: list[Exception] = []
        self.link = MessageStream(sock, loop, on_message=self.messages.append, on_close=self.ends.append)


def test_large_messages_pass_both_ways_at_once_without_blocking(loop: EventLoop) -> None:
    one, other = (Party(sock, loop) for sock in socket.socketpair())
    text = "x" * (3 << 20)  # more than the sockets hold
    for party in (one, other):
        for number in range(3):
            party.link.send({"number": number, "text": text})
    turn_until(loop, lambda: len(one.messages) == len(other.messages) == 3)
    assert [message["number"] for message in one.messages] == [0, 1, 2]
    assert {len(message["text"]) for message in one.messages + other.messages} == {len(text)}
    one.link.close()
    turn_until(loop, lambda: bool(other.ends))
    assert [type(error) for error in other.ends] == [ConnectionError]
    assert (one.ends, other.link.closed) == ([], True)


def test_what_was_said_before_the_end_is_heard_first(loop: EventLoop) -> None:
    ours, theirs = socket.socketpair()
    party = Party(ours, loop)
    theirs.sendall(encode({"last": "words"}))
    theirs.close()
    turn_until(loop, lambda: bool(party.ends))
    assert party.messages == [{"last": "words"}]


def test_sending_to_one_who_has_gone_ends_in_one_close(loop: EventLoop) -> None:
    ours, theirs = socket.socketpair()
    party = Party(ours, loop)
    theirs.close()
    for _ in range(3):
        party.link.send({"anybody": "there"})
    turn_until(loop, lambda: bool(party.ends))
    party.link.send({"anybody": "there"})
    assert len(party.ends) == 1


def test_nonsense_closes_the_link_with_a_value_error(loop: EventLoop) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        party = Party(ours, loop)
        theirs.sendall(b'{"fine": 1}\n[]\n{"late": 1}\n')
        turn_until(loop, lambda: bool(party.ends))
        assert (party.messages, [type(error) for error in party.ends]) == ([{"fine": 1}], [ValueError])
        assert theirs.recv(1) == b""


def test_sockets_are_handed_over_in_order_and_closed_here(loop: EventLoop) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        party = Party(ours, loop)
        pairs = [socket.socketpair() for _ in range(3)]
        for number, (_, passed) in enumerate(pairs):
            party.link.send({"number": number}, passing=[passed])
        received: list[int] = []
        while len(received) < 3:
            received += socket.recv_fds(theirs, 1 << 16, 8)[1]
        for number, (kept, passed) in enumerate(pairs):
            assert passed.fileno() == -1
            os.write(received[number], b"%d" % number)
            assert kept.recv(10) == b"%d" % number
            os.close(received[number])
            kept.close()
        party.link.close()


def test_a_socket_that_a_callback_closed_is_not_served_in_the_same_turn(loop: EventLoop) -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    served: list[int] = []

    def ready(number: int) -> None:
        served.append(number)
        for ours, _ in pairs:
            loop.forget(ours)
            ours.close()

    for number, (ours, theirs) in enumerate(pairs):
        loop.watch(ours, READ, lambda _, number=number: ready(number))
        theirs.send(b"x")
    loop.turn(1.0)
    loop.turn(0.0)
    assert len(served) == 1
    for _, theirs in pairs:
        theirs.close()


class Entrance:
    """A listener on loopback, and the connections that it admits."""

    def __init__(self, loop: EventLoop) -> None:
        self.loop, self.said, self.proved = loop, list[str](), list[socket.socket]()
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.listener = AuthenticatedListener(listener, TOKEN, loop, on_proved=self.proved.append, say=self.said.append)

    def close(self) -> None:
        self.listener.close()
        for sock in self.proved:
            sock.close()


@pytest.fixture
def entrance(loop: EventLoop) -> Iterator[Entrance]:
    with closing(Entrance(loop)) as made:
        yield made


def test_the_token_admits_a_connection(loop: EventLoop, entrance: Entrance) -> None:
    proved: list[socket.socket] = []
    sock = socket.create_connection(entrance.address)
    TokenExchange(
        sock, TOKEN, loop, is_coordinator=False, on_proved=proved.append, on_refused=lambda *why: pytest.fail(str(why))
    )
    turn_until(loop, lambda: len(proved) == len(entrance.proved) == 1)
    assert entrance.said == []
    sock.close()


def test_another_token_is_a_final_no_on_both_sides(loop: EventLoop, entrance: Entrance) -> None:
    refused: list[tuple[str, bool]] = []
    TokenExchange(
        socket.create_connection(entrance.address),
        b"another token",
        loop,
        is_coordinator=False,
        on_proved=lambda _: pytest.fail("it was let in"),
        on_refused=lambda reason, final: refused.append((reason, final)),
    )
    turn_until(loop, lambda: bool(refused and entrance.said))
    assert refused == [("it holds another token than this host", True)]
    assert entrance.said == ["refused a connection from 127.0.0.1: its token is wrong"]
    assert entrance.proved == []


def test_who_says_nothing_is_sent_away_in_time(loop: EventLoop, entrance: Entrance) -> None:
    with socket.create_connection(entrance.address) as sock:
        sock.settimeout(10)
        loop.turn(1.0)
        entrance.listener.tick(time.monotonic() + HANDSHAKE_TIMEOUT_S / 2)
        assert entrance.said == []
        entrance.listener.tick(time.monotonic() + HANDSHAKE_TIMEOUT_S)
        assert len(sock.recv(1000)) == 40  # the greeting
        assert sock.recv(1000) == b""
    assert entrance.said == ["refused a connection from 127.0.0.1: it did not prove the job's token within 5 s"]


def test_a_crowd_of_strangers_is_kept_small_and_told_in_few_words(loop: EventLoop, entrance: Entrance) -> None:
    crowd = [socket.create_connection(entrance.address) for _ in range(MAX_UNPROVED + 10)]
    turn_until(loop, lambda: len(entrance.said) == MAX_REPORTED)
    for _ in range(len(crowd)):
        loop.turn(0.0)
    reason = f"{MAX_UNPROVED} other connections have not proved the job's token yet"
    assert entrance.said == [f"refused a connection from 127.0.0.1: {reason}"] * MAX_REPORTED
    for sock in crowd:
        sock.close()
    entrance.listener.close()
    assert entrance.said[-1] == "refused 10 connections from 127.0.0.1 in all"


def test_a_listener_that_speaks_another_protocol_is_a_final_refusal(loop: EventLoop) -> None:
    refused: list[tuple[str, bool]] = []
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
        TokenExchange(
            ours,
            TOKEN,
            loop,
            is_coordinator=False,
            on_proved=lambda _: pytest.fail("it was taken for a head"),
            on_refused=lambda reason, final: refused.append((reason, final)),
        )
        turn_until(loop, lambda: bool(refused))
    assert refused == [("it does not speak Paceline's protocol", True)]


def reset(sock: socket.socket) -> None:
    """End a connection as the system does for a process that was killed: the other side's next call fails."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.mark.parametrize("when", ["before it is encrypted", "while it is encrypted"])
def test_a_host_that_is_lost_while_it_is_let_in_costs_nobody_else_anything(
    when: str, loop: EventLoop, entrance: Entrance, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = socket.create_connection(entrance.address)

    def context(*, is_head: bool) -> ssl.SSLContext:
        if when == "before it is encrypted":
            reset(lost)
        return tls_context(is_head=is_head)

    def proof(secret: bytes, sock: ssl.SSLSocket, *, is_head: bool) -> bytes:
        if when == "while it is encrypted":
            reset(encrypted[0])
        return channel_proof(secret, sock, is_head=is_head)

    encrypted: list[ssl.SSLSocket] = []

    def prove() -> None:
        with contextlib.suppress(OSError):  # what is reset may still be at work
            prove_token(lost, TOKEN, is_head=False)
            if when == "while it is encrypted":
                encrypted.append(tls_context(is_head=False).wrap_socket(lost, do_handshake_on_connect=False))
                encrypted[0].do_handshake()

    monkeypatch.setattr(authentication, "tls_context", context)
    monkeypatch.setattr(authentication, "channel_proof", proof)
    member = threading.Thread(target=prove)
    member.start()
    turn_until(loop, lambda: bool(entrance.said))
    member.join()
    assert entrance.said[0].startswith("refused a connection from 127.0.0.1: ")
    monkeypatch.undo()
    made: list[ssl.SSLSocket] = []
    another = socket.create_connection(entrance.address)
    member = threading.Thread(target=lambda: made.append(prove_and_encrypt(another, TOKEN, is_head=False)))
    member.start()
    turn_until(loop, lambda: bool(entrance.proved))
    member.join()
    made[0].close()


def test_a_host_that_is_lost_before_it_has_said_its_name_costs_nobody_else_anything(
    loop: EventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    at = ("127.0.0.1", 29500)
    terms = JobTerms(job=Job(), asked=Job(), plan="", attempt=1, run_dir="run", host="h", at=at, token=TOKEN)
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    outcomes: list[str] = []
    monkeypatch.setattr(HostAdmission, "_accepted", _after_a_reset(HostAdmission._accepted, outcomes))
    with closing(HostAdmission(listener, terms, loop, said.append)):
        lost = socket.create_connection(address)
        member = threading.Thread(target=lambda: reset(prove_and_encrypt(lost, TOKEN, is_head=False)))
        member.start()
        turn_until(loop, lambda: bool(outcomes))
        member.join()
    assert outcomes == ["closed"]


def _after_a_reset(accept: Callable[..., None], outcomes: list[str]) -> Callable[..., None]:
    def accepted(admission: HostAdmission, sock: socket.socket) -> None:
        while _is_connected(sock):
            time.sleep(0.01)
        accept(admission, sock)
        outcomes.append("closed" if sock.fileno() < 0 else "kept")

    return accepted


def _is_connected(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError:
        return False
    return True
