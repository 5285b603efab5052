"""What a peer announces costs nothing; what it sends unasked has a limit, and no order of calls waits for ever."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from paceline.comm.peer_sockets import links as module
from paceline.comm.peer_sockets.links import HEADER, MAX_BYTES, PeerLinks, PeerLost

PEER, OTHER = 1, 2
LIMIT_S = 20.0


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of a few kilobytes in place of gigabytes."""
    monkeypatch.setattr(module, "UNASKED_BYTES", 10_000)
    monkeypatch.setattr(module, "PIECE_BYTES", 1_000)
    monkeypatch.setattr(module, "READ_BYTES", 4_000)
    monkeypatch.setattr(module, "memory_limit_bytes", lambda: 400_000)  # so a peer may take 100,000


@pytest.fixture
def peers() -> Iterator[dict[int, socket.socket]]:
    """The peers' ends of two connections."""
    made = {number: socket.socketpair() for number in (PEER, OTHER)}
    _ours.clear()
    _ours.update({number: pair[0] for number, pair in made.items()})
    yield {number: pair[1] for number, pair in made.items()}
    for _, theirs in made.values():  # the others are the links' own, whose thread may use them to its end
        theirs.close()


_ours: dict[int, socket.socket] = {}


@pytest.fixture
def links(small: None, peers: dict[int, socket.socket]) -> Iterator[PeerLinks]:
    with closing(PeerLinks(_ours)) as made:
        yield made


def message(tag: int, data: bytes) -> bytes:
    return HEADER.pack(tag, len(data)) + data


def received(links: PeerLinks, num_bytes: int, *, tag: int, peer: int = PEER) -> bytes:
    data = bytearray(num_bytes)
    assert links.wait(links.receive(peer, memoryview(data), tag=tag), LIMIT_S), "nothing came"
    return bytes(data)


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.001)


def test_an_announcement_takes_no_memory_and_its_connection_ends_where_something_else_is_expected(
    links: PeerLinks, peers: dict[int, socket.socket]
) -> None:
    peers[PEER].sendall(HEADER.pack(5, MAX_BYTES) + b"x")
    until(lambda: links._links[PEER].num_unasked_bytes > 0)
    assert links._links[PEER].num_unasked_bytes == module.PIECE_BYTES
    peers[OTHER].sendall(message(5, b"abcd"))
    assert received(links, 4, tag=5, peer=OTHER) == b"abcd", "the other connections are served"
    with pytest.raises(PeerLost, match="sent 4,398,046,511,104 bytes where 4 were expected"):
        received(links, 4, tag=5)


def test_a_message_that_is_asked_for_while_it_arrives_is_whole(
    links: PeerLinks, peers: dict[int, socket.socket]
) -> None:
    data = bytes(range(250)) * 18
    for arrived in (0, 1, 999, 1000, 3500, 4499, 4500):
        peers[PEER].sendall(message(7, data)[: HEADER.size + arrived])
        until(lambda: links._links[PEER].current is not None or bool(links._links[PEER].arrived))
        into = bytearray(len(data))
        transfer = links.receive(PEER, memoryview(into), tag=7)
        peers[PEER].sendall(data[arrived:])
        assert links.wait(transfer, LIMIT_S) and into == data
        assert links._links[PEER].num_unasked_bytes == 0


def test_a_peer_that_is_far_ahead_waits_until_it_is_asked_and_nothing_is_lost(
    links: PeerLinks, peers: dict[int, socket.socket]
) -> None:
    sent = [bytes([number]) * (number * 37 % 1500) for number in range(200)]
    sender = threading.Thread(target=lambda: [peers[PEER].sendall(message(3, one)) for one in sent])
    sender.start()
    link = links._links[PEER]
    until(lambda: link.is_left_alone)
    assert link.num_unasked_bytes <= module.UNASKED_BYTES + module.PIECE_BYTES
    links.wait(links.send(PEER, memoryview(b"still sent"), tag=1), LIMIT_S)
    for one in sent:
        assert received(links, len(one), tag=3) == one
    sender.join()
    assert peers[PEER].recv(100)[HEADER.size :] == b"still sent" and link.num_unasked_bytes == 0


def test_a_message_behind_those_that_nobody_asks_for_arrives(links: PeerLinks, peers: dict[int, socket.socket]) -> None:
    sender = threading.Thread(target=peers[PEER].sendall, args=(message(3, b"x" * 60_000) + message(4, b"here"),))
    sender.start()
    until(lambda: links._links[PEER].is_left_alone)
    assert received(links, 4, tag=4) == b"here"
    assert received(links, 60_000, tag=3) == b"x" * 60_000
    sender.join()


def test_what_comes_without_end_while_another_message_is_asked_for_ends_the_connection(
    links: PeerLinks, peers: dict[int, socket.socket]
) -> None:
    def send() -> None:
        with pytest.raises(OSError):
            peers[PEER].sendall(message(3, b"x" * 3_000_000))

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(PeerLost, match=r"has sent 9\d\.\d KiB that this worker has not asked for.* too far ahead"):
        received(links, 4, tag=4)
    sender.join()


def test_messages_without_bytes_are_messages(links: PeerLinks, peers: dict[int, socket.socket]) -> None:
    peers[PEER].sendall(message(3, b"x" * (module.READ_BYTES - HEADER.size)) + message(4, b""))
    assert received(links, 0, tag=4) == b""
