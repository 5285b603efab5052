"""Messages arrive as they were sent, from nobody who does not know the secret, and a lost listener is noticed."""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest
import torch
import zmq

from paceline.comm.messages import tensor_frames, tensor_messages
from paceline.comm.messages.tensor_messages import ServerLost, TensorClient, TensorServer
from paceline.errors import SyncError

SECRET = b"s" * 32
LIMIT_S = 30.0


class Enough(Exception):
    """A wait is to end."""


def enough() -> None:
    raise Enough


@contextmanager
def echo(
    secret: bytes = SECRET, *, silence_s: float | None = None
) -> Iterator[tuple[str, list[Mapping[str, Any]], threading.Event]]:
    """A listener in a thread that sends back what it is sent: its endpoint, what it was told, and its end."""
    listener, told, ends = TensorServer("127.0.0.1", secret, silence_s=silence_s), [], threading.Event()

    def listen() -> None:
        while not ends.is_set():
            got = listener.receive(0.01)
            if got is not None:
                told.append(got[1].header)
                if got[1].header["op"] == "slow":
                    ends.wait(0.2)
                if got[1].header["op"] == "held":
                    ends.wait()
                listener.send(got[0], got[1].header, got[1].tensors)
        listener.close()

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        yield listener.endpoint, told, ends
    finally:
        ends.set()
        thread.join()


def test_tensors_of_every_kind_come_back_with_the_same_bits() -> None:
    tensors = [
        torch.randn(3, 70_000),
        torch.randn(5, dtype=torch.float64),
        torch.randn(2, 3).to(torch.bfloat16),
        torch.tensor(7),
        torch.zeros(0, 4),
        torch.randn(4, 6).t(),
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(2, dtype=torch.complex128),
        torch.tensor([-3, 4], dtype=torch.int8),
        torch.tensor([-300, 400], dtype=torch.int16),
    ]
    with echo() as (endpoint, _, _), closing(TensorClient(endpoint, SECRET, name="it", timeout_s=10)) as caller:
        answer = caller.answer(caller.begin({"op": "x", "number": 0.1}, tensors))
    assert answer.header["number"] == 0.1
    for sent, came in zip(tensors, answer.tensors, strict=True):
        assert came.dtype == sent.dtype and came.shape == sent.shape and torch.equal(came, sent)


def test_numbers_that_are_not_finite_come_back_as_they_are() -> None:
    sent = {"op": "x", "squared": math.nan, "norms": [1.5, math.inf, [-math.inf]], "told": {"loss": math.nan}}
    with echo() as (endpoint, _, _), closing(TensorClient(endpoint, SECRET, name="it", timeout_s=10)) as caller:
        came = caller.answer(caller.begin(sent, [])).header
    assert {key: str(came[key]) for key in sent} == {key: str(value) for key, value in sent.items()}


def test_a_tensor_of_another_kind_is_refused_by_name() -> None:
    error = pytest.raises(TypeError, match=r"a tensor of torch.float8_e4m3fn .* only float64, ")
    with echo() as (endpoint, _, _), closing(TensorClient(endpoint, SECRET, name="it", timeout_s=10)) as caller, error:
        caller.send({"op": "x"}, [torch.zeros(2, dtype=torch.float8_e4m3fn)])


def test_an_answer_that_nobody_wants_any_more_is_passed_over() -> None:
    with echo() as (endpoint, _, _), closing(TensorClient(endpoint, SECRET, name="it", timeout_s=10)) as caller:
        caller.begin({"op": "first"})
        assert caller.answer(caller.begin({"op": "second"})).header["op"] == "second"


def test_who_does_not_know_the_secret_is_not_heard() -> None:
    with echo() as (endpoint, told, _):
        with pytest.raises(SyncError, match="it does not take this worker in: it holds another token"):
            TensorClient(endpoint, b"t" * 32, name="it", timeout_s=10)
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.connect(endpoint)
        stranger.send_multipart([b'{"op": "steal", "call": 1}', b"x" * 1000])
        stranger.send(b'{"op": "steal", "call": 1}')
        with closing(TensorClient(endpoint, SECRET, name="it", timeout_s=10)) as caller:
            caller.answer(caller.begin({"op": "mine"}))
        assert stranger.poll(100) == 0, "it gets no answer"
        context.destroy(linger=0)
    assert [header["op"] for header in told] == ["mine"]


