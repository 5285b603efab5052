"""What the pool makes of its queue, of runs that end, and of files that others write, without a process of a run."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import run_lock
from paceline.errors import PlanError
from paceline.pool import service
from paceline.pool.devices import NodeOffer
from paceline.pool.node_agent import NodeAgent
from paceline.pool.node_files import NodeRecord, PartRecord, WantedParts, make_node_dir
from paceline.pool.part_control import Presence
from paceline.pool.pool_run import PoolRun
from paceline.pool.pool_state import PoolRecord, RunEntry
from paceline.pool.run_control import Observed
from paceline.pool.serve import serve
from paceline.pool.service import Pool

RUN = PoolRun(
    name="first",
    command=("train.py",),
    folder="/",
    environment={},
    run_dir="/nowhere/first",
    script="train.py",
    least=1,
    most=4,
    workers_each=1,
    submitted=2.0,
)


class PoolScene:
    """A pool of a folder, without nodes, and what it says."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, list[str]()
        self.pool = Pool(folder, agent=None, say=self.said.append)

    def entry(self, name: str) -> RunEntry:
        return PoolRecord.load(self.folder).runs[name]

    def node(self, name: str, *, slots: int) -> None:
        """Have a node there, whose agent answers and does nothing else."""
        run_lock.hold(make_node_dir(self.folder, name))
        NodeRecord(name=name, host=name, slots=slots, beat=1).save(self.folder)

    def close(self) -> None:
        self.pool.close()
        for folder in (self.folder / "nodes").glob("*"):
            run_lock.release(folder)

    def turns(self, count: int) -> None:
        """Serve for so many turns, and then leave it as kill -9 does."""
        left = iter(range(count))
        with pytest.raises(StopIteration):
            self.pool.run(lambda: next(left) < 0)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolScene]:
    monkeypatch.setattr(service, "LOOK_S", 0.0)
    RUN.add_to(tmp_path)
    made = PoolScene(tmp_path)
    yield made
    made.close()


def test_runs_stay_while_the_queue_is_away_and_the_pool_goes_on(scene: PoolScene) -> None:
    queue, away = scene.folder / "queue", scene.folder / "away"
    scene.turns(1)
    queue.rename(away)
    scene.turns(3)
    assert list(PoolRecord.load(scene.folder).runs) == ["first"]
    assert sum("cannot be listed" in text for text in scene.said) == 1
    away.rename(queue)
    scene.turns(1)
    assert not any("is taken out" in text for text in scene.said)
    RUN.remove_from(scene.folder)
    scene.turns(1)
    assert scene.said[-1] == "first is taken out"


