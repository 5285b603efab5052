"""Snapshots that travel between hosts: whole or not at all, one at a time, and back again where they are wanted."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from paceline.comm.memory_checkpoint import (
    FIRST_BYTE,
    MemoryCheckpoint,
    ReplicationStatus,
    SnapshotHeader,
    SnapshotSlot,
)
from paceline.launch.io.authentication import AuthenticatedConnection
from paceline.launch.io.event_loop import EventLoop
from paceline.launch.job.restart_plan import StoredSnapshot
from paceline.launch.snapshots.snapshot_connection import SnapshotConnection
from paceline.launch.snapshots.snapshot_replication import SnapshotReplication
from paceline.launch.snapshots.snapshot_store import SnapshotStore

TOKEN = b"0123456789abcdef"
LARGE = 48 << 20  # bytes: more than goes through in one turn


class Two:
    """Two hosts, of which the first has workers 0 and 1, and sends what they keep to the second."""

    def __init__(self) -> None:
        self.loop, self.said = EventLoop(), list[str]()
        self.memory_checkpoints = SnapshotStore(), SnapshotStore()
        self.own = [
            MemoryCheckpoint(self.memory_checkpoints[0].file_descriptors_for(worker, step=None)) for worker in range(2)
        ]
        self.first, self.second = (
            SnapshotReplication(memory_checkpoints, TOKEN, self.loop, self.said.append)
            for memory_checkpoints in self.memory_checkpoints
        )
        self.second.open("127.0.0.1")

    def link(self) -> None:
        self.first.replicate_to(("127.0.0.1", self.second.port), "far")

    def keep(self, worker: int, step: int, data: bytes = b"state") -> SnapshotSlot:
        """What a worker does between two steps."""
        slot = self.own[worker].next
        slot.clear()
        slot.write(FIRST_BYTE, data)
        slot.commit(SnapshotHeader(step=step, index=FIRST_BYTE + len(data) - 4, index_bytes=4))
        self.first.kept(worker)
        return slot

    def turn(self, ahead_s: float = 0.0) -> None:
        """One turn of the loop; `ahead_s`: of the clock, for pauses."""
        self.loop.turn(0.05)
        for one in (self.first, self.second):
            one.tick(time.monotonic() + ahead_s)

    def until(self, is_so: Callable[[], bool], *, ahead_s: float = 0.0) -> None:
        deadline = time.monotonic() + 20
        while not is_so():
            assert time.monotonic() < deadline, "it did not come"
            self.turn(ahead_s)

    def copies(self) -> set[tuple[int, int]]:
        return {(one.worker, one.step) for one in self.memory_checkpoints[1].snapshots if one.is_copy}

    def close(self) -> None:
        for one in (self.first, self.second, *self.memory_checkpoints, self.loop):
            one.close()


@pytest.fixture
def two() -> Iterator[Two]:
    with closing(Two()) as made:
        yield made


def content(slot: SnapshotSlot | None) -> bytes:
    assert slot is not None and slot.mark is not None
    found = bytearray(slot.mark.index + slot.mark.index_bytes - FIRST_BYTE)
    slot.read_into(FIRST_BYTE, memoryview(found))
    return bytes(found)


def test_what_workers_keep_lies_on_the_next_host_too_and_they_know_when_it_does(two: Two) -> None:
    early = two.keep(0, 10, b"of before there was a next host")
    assert early.replication_status is None and two.own[0].is_replicated
    two.link()
    two.keep(1, 10, b"b" * LARGE)
    assert not two.own[0].is_replicated and not two.own[1].is_replicated
    two.until(lambda: two.own[0].is_replicated and two.own[1].is_replicated)
    assert two.copies() == {(0, 10), (1, 10)}
    assert content(two.memory_checkpoints[1].find(0, 10)) == b"of before there was a next host"
    assert content(two.memory_checkpoints[1].find(1, 10)) == b"b" * LARGE
    replication_status = (
        two.own[1].next.replication_status if two.own[1].newest is None else two.own[1].newest.replication_status
    )
    assert (
        replication_status is not None
        and replication_status.step == 10
        and replication_status.took_s > 0
        and replication_status.work_s > 0
    )
    two.keep(0, 20)
    assert not two.own[0].is_replicated
    two.until(lambda: two.own[0].is_replicated)
    assert two.copies() == {(0, 10), (0, 20), (1, 10)}, "the one before counts until the next one is whole, and after"


def test_a_snapshot_that_is_overwritten_on_its_way_does_not_count_there(two: Two) -> None:
    two.link()
    slot = two.keep(0, 10, b"a" * LARGE)
    two.until(lambda: bool(two.memory_checkpoints[1]._copies))  # its first bytes have come
    assert two.copies() == set()
    slot.clear()
    slot.write(FIRST_BYTE, b"torn")
    two.keep(1, 10)  # comes behind it
    two.until(lambda: two.own[1].is_replicated)
    assert two.copies() == {(1, 10)}


@pytest.mark.thorough
def test_what_a_lost_connection_cut_off_does_not_count_and_is_sent_again(two: Two) -> None:
    two.link()
    two.keep(0, 10, b"a" * LARGE)
    two.until(lambda: bool(two.memory_checkpoints[1]._copies))
    for incoming in two.second._incoming:
        incoming.close()
    assert two.copies() == set()
    two.turn()
    assert not two.own[0].is_replicated
    two.until(lambda: two.own[0].is_replicated, ahead_s=2.0)
    assert two.copies() == {(0, 10)} and content(two.memory_checkpoints[1].find(0, 10)) == b"a" * LARGE


def test_workers_do_not_wait_for_a_host_that_has_no_room_and_that_is_said_once(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(slot: SnapshotSlot, num_bytes: int) -> None:
        raise OSError(28, "No space left on device")

    two.link()
    monkeypatch.setattr(SnapshotSlot, "reserve", full)
    two.keep(0, 10)
    two.until(lambda: two.own[0].is_replicated)
    two.keep(0, 20)
    two.turn()
    assert two.own[0].is_replicated and two.copies() == set()
    (said,) = two.said
    assert "host far has no room for copies of them (No space left on device)" in said


@pytest.mark.parametrize(
    ("num_bytes", "mark"),
    [
        (1 << 50, {"step": 1, "index": FIRST_BYTE, "index_bytes": 1 << 50}),  # more than any host has
        (1 << 70, {"step": 1, "index": FIRST_BYTE, "index_bytes": 1 << 70}),
        (8, {"step": 1, "index": FIRST_BYTE, "index_bytes": 1 << 50}),  # more than the bytes that come
        (8, {"step": 1, "index": FIRST_BYTE + 16, "index_bytes": -8}),
        (8, {"step": 1, "index": FIRST_BYTE - 8, "index_bytes": 16}),
        (8, {"step": 1 << 70, "index": FIRST_BYTE, "index_bytes": 8}),
        (8, {"step": 1.5, "index": FIRST_BYTE, "index_bytes": 8}),
        (8, {"step": 1, "index": FIRST_BYTE, "index_bytes": 8, "is_for_all": "x"}),
    ],
)
def test_a_snapshot_takes_no_memory_beyond_what_comes_and_what_there_is(
    two: Two, num_bytes: int, mark: dict[str, Any]
) -> None:
    """From a host that holds the token: it is refused, or that connection ends; the supervisor goes on."""
    answers, ends = list[Mapping[str, Any]](), list[str]()

    def proved(sock: socket.socket) -> None:
        def heard(message: Mapping[str, Any]) -> None:
            answers.append(message)

        connection = SnapshotConnection(sock, two.loop, on_message=heard, on_close=ends.append)
        connection.send({"op": "load", "worker": 7, "mark": mark, "bytes": num_bytes})
        if num_bytes == 8:
            connection._put(b"x" * 8)
            connection.send({"op": "whole", "worker": 7, "signature": ""})

    call = AuthenticatedConnection(TOKEN, two.loop, on_proved=proved, on_failed=lambda *why: pytest.fail(str(why)))
    call.begin(socket.AF_INET, ("127.0.0.1", two.second.port))
    is_refused = num_bytes == 1 << 50  # which is said once all has come

    def is_over() -> bool:
        incoming = two.second._incoming
        return bool(ends) or (is_refused and bool(incoming) and "of memory are left" in incoming[0]._receiver._refusal)

    two.until(is_over)
    assert answers == [] and two.copies() == set()
    assert sum(slot.num_bytes for one in two.memory_checkpoints[1]._copies.values() for slot in one.slots) < 1 << 20


def test_workers_do_not_wait_for_a_host_that_cannot_be_reached(two: Two) -> None:
    two.second.close()
    two.link()
    two.keep(0, 10)
    assert not two.own[0].is_replicated
    two.until(lambda: two.own[0].is_replicated, ahead_s=2.0)
    (said,) = two.said
    assert "stay on their own host: host far cannot be reached" in said and "Connection refused" in said


@pytest.mark.thorough
def test_a_host_gets_what_its_workers_begin_with_from_another_one(two: Two) -> None:
    two.link()
    two.keep(0, 10, b"a" * LARGE)
    two.keep(1, 10, b"bbbb")
    two.until(lambda: two.copies() == {(0, 10), (1, 10)})
    done, failed = list[str](), list[str]()
    with (
        closing(SnapshotStore()) as anew,
        closing(SnapshotReplication(anew, TOKEN, two.loop, two.said.append)) as third,
    ):
        at = ("127.0.0.1", two.second.port)
        third.fetch({at: [0, 1]}, 10, done=lambda: done.append("done"), failed=failed.append)
        two.until(lambda: bool(done or failed))
        assert (done, failed) == (["done"], [])
        kept = {one.worker: one for one in anew.snapshots}
        assert kept == {worker: StoredSnapshot(worker=worker, step=10, is_copy=True) for worker in range(2)}
        assert content(SnapshotSlot(anew.file_descriptors_for(0, step=10)[2])) == b"a" * LARGE
        third.fetch({at: [1]}, 11, done=lambda: done.append("more"), failed=failed.append)
        two.until(lambda: len(done + failed) > 1)
    assert done == ["done"]
    assert failed[0].startswith("the state of worker 1 after step 11 did not come from 127.0.0.1: it is not there")


def test_nobody_begins_where_there_is_no_room_for_what_was_fetched(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(slot: SnapshotSlot, num_bytes: int) -> None:
        raise OSError(28, "No space left on device")

    two.link()
    two.keep(0, 10)
    two.until(lambda: two.copies() == {(0, 10)})
    monkeypatch.setattr(SnapshotSlot, "reserve", full)
    done, failed = list[str](), list[str]()
    with (
        closing(SnapshotStore()) as anew,
        closing(SnapshotReplication(anew, TOKEN, two.loop, two.said.append)) as third,
    ):
        at = ("127.0.0.1", two.second.port)
        third.fetch({at: [0]}, 10, done=lambda: done.append("done"), failed=failed.append)
        two.until(lambda: bool(done or failed))
    assert done == []
    assert failed[0].endswith("did not come from 127.0.0.1: no room for it here (No space left on device)")


def test_nobody_without_the_token_gets_anything(two: Two) -> None:
    two.link()
    two.keep(0, 10)
    two.until(lambda: two.copies() == {(0, 10)})
    done, failed = list[str](), list[str]()
    with (
        closing(SnapshotStore()) as anew,
        closing(SnapshotReplication(anew, b"another token", two.loop, two.said.append)) as third,
    ):
        at = ("127.0.0.1", two.second.port)
        third.fetch({at: [0]}, 10, done=lambda: done.append("done"), failed=failed.append)
        two.until(lambda: bool(done or failed))
    assert done == [] and "it holds another token than this host" in failed[0]


def test_what_its_sender_has_not_signed_does_not_count(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody between the hosts has changed what will be unpickled."""
    write = SnapshotSlot.write

    def changed(slot: SnapshotSlot, offset: int, data: memoryview | bytes) -> None:
        is_copy = slot in two.memory_checkpoints[1]._copies[0].slots if two.memory_checkpoints[1]._copies else False
        write(slot, offset, bytes(data).replace(b"good", b"evil") if is_copy else data)

    monkeypatch.setattr(SnapshotSlot, "write", changed)
    two.link()
    two.keep(0, 10, b"good")
    two.until(lambda: two.first._neighbor is not None and two.first._neighbor._num_failures > 0)
    assert two.copies() == set() and not two.own[0].is_replicated
    monkeypatch.undo()
    two.until(lambda: two.own[0].is_replicated, ahead_s=2.0)
    assert content(two.memory_checkpoints[1].find(0, 10)) == b"good"