def test_a_listener_that_ends_is_lost_and_a_wait_may_be_ended() -> None:
    with (
        echo() as (endpoint, _, ends),
        closing(TensorClient(endpoint, SECRET, name="server 3", timeout_s=10)) as caller,
    ):
        caller.answer(caller.begin({"op": "x"}))
        ends.set()
        with pytest.raises(ServerLost, match="server 3 was lost"):
            caller.answer(10**6)

    with echo() as (endpoint, _, _), closing(TensorClient(endpoint, SECRET, name="it", timeout_s=10)) as caller:
        caller._check = enough
        with pytest.raises(Enough):
            caller.answer(10**6)


def test_an_answer_can_be_waited_for_whatever_a_check_says() -> None:
    with echo() as (endpoint, _, _), closing(TensorClient(endpoint, SECRET, name="it", timeout_s=10)) as caller:
        caller._check = enough
        assert caller.answer(caller.begin({"op": "slow"}), checks=False).header["op"] == "slow"
        with pytest.raises(Enough):
            caller.answer(caller.begin({"op": "held"}))


def test_a_wait_for_what_does_not_leave_ends() -> None:
    never, done = zmq.MessageTracker(threading.Event()), threading.Event()
    done.set()
    with (
        echo() as (endpoint, _, ends),
        closing(TensorClient(endpoint, SECRET, name="server 3", timeout_s=10)) as caller,
    ):
        caller.wait_sent(None)
        caller.wait_sent(zmq.MessageTracker(done))
        caller._check = enough
        with pytest.raises(Enough):
            caller.wait_sent(never)
        caller._check, caller._timeout_s = lambda: None, 0.05
        with pytest.raises(SyncError, match="waited 0 s for server 3 to take what was sent"):
            caller.wait_sent(never)
        caller._timeout_s = 10
        ends.set()
        with pytest.raises(ServerLost, match="server 3 was lost"):
            caller.wait_sent(never)


def test_a_connection_that_nobody_closes_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_messages, "LINGER_MS", 0)
    with echo() as (endpoint, _, _):
        caller = TensorClient(endpoint, SECRET, name="it", timeout_s=10)
    caller.send({"op": "x"}, [torch.zeros(1 << 20)])  # nobody is there to take it
    collected = threading.Thread(target=caller._context.destroy, daemon=True)  # as a collection of garbage does
    collected.start()
    collected.join(LIMIT_S)
    assert not collected.is_alive()
    caller.close()  # a second end does nothing


def test_strangers_are_not_counted_whether_they_stay_or_go() -> None:
    listener = TensorServer("127.0.0.1", SECRET)

    def greeted() -> socket.socket:
        stranger = socket.socket(socket.AF_UNIX)
        stranger.settimeout(10)
        stranger.connect(listener.endpoint.removeprefix("ipc://"))
        assert stranger.recv(1), "it is connected"
        return stranger

    with closing(listener), ThreadPoolExecutor(1) as pool:
        staying = greeted()
        assert listener.receive(0.01) is None and listener.num_connected == 0
        making = pool.submit(TensorClient, listener.endpoint, SECRET, name="it", timeout_s=10)
        while not making.done():
            listener.receive(0.01)
        caller = making.result()
        assert listener.num_connected == 1 and listener.had_any
        greeted().close()
        greeted().close()  # by now the first one's end is known
        caller.send({"op": "x"})
        assert heard(listener) == "x" and listener.num_connected == 1
        assert caller._socket.getsockopt(zmq.TCP_KEEPALIVE_IDLE) == 30
        caller.send({"op": "last"})
        caller.close()
        assert heard(listener) == "last", "what was said before the end is heard"
        while listener.num_connected:
            assert listener.receive(10) is None
        staying.close()