def test_a_disk_that_fails_ends_neither_the_pool_nor_its_runs(
    scene: PoolScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataclasses.replace(RUN, name="second", run_dir="/nowhere/second").add_to(scene.folder)
    looked_at: list[str] = []

    def fails(run: PoolRun) -> Observed:
        looked_at.append(run.name)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(service, "observe", fails)
    scene.turns(1)
    assert looked_at == ["first", "second"]
    monkeypatch.setattr(scene.pool, "_read_queue", lambda: fails(RUN))
    scene.turns(2)
    assert [text for text in scene.said if "Input/output" in text][-1].startswith("the pool's files cannot be read")
    assert {entry.phase for entry in PoolRecord.load(scene.folder).runs.values()} == {"waiting"}


@pytest.mark.parametrize(
    ("presence", "seen", "phase", "losses"),
    [
        (Presence(lost_node="b"), Observed(), "waiting", 0),  # before it has written a record
        (Presence(lost_node="b"), Observed(state="stopped", exit_code=130), "waiting", 0),  # that of an earlier start
        (Presence(lost_node="b"), Observed(state="running"), "waiting", 0),
        (Presence(lost_node="b", exit_code=1), Observed(state="failed", exit_code=1), "failed", 0),
        (Presence(lost_node="b"), Observed(state="finished", exit_code=0), "finished", 0),
        (Presence(), Observed(), "waiting", 1),  # its agent was killed before it started the part
        (Presence(problem="no such folder"), Observed(), "failed", 0),
        (Presence(exit_code=2), Observed(), "failed", 0),
        (Presence(), Observed(state="stopped", exit_code=130), "stopped", 0),
    ],
)
def test_what_becomes_of_a_run_whose_parts_are_gone(
    scene: PoolScene, monkeypatch: pytest.MonkeyPatch, presence: Presence, seen: Observed, phase: str, losses: int
) -> None:
    scene.pool.look()
    entry = scene.pool._entry("first")
    entry.phase = "running"
    presence.is_there = False
    monkeypatch.setattr(service, "observe", lambda run: seen)
    monkeypatch.setattr(scene.pool._parts, "look_at", lambda *of: presence)
    monkeypatch.setattr(service, "UNCLEAR_S", -1.0)
    scene.pool.look()
    assert (entry.phase, entry.losses) == (phase, losses), scene.said


@pytest.mark.parametrize(
    ("state", "code", "phase"),
    [("stopped", 75, "waiting"), ("stopped", 143, "waiting"), ("finished", 0, "finished"), ("failed", 1, "failed")],
)
def test_what_becomes_of_a_run_that_was_asked_to_leave(
    scene: PoolScene, monkeypatch: pytest.MonkeyPatch, state: str, code: int, phase: str
) -> None:
    scene.pool.look()
    entry = scene.pool._entry("first")
    entry.phase = "leaving"
    monkeypatch.setattr(service, "observe", lambda run: Observed(state=state, exit_code=code))
    monkeypatch.setattr(scene.pool._parts, "look_at", lambda *of: Presence(is_there=False, exit_code=code))
    scene.pool.look()
    assert entry.phase == phase, "an error of the script is no save"


def rows_of(scene: PoolScene) -> list[tuple[int, int]]:
    rows = map(json.loads, (scene.folder / "decisions.jsonl").read_text().splitlines())
    return [(row["before"], row["after"]) for row in rows]


def test_a_run_that_was_lost_and_gets_the_same_again_has_a_row_for_its_end_and_for_its_start(
    scene: PoolScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.node("a", slots=1)
    scene.pool.look()
    entry = scene.pool._entry("first")
    monkeypatch.setattr(service, "observe", lambda run: Observed(state="lost"))
    entry.parts.clear()  # its part has ended
    scene.pool.look()
    assert rows_of(scene) == [(0, 1), (1, 0), (0, 1)]
    assert entry.phase == "running" and entry.why == "first starts with 1 replica on node a."


def test_a_run_that_goes_on_with_another_batch_keeps_its_devices_and_says_why(
    scene: PoolScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.node("a", slots=1)
    scene.pool.look()
    entry = scene.pool._entry("first")
    entry.phase, entry.moves, entry.why = "leaving", dict(entry.shares), "first goes from batches of 16 samples to 32"
    monkeypatch.setattr(service, "observe", lambda run: Observed(state="stopped", exit_code=75))
    entry.parts.clear()
    scene.pool.look()
    assert rows_of(scene) == [(0, 1)]
    assert (entry.phase, entry.replicas) == ("running", 1)
    assert entry.why == "first goes from batches of 16 samples to 32"


def test_a_run_that_never_begins_fails_at_the_third_time(scene: PoolScene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene.pool._parts, "look_at", lambda *of: Presence(is_there=False))
    scene.pool.look()
    for phase in ("waiting", "waiting", "failed"):
        scene.pool._entry("first").phase = "running"
        scene.pool.look()
        assert scene.entry("first").phase == phase


def test_a_look_at_a_pool_in_which_nothing_happens_reads_and_writes_no_file(
    scene: PoolScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.node("a", slots=0)
    for number in range(20):
        dataclasses.replace(RUN, name=f"more-{number}", run_dir=f"/nowhere/{number}").add_to(scene.folder)
    scene.turns(2)
    calls: list[str] = []
    for kind, method in ((PoolRecord, "load"), (NodeRecord, "load"), (PoolRun, "load"), (PoolRecord, "save")):
        what, real = f"{kind.__name__}.{method}", getattr(kind, method)
        monkeypatch.setattr(kind, method, lambda *of, what=what, real=real: (calls.append(what), real(*of))[1])
    monkeypatch.setattr(service, "observe", lambda run: calls.append(run.name) or Observed())
    scene.turns(3)
    scene.pool._next_decision = 0.0
    scene.turns(1)
    assert calls == []
    before = PoolRecord.load(scene.folder).updated
    calls.clear()
    scene.pool._saved_at -= service.SAVE_AGAIN_S
    scene.pool._next_decision = 0.0
    scene.turns(1)
    assert calls == ["PoolRecord.save"]
    assert PoolRecord.load(scene.folder).updated > before, "its time goes on"


def test_what_a_turn_has_changed_is_written_once_and_before_a_node_is_told(
    scene: PoolScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        dataclasses.replace(RUN, name=f"more-{number}", run_dir=f"/nowhere/{number}").add_to(scene.folder)
    scene.node("a", slots=21)
    order: list[str] = []
    save, tell = PoolRecord.save, WantedParts.save
    monkeypatch.setattr(PoolRecord, "save", lambda *of: (order.append("record"), save(*of)))
    monkeypatch.setattr(WantedParts, "save", lambda *of: (order.append("wanted"), tell(*of)))
    scene.turns(1)
    assert order == ["record", "wanted"]
    assert all(one.parts for one in PoolRecord.load(scene.folder).runs.values())


def test_a_name_that_comes_again_is_looked_at_again(scene: PoolScene, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter((5, 7))
    monkeypatch.setattr(service, "observe", lambda run: Observed(state="stopped", step=next(steps)))
    scene.turns(2)
    assert scene.pool._entry("first").step == 5
    RUN.remove_from(scene.folder)
    scene.turns(1)
    RUN.add_to(scene.folder)
    scene.turns(1)
    assert scene.pool._entry("first").step == 7


def lose_the_lock(folder: Path) -> int:
    """Have the file server take the pool's lock, and give it to another open file, which is returned."""
    mine = run_lock._held[os.path.realpath(folder)]
    other = os.open(folder / ".lock", os.O_RDWR | os.O_CLOEXEC)
    for file, kind in ((mine, fcntl.F_UNLCK), (other, fcntl.F_WRLCK)):
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack(run_lock.FLOCK, kind, os.SEEK_SET, 0, 0, 0))
    return other


def test_a_pool_that_loses_its_lock_within_a_turn_writes_and_tells_nothing(
    scene: PoolScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.node("a", slots=1)
    files = list[int]()
    bring_about = scene.pool._parts.bring_about

    def stands_still(*of: Any) -> None:
        files.append(lose_the_lock(scene.folder))
        PoolRecord(host="elsewhere", pid=7, term=2).save(scene.folder)
        bring_about(*of)

    monkeypatch.setattr(scene.pool._parts, "bring_about", stands_still)
    with pytest.raises(PlanError, match="has another pool now: process 7 on elsewhere"):
        scene.pool.look()
    os.close(files.pop())
    assert PoolRecord.load(scene.folder).host == "elsewhere"
    assert WantedParts.load(scene.folder, "a") is None


def test_a_pool_without_its_lock_ends_before_the_other_one_has_written(scene: PoolScene) -> None:
    file = lose_the_lock(scene.folder)
    try:
        with pytest.raises(PlanError, match=r"has another pool now\. This one ends"):
            scene.turns(1)
    finally:
        os.close(file)


def test_a_pool_that_took_over_goes_on_when_the_former_one_writes_once_more(scene: PoolScene) -> None:
    scene.turns(1)
    former = PoolRecord.load(scene.folder)
    scene.pool.close()
    scene.pool = Pool(scene.folder, agent=None, say=scene.said.append)
    scene.turns(1)
    assert PoolRecord.load(scene.folder).term == former.term + 1
    former.host = "elsewhere"
    former.save(scene.folder)
    scene.turns(1)
    assert PoolRecord.load(scene.folder).term == former.term + 1


def test_a_pool_that_cannot_see_its_lock_waits(scene: PoolScene, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(file: int) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    scene.turns(1)
    before = PoolRecord.load(scene.folder)
    dataclasses.replace(RUN, name="second").add_to(scene.folder)
    with monkeypatch.context() as patched:
        patched.setattr(run_lock, "_take", fails)
        scene.turns(2)
        assert PoolRecord.load(scene.folder) == before
    scene.turns(1)
    assert list(PoolRecord.load(scene.folder).runs) == ["first", "second"]


def test_a_folder_on_a_disk_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def has_none(*of: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "fcntl", has_none)
    with pytest.raises(PlanError, match="on a disk without file locks"):
        serve(tmp_path, NodeOffer(slots=1, cores=1), say=lambda text: None)
    with pytest.raises(PlanError, match="on a disk without file locks"):
        Pool(tmp_path, agent=None, say=lambda text: None)
    monkeypatch.undo()
    assert not run_lock.is_held(tmp_path)
    Pool(tmp_path, agent=None, say=lambda text: None).close()


def test_a_pool_that_is_asked_to_end_twice_waits_for_its_runs_no_longer(scene: PoolScene) -> None:
    scene.node("a", slots=1)
    scene.pool.look()
    assert scene.entry("first").phase == "running"
    asked = iter((False, False, True))  # its agent never says that the part has ended
    scene.pool.run(lambda: True, lambda: next(asked, True))
    assert scene.said[-1] == "asked again: the pool does not wait until first have saved and ended"
    record = PoolRecord.load(scene.folder)
    wanted = WantedParts.load(scene.folder, "a")
    assert record.has_ended and record.runs["first"].phase == "leaving"
    assert wanted is not None and wanted.parts["first"].leaves


def test_a_pool_whose_disk_fails_while_it_ends_waits_for_its_runs_all_the_same(
    scene: PoolScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.node("a", slots=1)
    scene.pool.look()
    real, fails, start = scene.pool._nodes.look, [True, False], scene.entry("first").parts["a"].start

    def look() -> bool:
        if fails.pop(0):
            raise OSError(errno.EIO, "Input/output error")
        part = NodeRecord(name="a", host="a", slots=1, beat=2, parts={"first": PartRecord(start=start, has_ended=True)})
        part.save(scene.folder)
        return real()

    monkeypatch.setattr(scene.pool._nodes, "look", look)
    scene.pool.run(lambda: True)
    assert not fails and scene.entry("first").phase == "waiting"


def test_a_pool_that_is_seen_at_work_says_how_many_devices_it_has(tmp_path: Path) -> None:
    agent = NodeAgent(tmp_path, NodeOffer(slots=3, cores=3), say=lambda text: None)
    pool = Pool(tmp_path, agent=agent, say=lambda text: None)
    try:
        record = PoolRecord.load(tmp_path)
        assert record.is_alive(tmp_path)
        assert (record.slots, [node.slots for node in record.nodes.values()]) == (3, [3])
    finally:
        agent.leave(lambda: False)
        pool.close()


def test_a_pool_whose_queue_is_gone_is_not_begun_without_its_runs(tmp_path: Path) -> None:
    PoolRecord(host="a", pid=7, runs={"first": RunEntry(phase="running")}).save(tmp_path)
    with pytest.raises(PlanError, match=r"has runs \(first\), and their queue .* is not there"):
        Pool(tmp_path, agent=None, say=lambda text: None)
    PoolRecord(host="a", pid=7, runs={"first": RunEntry(phase="finished")}).save(tmp_path)
    Pool(tmp_path, agent=None, say=lambda text: None).close()
