"""What a stranger can do at the ports and sockets of a running job: nothing that lasts, whatever is sent."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import queue
import selectors
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.comm import group
from paceline.comm.messages.json_channel import LineBuffer, decode
from paceline.comm.messages.secure_socket import prove_and_encrypt, prove_token, tls_context
from paceline.comm.messages.token_handshake import TokenHandshake, TokenRefused
from paceline.comm.messages.unproved_connections import MAX_UNPROVED, ByAddress, TokenGate
from paceline.comm.peer_sockets.meeting import _Listener
from paceline.comm.rendezvous.external_launch import KeyValueServer, join_external_launch
from paceline.comm.rendezvous.kv_store import KeyValueStore
from paceline.errors import LaunchError, SyncError
from paceline.launch.coordinator.remote_hosts import RemoteHost, RemoteHosts
from paceline.launch.io.authentication import AuthenticatedListener
from paceline.launch.io.event_loop import EventLoop, MessageStream
from paceline.plain_data import MAX_DEPTH
from paceline.plan import Job
from paceline.worker import external_launch
from paceline.worker.external_launch import _store
from paceline.worker.membership.join_run import open_network_remark
from paceline.world_detection import World
from strangers import TOKEN, turn_until

NUMBERS = st.one_of(st.integers(), st.integers(min_value=10**399, max_value=10**400), st.floats(allow_nan=True))
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=20))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=8,
)
FIELDS = ("op", "id", "key", "keys", "amount", "value", "expected", "worker", "message", "pid", "at", "asked", "step")
OPS = ("set", "get", "add", "check", "compare_set", "said", "started", "exited", "leaving", "ping", "gone", "doing")
MESSAGES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6).flatmap(
    lambda made: st.sampled_from(OPS).map(lambda op: {**made, "op": op})
)


class Anyone:
    """A listener that does nothing, whatever it is told."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    with closing(EventLoop()) as made:
        yield made


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(MESSAGES.map(lambda made: json.dumps(made).encode()), st.binary(max_size=60)))
def test_whatever_is_sent_is_plain_small_data_or_ends_that_connection_alone(line: bytes) -> None:
    try:
        (message,) = LineBuffer().feed(line.replace(b"\n", b" ") + b"\n")
    except ValueError:
        return
    assert isinstance(message, dict)
    json.dumps(message, allow_nan=False)  # every number in it is finite
    KeyValueStore().handle(message)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(MESSAGES)
def test_a_message_of_any_form_costs_a_host_its_own_place_at_most(message: dict[str, Any]) -> None:
    with closing(EventLoop()) as loop:
        ours, theirs = socket.socketpair()
        with theirs:
            hosts: Any = None
            ends: list[Exception] = []
            link = MessageStream(
                ours, loop, on_message=lambda told: hosts.on_message(remote, told), on_close=ends.append
            )
            remote = RemoteHost(link=link, host="b", address="::1", index=1, slots=1)
            other = RemoteHost(link=link, host="c", address="::1", index=2, slots=1)
            anyone: Any = Anyone()
            hosts = RemoteHosts([remote, other], own=[0], slots=1, host=anyone, name="a", lease_s=5.0)
            theirs.sendall(json.dumps(message).encode() + b"\n")
            loop.turn(0.2)
            assert other in list(hosts)
            link.close()


def test_a_late_word_about_a_worker_that_had_ended_before_the_takeover_costs_its_host_nothing() -> None:
    with closing(EventLoop()) as loop:
        ours, theirs = socket.socketpair()
        with theirs:
            link = MessageStream(ours, loop, on_message=lambda _: None, on_close=lambda _: None)
            remote = RemoteHost(link=link, host="b", address="::1", index=1, slots=2, workers={2}, ended=frozenset({1}))
            anyone: Any = Anyone()
            hosts = RemoteHosts([remote], own=[0], slots=1, host=anyone, name="a", lease_s=5.0)
            hosts.on_message(remote, {"op": "doing", "workers": [{"doing": {"worker": 1}}, {"doing": {"worker": 2}}]})
            hosts.on_message(remote, {"op": "said", "worker": 1, "request": {"op": "stuck"}})
            assert list(hosts) == [remote] and hosts.workers_of(remote) == {2}
            hosts.on_message(remote, {"op": "doing", "workers": [{"doing": {"worker": 0}}]})
            assert list(hosts) == [], "of a worker that was never there"
            link.close()