def test_who_takes_the_name_of_somebody_who_has_gone_is_a_stranger() -> None:
    listener = TensorServer("127.0.0.1", SECRET)
    with closing(listener), ThreadPoolExecutor(1) as pool:
        making = pool.submit(TensorClient, listener.endpoint, SECRET, name="it", timeout_s=10)
        while not making.done():
            listener.receive(0.01)
        (name,) = listener._known
        making.result().close()
        while listener.num_connected:
            assert listener.receive(10) is None
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.ROUTING_ID, name)
        stranger.connect(listener.endpoint)
        stranger.send(b'{"op": "steal"}')
        assert listener._poll(10), "it has come"
        assert [listener.receive(0.05) for _ in range(4)] == [None] * 4
        context.destroy(linger=0)


def test_who_is_stopped_is_cut_off_where_the_listener_does_not_wait_for_it() -> None:
    with closing(TensorServer("127.0.0.1", SECRET, silence_s=2.0)) as listener:
        child = os.fork()
        if child == 0:
            try:
                caller = TensorClient(listener.endpoint, SECRET, name="it", timeout_s=20.0)
                caller.send({"op": "here"})
                signal.pause()
            finally:
                os._exit(0)
        try:
            deadline, got = time.monotonic() + 20, None
            while got is None and time.monotonic() < deadline:
                got = listener.receive(0.05)
            assert got is not None and listener.is_connected(got[0])
            os.kill(child, signal.SIGSTOP)  # not by itself: what it says is sent by another of its threads
            while listener.is_connected(got[0]) and time.monotonic() < deadline:
                listener.receive(0.05)
            assert not listener.is_connected(got[0])
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_a_listener_that_stands_still_is_lost_where_its_caller_does_not_wait_for_it() -> None:
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            listener = TensorServer("127.0.0.1", SECRET)
            os.write(theirs, listener.endpoint.encode())
            while True:
                if (got := listener.receive(0.05)) is not None:
                    listener.send(got[0], got[1].header)
        finally:
            os._exit(0)
    try:
        endpoint = os.read(ours, 100).decode()
        with closing(TensorClient(endpoint, SECRET, name="it", timeout_s=60, silence_s=1.0)) as caller:
            caller.answer(caller.begin({"op": "here"}))
            os.kill(child, signal.SIGSTOP)
            with pytest.raises(ServerLost, match="it was lost: the connection was closed"):
                caller.answer(caller.begin({"op": "x"}))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ours)
        os.close(theirs)


def test_a_frame_or_a_header_that_is_too_large_ends_its_connection() -> None:
    """So a stranger has ZeroMQ collect a piece at most; a large header travels in pieces."""
    with echo() as (endpoint, _, _):
        with closing(TensorClient(endpoint, SECRET, name="it", timeout_s=10)) as caller:
            text = "x" * (3 * tensor_frames.PIECE_BYTES)
            answer = caller.answer(caller.begin({"op": "x", "text": text}, [torch.arange(3.0)]))
            assert answer.header["text"] == text and torch.equal(answer.tensors[0], torch.arange(3.0))
            with pytest.raises(RuntimeError, match="a header in 65 pieces; at most 67,108,864 bytes travel in one"):
                caller.answer(caller.begin({"op": "x", "text": "x" * tensor_frames.HEADER_BYTES}))
        with closing(TensorClient(endpoint, SECRET, name="it", timeout_s=10)) as caller:
            caller._socket.send(b"x" * (tensor_frames.FRAME_BYTES + 1))
            with pytest.raises(ServerLost, match="it was lost"):
                caller.answer(caller.begin({"op": "x"}))


def test_whose_message_takes_longer_than_the_silence_is_heard_all_the_while() -> None:
    with echo(silence_s=0.5) as (endpoint, _, _), slow_way(endpoint, bytes_per_s=12e6) as way:
        began, sent = time.monotonic(), torch.randn(6_000_000)
        with closing(TensorClient(way, SECRET, name="it", timeout_s=20, silence_s=0.5)) as caller:
            answer = caller.answer(caller.begin({"op": "x"}, [sent]))
        assert time.monotonic() - began > 3 * 0.5, "it did take longer"
        assert torch.equal(answer.tensors[0], sent)