def test_a_snapshot_whose_worker_leaves_while_it_travels_goes_into_no_other_file(two: Two) -> None:
    two.link()
    two.keep(0, 10, b"a" * LARGE)
    two.until(lambda: bool(two.memory_checkpoints[1]._copies))  # its first bytes have come
    fds = [slot.fd for slot in two.memory_checkpoints[1]._copies[0].slots]
    two.memory_checkpoints[1].drop(0)  # the other one has not heard of it yet
    other = os.memfd_create("another worker's")
    try:
        for fd in fds:
            os.dup2(other, fd)  # the system gives their numbers to whatever is opened next
        two.keep(1, 10)
        two.until(lambda: two.own[1].is_replicated, ahead_s=2.0)
        assert os.fstat(other).st_size == 0
    finally:
        for fd in {*fds, other}:
            os.close(fd)


def test_when_the_next_host_changes_the_newest_snapshot_goes_there_too(two: Two) -> None:
    two.link()
    two.keep(0, 10)
    two.keep(0, 20)
    two.until(lambda: two.own[0].is_replicated)
    with (
        closing(SnapshotStore()) as other,
        closing(SnapshotReplication(other, TOKEN, two.loop, two.said.append)) as third,
    ):
        third.open("127.0.0.1")
        two.first.replicate_to(("127.0.0.1", third.port), "third")
        assert not two.own[0].is_replicated
        two.until(lambda: two.own[0].is_replicated)
        assert [one.step for one in other.snapshots] == [20]
        two.first.replicate_to(None)
        assert two.own[0].is_replicated and [slot.replication_status for slot in two.own[0].slots] == [None, None]


def test_slots_say_how_far_they_are_without_touching_their_mark(tmp_path: Path) -> None:
    with closing(MemoryCheckpoint.create("test")) as memory_checkpoint:
        slot = memory_checkpoint.next
        slot.note(ReplicationStatus())
        assert (
            slot.mark is None and slot.replication_status == ReplicationStatus() and memory_checkpoint.is_replicated
        ), "there is nothing yet"
        slot.commit(SnapshotHeader(step=5, index=FIRST_BYTE, index_bytes=0))
        assert not memory_checkpoint.is_replicated
        slot.note(ReplicationStatus(step=5, work_s=0.5, took_s=1.5))
        assert memory_checkpoint.is_replicated and slot.mark is not None and slot.mark.step == 5
        memory_checkpoint.next.commit(SnapshotHeader(step=9, index=FIRST_BYTE, index_bytes=0))
        assert memory_checkpoint.is_replicated, "the other one is to stay here"
        slot.note(None)
        assert slot.replication_status is None and slot.mark is not None
