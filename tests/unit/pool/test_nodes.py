"""Which nodes a pool has: those that go on, by their own counters and the pool's own clock."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from paceline import run_lock
from paceline.pool import nodes
from paceline.pool.node_files import NodeRecord, WantedPart, WantedParts, make_node_dir, node_dir
from paceline.pool.nodes import SILENCE_S, Nodes


class Watched:
    """A pool's view of its nodes, and a clock."""

    def __init__(self, pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pool, self.said, self.now = pool, list[str](), time.monotonic()
        self.locked = {pool}
        monkeypatch.setattr(nodes.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(run_lock, "is_held", lambda path: path in self.locked)
        self.nodes = Nodes(pool, own="a", say=self.said.append)

    def beat(self, name: str, number: int, *, slots: int = 2, has_left: bool = False) -> None:
        make_node_dir(self.pool, name)
        self.locked.add(node_dir(self.pool, name))
        NodeRecord(name=name, host=name, slots=slots, beat=number, has_left=has_left).save(self.pool)

    def after(self, seconds: float) -> bool:
        self.now += seconds
        return self.nodes.look()


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(tmp_path, monkeypatch)


def test_a_node_that_comes_goes_and_comes_back_is_a_reason_to_decide(watched: Watched) -> None:
    watched.beat("b", 1)
    assert watched.after(0.1) and not watched.after(0.1)
    assert watched.nodes.is_here("b") and [*watched.nodes.here] == ["b"]
    watched.locked.discard(node_dir(watched.pool, "b"))  # its process was killed, and the kernel has freed the lock
    assert watched.after(0.1) and not watched.nodes.is_here("b")
    assert {name: entry.state for name, entry in watched.nodes.entries({"b": 1}).items()} == {"b": "silent"}
    assert watched.nodes.entries({}) == {}
    watched.beat("b", 2)
    assert watched.after(0.1) and watched.nodes.is_here("b")
    watched.beat("b", 3, has_left=True)
    assert watched.after(0.1) and not watched.nodes.is_here("b")
    assert watched.said == [
        "node b is here, with 2 devices",
        "node b does not answer: its devices do not count",
        "node b is here, with 2 devices",
        "node b has left",
    ]


def test_a_counter_that_stands_still_is_silence_but_not_while_the_pool_itself_stood_still(watched: Watched) -> None:
    watched.beat("b", 1)
    watched.after(0.1)
    watched.after(10 * SILENCE_S)  # the folder hung for both, or the pool was stopped
    assert watched.nodes.is_here("b")
    watched.beat("b", 2)
    watched.after(1.0)
    for _ in range(int(SILENCE_S) - 1):
        watched.after(1.0)
    assert watched.nodes.is_here("b")
    watched.after(1.5)
    assert not watched.nodes.is_here("b")


def test_where_the_disk_has_no_locks_counters_alone_tell(watched: Watched) -> None:
    watched.beat("b", 1)
    watched.locked.clear()
    watched.after(0.1)
    assert watched.nodes.is_here("b")


def test_what_is_wanted_is_written_when_it_changes(watched: Watched) -> None:
    watched.beat("b", 1)
    watched.after(0.1)
    part = WantedPart(start=1, submitted=1.0, replicas=2, gpus=("0", "1"), shares={"b": 2})
    watched.nodes.want({"b": {"run": part}})
    file = node_dir(watched.pool, "b") / "wanted.json"
    before = file.stat().st_ino
    assert WantedParts.load(watched.pool, "b") == WantedParts(parts={"run": part})
    watched.nodes.want({"b": {"run": part}})
    assert file.stat().st_ino == before
    watched.nodes.want({})
    assert WantedParts.load(watched.pool, "b") == WantedParts()


def test_a_damaged_file_is_told_once_and_leaves_the_node_as_it_was(watched: Watched) -> None:
    watched.beat("b", 1)
    watched.after(0.1)
    (node_dir(watched.pool, "b") / "node.json").write_text("[")
    watched.after(0.1)
    watched.after(0.1)
    assert watched.nodes.is_here("b")
    assert len([text for text in watched.said if "node.json cannot be read" in text]) == 1
