"""Snapshots that outlive workers: slots and their marks, how often, where there is no room, and how all begin again."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.comm.group import SingleWorkerGroup
from paceline.comm.memory_checkpoint import (
    FIRST_BYTE,
    MemoryCheckpoint,
    ReplicationStatus,
    SnapshotHeader,
    SnapshotSlot,
    common_step,
)
from paceline.errors import CheckpointError
from paceline.events import Event, Note, Restarted, StateKept
from paceline.host_memory import free_bytes
from paceline.launch.job.outcome import WorkerExit, lost_worker, verdict
from paceline.launch.snapshots.snapshot_store import SnapshotStore
from paceline.monitor.console.event_lines import event_line
from paceline.plan import Guard
from paceline.runs.restart_loop import RestartBudget, newest_state_source
from paceline.worker.state.memory_checkpointing import (
    MemoryCheckpointer,
    SnapshotReport,
    read_state,
    snapshot_interval,
    state_bytes,
    why_no_snapshots,
    write_state,
)


@pytest.fixture
def memory_checkpoint() -> Iterator[MemoryCheckpoint]:
    with contextlib.closing(MemoryCheckpoint.create("test")) as made:
        yield made


def mark(step: int, **more: Any) -> SnapshotHeader:
    return SnapshotHeader(step=step, index=0, index_bytes=0, **more)


def test_slots_are_filled_in_turn_and_one_that_was_cut_off_does_not_count(memory_checkpoint: MemoryCheckpoint) -> None:
    assert memory_checkpoint.steps == frozenset() and memory_checkpoint.at(10) is None
    first = memory_checkpoint.next
    first.commit(mark(10))
    second = memory_checkpoint.next
    assert second is not first
    second.commit(mark(20))
    assert memory_checkpoint.steps == {10, 20} and memory_checkpoint.next is first
    first.clear()  # and then the worker is killed, in the middle of step 30's
    first.write(FIRST_BYTE, b"torn")
    assert memory_checkpoint.steps == {20} and memory_checkpoint.next is first and memory_checkpoint.at(20) is second


def test_all_places_begin_with_the_newest_step_that_all_have() -> None:
    assert common_step([frozenset({10, 20}), frozenset({20, 30}), frozenset({10, 20})]) == 20
    assert common_step([frozenset({10, 20}), frozenset({20, 30}), frozenset({10})]) is None
    assert common_step([]) is None


def test_a_supervisor_finds_what_all_its_workers_have_and_forgets_what_came_later() -> None:
    with contextlib.closing(SnapshotStore()) as memory_checkpoints:
        held = [MemoryCheckpoint(memory_checkpoints.file_descriptors_for(worker, step=None)) for worker in range(3)]
        assert memory_checkpoints.newest(3) is None
        for worker, steps in enumerate([(10, 20), (10, 20), (10,)]):
            for step in steps:
                held[worker].next.commit(mark(step))
        assert memory_checkpoints.newest(3) == 10 and memory_checkpoints.newest(2) == 20
        memory_checkpoints.keep_only(10)
        assert memory_checkpoints.newest(2) == 10
        assert [held[worker].next.mark for worker in range(3)] == [None] * 3  # not the one that all begin with
        assert [
            SnapshotSlot(memory_checkpoints.file_descriptors_for(worker, step=10)[2]).mark for worker in range(3)
        ] == [mark(10)] * 3
        with pytest.raises(LookupError, match="state of worker 1 after step 11"):
            memory_checkpoints.file_descriptors_for(1, step=11)


def test_one_worker_may_have_what_all_have() -> None:
    with contextlib.closing(SnapshotStore()) as memory_checkpoints:
        held = [MemoryCheckpoint(memory_checkpoints.file_descriptors_for(worker, step=None)) for worker in range(2)]
        held[0].next.commit(mark(7, is_for_all=True))
        assert memory_checkpoints.newest(2) == 7
        assert (
            memory_checkpoints.file_descriptors_for(1, step=7)[2]
            == memory_checkpoints.file_descriptors_for(0, step=7)[2]
        )


def test_what_a_worker_that_has_left_wrote_for_all_counts_until_somebody_else_has_written_as_new() -> None:
    with contextlib.closing(SnapshotStore()) as memory_checkpoints:
        held = [MemoryCheckpoint(memory_checkpoints.file_descriptors_for(worker, step=None)) for worker in range(3)]
        memory_checkpoints.workers_each = 1
        held[0].next.commit(mark(7, is_for_all=True))
        memory_checkpoints.drop(0)
        assert memory_checkpoints.newest(2) == 7, "the only state that there is"
        held[1].next.commit(mark(5, is_for_all=True))
        memory_checkpoints.tidy()
        assert memory_checkpoints.newest(2) == 7
        held[1].next.commit(mark(9, is_for_all=True))
        memory_checkpoints.tidy()
        assert memory_checkpoints.own == (1, 2) and memory_checkpoints.newest(2) == 9
        memory_checkpoints.drop(1)
        memory_checkpoints.file_descriptors_for(1, step=None)  # a successor, which inherits
        held[2].next.commit(mark(11, is_for_all=True))
        memory_checkpoints.tidy()
        assert memory_checkpoints.own == (1, 2), "somebody is in that place"
        memory_checkpoints.drop(1)
        assert memory_checkpoints.own == (2,), "what it kept is older"


def test_a_place_begins_with_what_any_worker_has_kept_there_but_not_with_what_left() -> None:
    """Replicas of two workers: 0 and 2 are at one place, 1 and 3 at the other."""
    with contextlib.closing(SnapshotStore()) as memory_checkpoints:
        held = [MemoryCheckpoint(memory_checkpoints.file_descriptors_for(worker, step=None)) for worker in range(6)]
        kept = {0: (10, 20), 1: (10,), 2: (), 3: (20,), 4: (30,), 5: (30,)}
        for worker, steps in kept.items():
            for step in steps:
                held[worker].next.commit(mark(step))
        assert memory_checkpoints.newest(4) is None  # where each worker has a place of its own
        memory_checkpoints.workers_each = 2
        assert memory_checkpoints.newest(4) == 30
        memory_checkpoints.drop(4)
        memory_checkpoints.drop(5)
        assert memory_checkpoints.newest(4) == 20  # of replica 0's first worker, and of replica 1's second one
        slots = [held[at].at(20) for at in (0, 3, 0, 3)]
        assert [memory_checkpoints.file_descriptors_for(worker, step=20)[2] for worker in range(4)] == [
            slot and slot.fd for slot in slots
        ]
        assert memory_checkpoints.file_descriptors_for(2, step=20)[:2] == tuple(
            slot.fd for slot in held[2].slots
        )  # and fills its own
        copy = memory_checkpoints.room_for(2)
        copy.commit(mark(20))
        assert memory_checkpoints.file_descriptors_for(2, step=20)[2] == copy.fd  # best what it had itself
        memory_checkpoints.keep_only(20)
        assert memory_checkpoints.newest(4) == 20 and held[1].steps == frozenset()
        with pytest.raises(LookupError, match="state of worker 2 after step 10"):
            memory_checkpoints.file_descriptors_for(2, step=10)


def state() -> dict[str, Any]:
    tensors = {
        "whole": torch.arange(12, dtype=torch.float64).reshape(3, 4),
        "crosswise": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,
        "empty": torch.empty(0, 4),
        "single": torch.tensor(2.5),
        "flags": torch.tensor([True, False, True]),
    }
    return {"tensors": tensors, "plain": {"rate": 0.1}, "step": 5}


def test_a_state_comes_back_as_it_was_and_not_when_its_slot_was_filled_anew(
    memory_checkpoint: MemoryCheckpoint,
) -> None:
    was = state()
    slot = memory_checkpoint.next
    slot.commit(write_state(slot, was, step=5, is_for_all=False))
    found = read_state(slot)
    assert (found["plain"], found["step"], set(found["tensors"])) == (was["plain"], 5, set(was["tensors"]))
    for name, tensor in was["tensors"].items():
        back = found["tensors"][name]
        assert back.dtype == tensor.dtype and torch.equal(back, tensor), name
    slot.commit(write_state(slot, was, step=9, is_for_all=False))
    with pytest.raises(CheckpointError, match="whole was prepared too late"):
        found["tensors"]["whole"]
    slot.clear()
    with pytest.raises(CheckpointError, match="is not there any more"):
        read_state(slot)


def told(seconds: float = 0.0, step_s: float = 1.0, **more: Any) -> SnapshotReport:
    fields = {"host": "a", "num_bytes": 0, "free_bytes": None, **more}
    return SnapshotReport(seconds=seconds, step_s=step_s, **fields)


def test_snapshots_take_at_most_a_hundredth_of_the_time_of_the_slowest_and_come_ten_steps_apart_at_least() -> None:
    assert snapshot_interval([told(seconds=0.0001), told(seconds=0.0)]) == 10
    assert snapshot_interval([told(seconds=0.5), told(seconds=0.2)]) == 50
    assert snapshot_interval([told(seconds=0.5, step_s=1.0), told(seconds=0.2, step_s=0.5)]) == 100


def test_two_copies_take_at_most_half_of_what_is_free_on_each_host() -> None:
    fits = [told(num_bytes=100, free_bytes=801), told(num_bytes=100, free_bytes=800)]
    assert why_no_snapshots(fits) == ""
    assert why_no_snapshots([*fits, told(host="b", num_bytes=100, free_bytes=399)]).startswith(
        "two copies of all that the workers"
    )
    assert "of host a hold take 400 B, more than half of the 799 B" in why_no_snapshots([*fits, told(free_bytes=799)])
    assert (
        why_no_snapshots([told(), told(refusal="1 GiB of memory: none")])
        == "host a does not give 1 GiB of memory: none"
    )


class Others:
    """A group of two; the other one says the same as this one, but for `more`."""

    index, size = 0, 2

    def __init__(self, *, shares_memory: bool = False, **more: Any) -> None:
        self.shares_memory, self.more = shares_memory, more

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, dataclasses.replace(value, **self.more)]


class Pretended:
    """A worker that keeps snapshots, and its clock."""

    def __init__(
        self,
        memory_checkpoint: MemoryCheckpoint | None,
        guard: Guard,
        *,
        copy_s: float = 0.0,
        free_bytes: Any = lambda: 10**6,
        is_alone: bool = False,
        **more: Any,
    ) -> None:
        self.now, self.events = 0.0, list[Event]()
        group: Any = SingleWorkerGroup() if is_alone else Others(**more)

        def done() -> None:
            self.now += copy_s

        self.checkpointer = MemoryCheckpointer(
            memory_checkpoint,
            guard,
            is_split=True,
            group=group,
            together=lambda operation: operation(),
            state=state,
            done=done,
            host="a",
            free_bytes=free_bytes,
            emit=self.events.append,
            clock=lambda: self.now,
        )
        self.checkpointer.begin(0)
        self._follows = guard.on_spike == "rollback"

    def run(self, first: int, last: int, *, step_s: float = 1.0) -> list[int]:
        """The steps at which snapshots were taken."""
        found = []
        for step in range(first, last + 1):
            self.now += step_s
            before = len(self.events)
            self.checkpointer.keep(step, is_rollback_kept=self._follows and step % 7 == 0)
            if any(isinstance(one, StateKept) for one in self.events[before:]):
                found.append(step)
        return found


def kept(memory_checkpoint: MemoryCheckpoint | None, guard: Guard, *, steps: int, **more: Any) -> Any:
    """The steps at which snapshots were taken, in a pretended run, and the events."""
    one = Pretended(memory_checkpoint, guard, **more)
    return one.run(1, steps), one.events, one.checkpointer.is_on


def test_when_snapshots_are_taken_follows_from_what_they_cost_or_from_the_plan(
    memory_checkpoint: MemoryCheckpoint,
) -> None:
    found, events, _ = kept(memory_checkpoint, Guard(), steps=40)
    assert found == [2, 12, 22, 32] and memory_checkpoint.steps == {22, 32}
    assert events[-1] == StateKept(step=32, every=10, seconds=0.0, num_bytes=2 * 2 * (128 + 64 + 0 + 64 + 64))
    assert kept(memory_checkpoint, Guard(), steps=100, copy_s=0.3)[0] == [2, 32, 62, 92]
    assert kept(memory_checkpoint, Guard(snapshot_every=3), steps=10, copy_s=0.3)[0] == [3, 6, 9]
    assert kept(memory_checkpoint, Guard(on_spike="rollback"), steps=15)[0] == [7, 14]
    assert kept(memory_checkpoint, Guard(snapshot_every=0), steps=40) == ([], [], False)
    assert kept(None, Guard(), steps=40) == ([], [], False)
    _, (note,), _ = kept(None, Guard(snapshot_every=5), steps=40)
    assert isinstance(note, Note) and "Guard(snapshot_every=5) is not used" in note.text


def test_a_newcomer_comes_to_the_same_snapshots_also_where_it_has_no_memory_for_them(
    memory_checkpoint: MemoryCheckpoint,
) -> None:
    member, newcomer = Pretended(memory_checkpoint, Guard(), copy_s=0.3), Pretended(None, Guard())
    assert member.run(1, 40) == [2, 32]
    newcomer.checkpointer.load_state_dict(member.checkpointer.state_dict())
    newcomer.checkpointer.members_changed()
    assert newcomer.checkpointer.is_on
    assert newcomer.run(41, 75) == [62, 72] and member.run(41, 62) == [62]  # what follows is told by all of them
    assert memory_checkpoint.steps == {32, 62}
    assert not any(isinstance(one, Note) for one in newcomer.events)


def test_the_time_without_steps_after_a_loss_is_not_taken_for_that_of_steps(
    memory_checkpoint: MemoryCheckpoint,
) -> None:
    one = Pretended(memory_checkpoint, Guard(), copy_s=0.3)
    assert one.run(1, 20) == [2]
    one.now += 1000.0
    one.checkpointer.members_changed()
    assert one.run(21, 100) == [32, 62, 92]


@pytest.mark.parametrize("are_left", ["on two hosts", "on one host", "alone"])
def test_no_snapshot_is_written_over_one_whose_successor_has_not_arrived_on_the_next_host(
    memory_checkpoint: MemoryCheckpoint, are_left: str
) -> None:
    for slot in memory_checkpoint.slots:
        slot.note(ReplicationStatus())
    one = Pretended(
        memory_checkpoint,
        Guard(snapshot_every=8),
        shares_memory=are_left == "on one host",
        is_alone=are_left == "alone",
    )
    assert one.run(1, 17) == [8] and memory_checkpoint.steps == {8}
    (note,) = [event for event in one.events if isinstance(event, Note)]
    assert "no snapshot in memory after step 16: the last one, of step 8, is still on its way from host a" in note.text
    newest = memory_checkpoint.newest
    assert newest is not None
    newest.note(ReplicationStatus(step=8, work_s=0.1, took_s=0.5))
    assert one.run(18, 18) == [18] and memory_checkpoint.steps == {8, 18}, (
        "it is asked for again after a quarter of the interval"
    )
    assert isinstance(one.events[-1], StateKept) and one.events[-1].travel_s == 0.5


def test_where_one_host_has_no_room_nobody_keeps_anything_and_that_is_said_once(
    memory_checkpoint: MemoryCheckpoint,
) -> None:
    found, events, is_on = kept(memory_checkpoint, Guard(), steps=40, host="b", num_bytes=10**6)
    assert (found, is_on, memory_checkpoint.steps) == ([], False, frozenset())
    (note,) = events
    assert isinstance(note, Note) and "of host a and of the one before it hold take 1.91 MiB, more" in note.text


def test_what_slots_have_from_before_a_restart_is_no_reason_against_them(memory_checkpoint: MemoryCheckpoint) -> None:
    """Two copies took 42 % of what was free; of what is left then, they would be 72 %."""
    both = 2 * 2 * state_bytes(state())  # of two workers
    first = Pretended(memory_checkpoint, Guard(snapshot_every=3), free_bytes=lambda: int(both / 0.42))
    assert first.run(1, 3) == [3]
    again = Pretended(memory_checkpoint, Guard(snapshot_every=3), free_bytes=lambda: int(both / 0.42) - both)
    again.checkpointer.begin(3)
    assert again.run(4, 6) == [6] and memory_checkpoint.steps == {3, 6}


def test_memory_that_will_not_be_used_is_given_back_but_not_a_snapshot_that_counts(
    memory_checkpoint: MemoryCheckpoint,
) -> None:
    assert kept(memory_checkpoint, Guard(), steps=2)[0] == [2]
    memory_checkpoint.next.reserve(10**5)
    _, (note,), _ = kept(memory_checkpoint, Guard(), steps=2, refusal="10 B of memory: none")
    assert isinstance(note, Note) and memory_checkpoint.steps == {2}
    assert [slot.num_bytes > 0 for slot in memory_checkpoint.slots] == [
        slot.mark is not None for slot in memory_checkpoint.slots
    ]


def test_nobody_counts_a_snapshot_that_another_one_could_not_take(
    memory_checkpoint: MemoryCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(slot: SnapshotSlot, offset: int, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SnapshotSlot, "write", full)
    found, events, is_on = kept(memory_checkpoint, Guard(), steps=40)
    assert (found, is_on, memory_checkpoint.steps) == ([], False, frozenset())
    (note,) = events
    assert isinstance(note, Note) and "No space left on device" in note.text


def test_three_restarts_in_a_row_without_a_step_further_are_enough() -> None:
    patience = RestartBudget()
    assert [patience.allows(step) for step in (5, 5, 4, 6, 6, 6, 6)] == [True, True, True, True, True, True, False]


def test_the_newest_state_counts_and_memory_before_the_disk() -> None:
    assert newest_state_source(None, None) == ("nothing", 0)
    assert newest_state_source(0, None) == ("memory", 0)
    assert newest_state_source(10, 10) == ("memory", 10)
    assert newest_state_source(10, 12) == ("disk", 12)
    assert newest_state_source(None, 12) == ("disk", 12)


def ended(worker: int, *, exit_code: int | None = None, signal: int | None = None, **more: Any) -> WorkerExit:
    fields = {"error": None, "sent_by_us": False, **more}
    return WorkerExit(worker=worker, host="a", pid=7, exit_code=exit_code, signal=signal, peak_memory_bytes=0, **fields)


def test_only_losses_let_all_begin_again() -> None:
    killed, well = ended(0, signal=9), ended(1, exit_code=0)
    echo = ended(1, exit_code=1, error={"echo": True})
    own = ended(1, exit_code=1, error={"echo": False})
    ours = ended(1, signal=9, sent_by_us=True)
    stuck = lost_worker(1, host="a", pid=7, kind="WorkerStuck", message="", sent_by_us=True)
    for exits, again in (
        ([killed, ours], True),
        ([killed, echo], True),
        ([killed, well], True),
        ([killed, own], False),
        ([killed, stuck], False),
        ([echo, ours], False),
        ([well], False),
    ):
        assert verdict(exits, keeps_state=True).may_restart is again, exits
    assert not verdict([killed, ours]).may_restart
    assert killed.cause == "worker 0 (pid 7) killed by signal 9"


def test_the_console_says_where_the_state_came_from() -> None:
    def said(**fields: Any) -> str | None:
        known = {"causes": ["worker 2 (pid 4711) killed by signal 9"], "lost": [2], "workers": 4, "lost_at": 0.0}
        return event_line(Restarted(**{**known, **fields}))

    assert said(at_step=812, step=810, source="memory") == (
        "worker 2 (pid 4711) killed by signal 9 after step 812: all 4 workers start again at step 810 from this host's "
        "memory, 2 steps are done again, no disk read"
    )
    assert said(at_step=812, step=800, source="disk", workers=1) == (
        "worker 2 (pid 4711) killed by signal 9 after step 812: the worker starts again from the checkpoint of step "
        "800 on disk: 12 steps are done again"
    )
    assert said(at_step=0, step=0, source="nothing") == (
        "worker 2 (pid 4711) killed by signal 9 before the first step: all 4 workers start again at the beginning, "
        "nothing was kept or saved: 0 steps are done again"
    )


def test_free_memory_is_the_least_of_the_machine_and_its_groups(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/job"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    assert free_bytes(tmp_path) is None
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    assert free_bytes(tmp_path) == 4000 * 1024
    (group / "memory.max").write_text("3000000\n")
    (group / "memory.current").write_text("2500000\n")
    (group / "memory.stat").write_text("active_file 7\ninactive_file 100000\n")
    assert free_bytes(tmp_path) == 600000