@pytest.mark.parametrize(
    "line",
    [
        b'{"op": %s}' % (b"9" * 400),
        b'{"op": 1e999}',
        b'{"op": Infinity}',
        b'{"op": NaN}',
        b'{"op": -%s}' % (b"9" * 100),
    ],
)
def test_numbers_that_no_message_has_are_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match="a number is"):
        decode(line)


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 900, 200_000])
def test_deep_nesting_is_refused(depth: int) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        decode(b'{"a": ' + b"[" * depth + b"]" * depth + b"}")
    assert decode(b'{"a": ' + b"[" * 60 + b"]" * 60 + b"}")


@pytest.mark.parametrize("error", [OverflowError("x"), IndexError("x"), AttributeError("x"), RecursionError("x")])
def test_a_reader_that_stumbles_over_a_message_ends_that_connection_alone(loop: EventLoop, error: Exception) -> None:
    def read(_: object) -> None:
        raise error

    ours, theirs = socket.socketpair()
    with theirs:
        ends: list[Exception] = []
        MessageStream(ours, loop, on_message=read, on_close=ends.append)
        theirs.sendall(b'{"a": 1}\n{"b": 2}\n')
        turn_until(loop, lambda: bool(ends))
        assert [type(end) for end in ends] == [ValueError] and type(error).__name__ in str(ends[0])


def test_torchruns_workers_on_several_hosts_need_a_token_or_a_private_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    world = World(source="torchrun", worker_rank=0, workers=2, local_rank=0, local_workers=1, job_id="one", head="n1")
    with pytest.raises(LaunchError, match="The job has no token"), _store(world, Job(), 0, lambda _: None):
        pass
    own = dist.HashStore()
    monkeypatch.setattr(external_launch, "_torch_store", lambda *_: own)
    with _store(world, Job(private_network=True), 0, lambda _: None) as store:
        assert store is own


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a process takes another user's id")
def test_names_that_another_user_has_taken_are_passed_over() -> None:
    """That user listens, listens and accepts nothing, or only holds the name."""
    name = f"\0paceline-test-{os.getpid()}"
    taken = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3)]
    try:
        os.seteuid(65534)  # the kernel notes whose socket listens
        for sock, suffix, backlog in zip(taken, ("", ".1", ".2"), (5, 0, None), strict=True):
            sock.bind(name + suffix)
            if backlog is not None:
                sock.listen(backlog)
    finally:
        os.seteuid(0)
    join = {"address": name, "token": None, "timeout_s": 20.0, "log": lambda _: None}
    channel, server = join_external_launch(worker_rank=0, **join)
    other, _ = join_external_launch(worker_rank=1, **join)
    assert channel.call("set", key="a", value="YQ==") is None and other.call("get", key="a") == "YQ=="
    assert server is not None
    server.close()
    for each in (channel, other, *taken):
        each.close()


def test_only_what_was_signed_with_this_runs_key_and_as_an_object_is_unpickled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever else arrives, with its own signature or none, is refused before anything in it is read."""

    class Executed:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "executed"),)

    cpu, own, other = torch.device("cpu"), b"k" * 32, b"o" * 32
    monkeypatch.setattr(group, "_object_key", own)
    assert group.from_bytes(group.to_bytes({"a": 1}), cpu) == {"a": 1}
    whole = group.to_bytes(Executed())
    body = whole[group.SIGNATURE_BYTES :].numpy().tobytes()
    changed = whole.clone()
    changed[-1] ^= 1
    monkeypatch.setattr(group, "_object_key", other)
    forged = [changed, whole[:-1], whole[: group.SIGNATURE_BYTES - 1], whole[:0], group.to_bytes(Executed())]
    monkeypatch.setattr(group, "_object_key", b"")
    forged.append(group.to_bytes(Executed()))
    monkeypatch.setattr(group, "_object_key", own)
    as_snapshot = hmac.digest(own, b"snapshot 0 " + body, hashlib.sha256)
    forged.append(torch.frombuffer(bytearray(as_snapshot + body), dtype=torch.uint8))
    forged.append(torch.frombuffer(bytearray(hmac.digest(own, body, hashlib.sha256) + body), dtype=torch.uint8))
    for one in forged:
        with pytest.raises(SyncError, match="no worker of this run has sent"):
            group.from_bytes(one, cpu)
    assert not (tmp_path / "executed").exists()


def test_a_recorded_handshake_opens_nothing_a_second_time() -> None:
    """Replayed to either side; and a side's own proof, sent back to it, is none."""
    head, member = TokenHandshake(TOKEN, is_head=True), TokenHandshake(TOKEN, is_head=False)
    said_by_member = member.feed(head.greeting)
    said_by_head = head.feed(said_by_member)
    assert member.feed(said_by_head) == b"" and head.wanted == member.wanted == 0
    with pytest.raises(TokenRefused, match="its token is wrong"):
        TokenHandshake(TOKEN, is_head=True).feed(said_by_member)
    again = TokenHandshake(TOKEN, is_head=False)
    assert again.feed(head.greeting) != said_by_member
    with pytest.raises(TokenRefused, match="does not hold the token"):
        again.feed(said_by_head)
    mirrored = TokenHandshake(TOKEN, is_head=False)
    own = mirrored.feed(head.greeting)
    with pytest.raises(TokenRefused, match="does not hold the token"):
        mirrored.feed(own[-32:])