@contextmanager
def slow_way(endpoint: str, *, bytes_per_s: float) -> Iterator[str]:
    """Another endpoint of a listener, from which what is said to it goes on at this rate."""
    place = endpoint.removeprefix("ipc://")

    def carry(source: socket.socket, to: socket.socket, pause_s: float) -> None:
        with suppress(OSError):  # either side is closed
            while said := source.recv(1 << 16):
                to.sendall(said)
                time.sleep(pause_s * len(said))

    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as to:
        to.connect(place)
        listener.bind(f"{place}.slow")  # goes with the server's directory
        listener.listen()
        way = f"ipc://{place}.slow"
        with ThreadPoolExecutor(2) as pool:

            def join() -> None:
                with listener.accept()[0] as source:
                    source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
                    back = pool.submit(carry, to, source, 0.0)
                    carry(source, to, 1 / bytes_per_s)
                    to.shutdown(socket.SHUT_RDWR)
                    back.result()

            joined = pool.submit(join)
            yield way
            joined.result(LIMIT_S)


def heard(listener: TensorServer) -> object:
    while (got := listener.receive(10)) is None:
        pass
    return got[1].header["op"]


def test_between_hosts_nobody_connects_without_the_secret_or_reads_what_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensor_messages, "is_loopback", lambda _: False)
    with closing(TensorServer("127.0.0.1", SECRET)) as listener, ThreadPoolExecutor(1) as pool:
        assert listener.endpoint.startswith("tcp://127.0.0.1:")
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)  # speaks ZeroMQ, and knows no key
        stranger.connect(listener.endpoint)
        stranger.send_multipart([b"paceline"])
        other = pool.submit(TensorClient, listener.endpoint, b"another secret", name="it", timeout_s=1.0)
        while not other.done():
            assert listener.receive(0.01) is None
        with pytest.raises(SyncError):
            other.result()
        making = pool.submit(TensorClient, listener.endpoint, SECRET, name="it", timeout_s=10)
        while not making.done():
            listener.receive(0.01)
        with closing(making.result()) as caller:
            caller.send({"op": "x"}, [torch.arange(3.0)])
            assert heard(listener) == "x" and listener.num_connected == 1
            with socket.socket(fileno=os.dup(next(iter(listener._known.values())))) as seen:
                assert seen.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
        assert stranger.poll(50) == 0, "it is not even greeted"
        stranger.close(linger=0)
        context.term()


@pytest.mark.parametrize(
    "frames",
    [
        [b"[]"],
        [b"not json"],
        [b'{"op": "x", "tensors": [["float32", [-1]]]}', b""],
        [b'{"op": "x", "tensors": [["float32", [1e999]]]}', b""],
        [b'{"op": "x", "tensors": [["float32", %s]]}' % (b"[" * 5000)],
        [b'{"op": "x", "tensors": 5}', b"abc"],
        [b'{"op": {"not_finite": "1e9"}}'],
        [b'{"op": "x", "norm": NaN}'],
        [b'{"op": "x"}', b"abc"],
    ],
)
def test_a_malformed_message_ends_that_connection_alone(frames: list[bytes]) -> None:
    with closing(TensorServer("127.0.0.1", SECRET)) as listener, ThreadPoolExecutor(2) as pool:
        making = [pool.submit(TensorClient, listener.endpoint, SECRET, name="it", timeout_s=10) for _ in range(2)]
        while not all(one.done() for one in making):
            listener.receive(0.01)
        bad, good = (one.result() for one in making)
        with closing(bad), closing(good):
            bad._socket.send_multipart(frames)
            while listener.num_connected > 1:
                assert listener.receive(0.05) is None
            good.send({"op": "x"})
            assert heard(listener) == "x"
