"""Messages: what goes in comes out, and what makes no sense is refused."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.messages.json_channel import MAX_MESSAGE_BYTES, Channel, ChannelClosed, LineBuffer, decode, encode

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    ends = [Channel(sock) for sock in socket.socketpair()]
    yield ends[0], ends[1]
    for end in ends:
        end.close()


@given(st.lists(st.dictionaries(st.text(), plain, max_size=3), max_size=5), st.data())
def test_messages_survive_any_cutting_of_the_stream(messages: list[dict[str, object]], data: st.DataObject) -> None:
    stream = b"".join(encode(message) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    lines, found = LineBuffer(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += lines.feed(stream[start:end])
    assert found == messages


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"not json", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[1, 2]", "is not a JSON object"),
        (b"", "is not JSON"),
        (b"[" * 100_000, "nested too deeply|is not JSON"),
        (b'{"n": ' + b"9" * 10_000 + b"}", "is not JSON"),
    ],
)
def test_a_malformed_line_is_a_value_error_that_shows_it(line: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        decode(line)


def test_messages_before_a_malformed_one_are_still_given_out() -> None:
    messages = LineBuffer().feed(b'{"a": 1}\nnonsense\n{"b": 2}\n')
    assert next(messages) == {"a": 1}
    with pytest.raises(ValueError, match="is not JSON: b'nonsense'"):
        next(messages)


def test_a_line_without_an_end_is_refused_at_the_limit() -> None:
    lines = LineBuffer()
    assert list(lines.feed(b"x" * (MAX_MESSAGE_BYTES - 1))) == []
    with pytest.raises(ValueError, match="too long"):
        list(lines.feed(b"x"))


def test_a_long_line_is_refused_where_it_is_made() -> None:
    with pytest.raises(ValueError, match=f"at most {MAX_MESSAGE_BYTES} bytes"):
        encode({"value": "x" * MAX_MESSAGE_BYTES})
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode({"value": float("nan")})


def test_a_call_returns_the_value_of_its_reply(pair: tuple[Channel, Channel]) -> None:
    worker, supervisor = pair
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(worker.call, "add", key="k", amount=2)
        request = supervisor.receive()
        assert request == {"id": 1, "op": "add", "key": "k", "amount": 2}
        supervisor.send({"id": 1, "value": 7})
        assert answer.result(10) == 7


def test_a_refused_call_is_a_value_error(pair: tuple[Channel, Channel]) -> None:
    worker, supervisor = pair
    supervisor.send({"id": 1, "error": "no such key"})
    with pytest.raises(ValueError, match="get: no such key"):
        worker.call("get", key="k")


def test_the_reply_to_a_call_that_was_cut_short_is_not_taken_for_the_next_ones(pair: tuple[Channel, Channel]) -> None:
    worker, supervisor = pair
    worker.send({"id": 1, "op": "get"})
    worker._last_id = 1  # as after a KeyboardInterrupt between sending and receiving
    supervisor.send({"id": 1, "value": "old"})
    supervisor.send({"id": 2, "value": "new"})
    assert worker.call("get", key="k") == "new"


def test_what_the_other_end_says_of_itself_is_no_reply_and_is_kept(pair: tuple[Channel, Channel]) -> None:
    worker, supervisor = pair
    for message in ({"op": "until"}, {"op": "leave"}, {"id": 1, "value": "it"}):
        supervisor.send(message)
    assert worker.call("get", key="k") == "it"
    worker.begin_listening()
    supervisor.send({"op": "end"})
    heard = worker.take()
    while len(heard) < 3:
        heard += worker.take()
    assert [message["op"] for message in heard] == ["until", "leave", "end"]


def test_threads_get_their_own_replies(pair: tuple[Channel, Channel]) -> None:
    worker, supervisor = pair

    def serve() -> None:
        for _ in range(200):
            request = supervisor.receive()
            supervisor.send({"id": request["id"], "value": request["number"]})

    server = threading.Thread(target=serve)
    server.start()
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda number: worker.call("echo", number=number), range(200))) == list(range(200))
    server.join(10)


def test_the_end_of_the_other_side_is_told(pair: tuple[Channel, Channel]) -> None:
    worker, supervisor = pair
    supervisor.close()
    with pytest.raises(ChannelClosed, match="the other end has gone"):
        worker.call("get", key="k")
    with pytest.raises(ChannelClosed, match="the other end has gone"):
        worker.receive()


def test_a_malformed_reply_closes_the_channel_with_the_reason() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        channel = Channel(theirs)
        ours.sendall(b"nonsense\n")
        with pytest.raises(ChannelClosed, match="is not JSON"):
            channel.receive()
        assert ours.recv(1) == b""


def test_an_inherited_channel_is_not_passed_on_to_programs() -> None:
    ours, theirs = socket.socketpair()
    theirs.set_inheritable(True)
    with ours:
        channel = Channel.inherited(theirs.detach())
        assert not channel._sock.get_inheritable()
        channel.send({"op": "hello"})
        assert json.loads(ours.recv(100)) == {"op": "hello"}
        channel.close()