def test_the_head_takes_no_older_tls_and_no_other_cipher() -> None:
    """A stranger in the middle cannot choose them; after the handshake the channel's proof covers them, too."""
    for is_head in (True, False):
        context = tls_context(is_head=is_head)
        assert context.minimum_version == context.maximum_version == ssl.TLSVersion.TLSv1_2
        names = {one["name"] for one in context.get_ciphers() if one["protocol"] == "TLSv1.2"}
        assert names == {"ECDHE-ECDSA-AES256-GCM-SHA384", "ECDHE-ECDSA-AES128-GCM-SHA256"}


def test_every_port_where_strangers_can_come_has_a_long_queue(loop: EventLoop) -> None:
    """Where it is short, the kernel drops a member's SYN in a flood, and that member waits for a second."""
    store = dist.HashStore()
    supervisor = AuthenticatedListener(
        socket.create_server(("127.0.0.1", 0)), TOKEN, loop, on_proved=lambda _: None, say=lambda _: None
    )
    worker = _Listener("127.0.0.1", store, index=0)
    engine = KeyValueServer(("127.0.0.1", 0), TOKEN, lambda _: None)
    granted = min(4096, int(Path("/proc/sys/net/core/somaxconn").read_text()))
    try:
        for sock in (supervisor._sock, worker._sock, engine._listener):
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 64)
            assert int.from_bytes(info[28:32], sys.byteorder) == granted  # of a listening socket: its longest queue
    finally:
        for one in (supervisor, worker, engine):
            one.close()


@pytest.mark.thorough
def test_a_stranger_gets_no_thread_and_a_flood_drives_out_the_oldest_of_its_own_address() -> None:
    admitted, refused = queue.SimpleQueue[socket.socket](), queue.SimpleQueue[tuple[str, str]]()

    def say(address: str, reason: str) -> None:
        refused.put((address, reason))
        raise OSError("the terminal is gone: no log can be written")  # the gate stays open all the same

    gate = TokenGate(socket.create_server(("127.0.0.1", 0)), TOKEN, admit=admitted.put, refused=say)
    place = gate._listener.getsockname()
    threads = threading.active_count()
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(socket.create_connection(place, source_address=("127.0.0.2", 0)))
        flood = [stack.enter_context(socket.create_connection(place)) for _ in range(MAX_UNPROVED + 3)]
        found = [refused.get(timeout=20.0) for _ in range(4)]
        assert {address for address, _ in found} == {"127.0.0.1"} and "512 other connections" in found[0][1]
        assert threading.active_count() == threads
        for one in flood[:4]:  # their greeting was sent, and then the end
            assert len(one.recv(100)) == 40 and one.recv(1) == b""
        prove_token(other, TOKEN, is_head=False)
        admitted.get(timeout=20.0).close()
        flood[-1].sendall(b"PACELIN2" + bytes(64))
        assert refused.get(timeout=20.0) == ("127.0.0.1", "its token is wrong")
        gate.close()
        with pytest.raises(OSError):  # it listens no more
            socket.create_connection(place, timeout=5.0)


def test_the_address_with_most_connections_loses_its_oldest() -> None:
    found = ByAddress[str]()
    for number, address in enumerate("abbcb"):
        found.add(number, address, f"{address}{number}")
    assert (found.pop_oldest(), found.pop(2), found.pop(2), len(found)) == (("b", "b1"), "b2", None, 3)
    assert sorted(found.all()) == ["a0", "b4", "c3"]
    for number in (0, 3, 4):
        found.pop(number)
    with pytest.raises(KeyError):
        found.pop_oldest()


def test_gpus_on_a_network_that_nobody_called_private_are_remarked_upon() -> None:
    gpu = torch.device("cuda", 0)
    said = open_network_remark(gpu, hosts=2, is_private=False)
    assert said is not None and "--private-network" in said
    assert open_network_remark(gpu, hosts=2, is_private=True) is None
    assert open_network_remark(gpu, hosts=1, is_private=False) is None
    assert open_network_remark(torch.device("cpu"), hosts=2, is_private=False) is None


def test_a_relay_that_passes_the_tokens_proof_on_learns_nothing_and_is_found() -> None:
    """It relays the handshake in the clear, and then opens TLS to each side by itself."""
    member, relay_in = socket.socketpair()
    relay_out, head = socket.socketpair()
    results: dict[str, object] = {}

    def side(name: str, sock: socket.socket, is_head: bool) -> None:
        try:
            results[name] = prove_and_encrypt(sock, TOKEN, is_head=is_head)
        except (TokenRefused, OSError) as error:
            results[name] = str(error)

    sides = [threading.Thread(target=side, args=one) for one in (("member", member, False), ("head", head, True))]
    for one in sides:
        one.start()
    _pass_on(relay_out, relay_in, 40)  # greeting
    _pass_on(relay_in, relay_out, 72)  # the member's proof
    _pass_on(relay_out, relay_in, 32)  # the head's proof
    as_head = tls_context(is_head=True).wrap_socket(relay_in, server_side=True)
    as_member = tls_context(is_head=False).wrap_socket(relay_out)
    _pass_on(as_head, as_member, 32)
    _pass_on(as_member, as_head, 32)
    for one in sides:
        one.join()
    assert set(results.values()) == {"another program relays the connection"}
    as_head.close()
    as_member.close()


def test_what_hosts_say_is_encrypted_and_a_changed_byte_ends_the_connection(loop: EventLoop) -> None:
    member, wire_in = socket.socketpair()
    wire_out, head = socket.socketpair()
    seen, spoils, is_over = bytearray(), threading.Event(), threading.Event()

    def wire() -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(wire_in, selectors.EVENT_READ, wire_out)
            selector.register(wire_out, selectors.EVENT_READ, wire_in)
            while not is_over.is_set():
                for key, _ in selector.select(0.05):
                    data = bytearray(key.fileobj.recv(1 << 16))  # type: ignore[union-attr]
                    seen.extend(data)
                    if spoils.is_set() and len(data) > 20:
                        data[20] ^= 1
                    if data:
                        key.data.sendall(data)

    carrier = threading.Thread(target=wire)
    carrier.start()
    sides: dict[bool, ssl.SSLSocket] = {}

    def prove(is_head: bool, sock: socket.socket) -> None:
        sides[is_head] = prove_and_encrypt(sock, TOKEN, is_head=is_head)

    proving = [threading.Thread(target=prove, args=one) for one in ((True, head), (False, member))]
    for one in proving:
        one.start()
    for one in proving:
        one.join()
    heard, ends = list[dict[str, Any]](), list[Exception]()
    reads = MessageStream(sides[True], loop, on_message=heard.append, on_close=ends.append)
    says = MessageStream(sides[False], loop, on_message=heard.append, on_close=lambda _: None)
    says.send({"op": "kill_worker", "text": "x" * 100_000})
    turn_until(loop, lambda: bool(heard))
    assert b"kill_worker" not in seen and heard[0]["op"] == "kill_worker"
    spoils.set()
    says.send({"op": "kill_worker", "worker": 1})
    turn_until(loop, lambda: bool(ends))
    assert len(heard) == 1
    is_over.set()
    carrier.join()
    for one in (reads, says):
        one.close()
    for sock in (wire_in, wire_out):
        sock.close()


def _pass_on(source: socket.socket, target: socket.socket, count: int) -> None:
    data = b""
    while len(data) < count:
        data += source.recv(count - len(data))
    target.sendall(data)
