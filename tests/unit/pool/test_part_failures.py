"""What becomes of the parts of runs on nodes that are lost, are silent, or do not do what they are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.pool.leave_requests import LEAVE_S
from paceline.pool.node_files import PartRecord
from paceline.pool.part_control import (
    ENDS_S,
    GONE_S,
    LOST_S,
    START_S,
)
from pool_parts import RUN, FakeNodes, Scene


def test_a_part_on_a_silent_node_counts_while_its_run_shows_life(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, FakeNodes(a=None, b=None), run=RUN)
    both = {"a": 2, "b": 2}
    scene.to(run=both)
    scene.at_work("run", a=2)
    scene.to(run=both)
    scene.at_work("run", a=2, b=2)
    scene.nodes.silence("b")
    for _ in range(3):
        assert scene.look().is_there and scene.shares() == both, "its agent alone is gone"
        scene.now += GONE_S
    scene.at_work("run", a=2)
    scene.look()
    scene.now += LOST_S + 1
    assert scene.look().is_there and scene.shares() == {"a": 2}
    scene.nodes.silence("a")
    scene.locked.add(Path("/nowhere/run"))
    for _ in range(3):
        assert scene.look().is_there, "a process has its lock"
        scene.now += GONE_S
    scene.locked.clear()
    scene.look()
    scene.now += GONE_S + 1
    presence = scene.look()
    assert (presence.is_there, presence.lost_node, presence.exit_code) == (False, "a", None)


def test_a_run_that_was_taken_out_on_a_lost_node_is_gone_when_its_lock_is_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scene = Scene(monkeypatch, FakeNodes(a=None), run=RUN)
    scene.to(run={"a": 2})
    scene.at_work("run", a=2)
    scene.locked.add(Path("/nowhere/run"))
    scene.restart(tmp_path)
    scene.take_out("run")
    scene.nodes.silence("a")
    for _ in range(3):
        scene.parts.look_at_parting()
        assert scene.parts.held() == {"a": 2}, "a process has its lock"
        scene.now += GONE_S + 1
    scene.locked.clear()
    scene.parts.look_at_parting()
    scene.now += GONE_S + 1
    scene.parts.look_at_parting()
    assert scene.parts.held() == {}


def test_a_run_that_cannot_be_started_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, FakeNodes(a=None), run=RUN)
    scene.to(run={"a": 1})
    part = scene.nodes.views["a"].record.parts["run"]
    part.pid, part.problem = 0, "it cannot be started: no such folder"
    scene.nodes.ends("a", "run", 2)
    assert scene.look().problem == "it cannot be started: no such folder"


def test_a_run_whose_node_does_not_start_it_gives_its_devices_back(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, FakeNodes(a=None, b=None), run=RUN, other=RUN)
    scene.nodes.is_slow = True
    scene.to(run={"a": 2})
    for _ in range(int(START_S)):
        assert scene.look().is_there and scene.entries["run"].phase == "running"
        scene.now += 1.0
    scene.now += 1.0
    scene.look()
    scene.to(run={"a": 2}, other={"a": 2})
    assert scene.entries["run"].phase == "leaving" and scene.nodes.wanted["a"]["run"].leaves
    assert scene.parts.held() == {"a": 2}, "as its agent may be about to start it"
    assert scene.said == [
        "node a has not started its part of run in 60 s; its agent says why. It is tried there again in 60 s"
    ]
    scene.nodes.act()
    assert not scene.look().is_there and scene.parts.held() == {} and scene.nodes.starts == []
    scene.entries["run"].phase = "waiting"
    scene.to(run={"a": 2})
    assert scene.entries["run"].phase == "waiting", "not there, for now"
    scene.to(run={"b": 2})
    assert scene.shares() == {"b": 2}
    scene.now += START_S + 1
    scene.nodes.act()
    scene.to(run={"b": 2}, other={"a": 2})
    assert scene.shares("other") == {"a": 2}, "other runs start there"


@pytest.mark.parametrize("has_former", [False, True])
def test_a_node_that_never_does_what_it_is_told_does_not_hold_its_devices_for_ever(
    monkeypatch: pytest.MonkeyPatch, has_former: bool
) -> None:
    scene = Scene(monkeypatch, FakeNodes(a=None), run=RUN)
    scene.nodes.is_slow = True
    if has_former:
        scene.nodes.views["a"].record.parts["run"] = PartRecord(start=-1, pid=1)
    scene.to(run={"a": 2})
    for _ in range(int(START_S + LEAVE_S)):
        assert scene.look().is_there
        scene.now += 1.0
    scene.now += 1.0
    assert scene.look().is_there is has_former, "a former part that goes on has the devices"
    assert scene.parts.held() == ({"a": 2} if has_former else {})


def test_a_run_goes_on_without_a_part_that_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, FakeNodes(a=None, b=None), run=RUN)
    both = {"a": 2, "b": 2}
    scene.to(run=both)
    scene.at_work("run", a=2)
    scene.look()
    scene.nodes.is_slow = True
    scene.to(run=both)
    scene.look()
    scene.now += START_S + 1
    scene.look()
    scene.to(run=both)
    assert scene.shares() == {"a": 2} and scene.entries["run"].phase == "running"
    assert scene.nodes.wanted["b"]["run"].leaves and not scene.nodes.wanted["a"]["run"].leaves


@pytest.mark.thorough
def test_a_node_on_which_a_run_cannot_be_joined_is_tried_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, FakeNodes(a=None, b=None), run=RUN)
    both = {"a": 2, "b": 2}
    scene.to(run=both)
    scene.at_work("run", a=2)

    def pass_time(seconds: int) -> int:
        """Return how many parts b starts meanwhile; each fails at once."""
        before = len(scene.nodes.starts)
        for _ in range(seconds):
            scene.now += 1.0
            scene.to(run=both)
            if "run" in scene.nodes.views["b"].record.parts and scene.entries["run"].parts.get("b"):
                scene.nodes.ends("b", "run", 3)
            assert scene.look().is_there and scene.entries["run"].phase == "running"
        return len(scene.nodes.starts) - before

    assert pass_time(1000) == 5
    assert pass_time(10_000) == 4, "once in an hour at last"
    first = "a part of run could not join it on node b: its exit status is 3; its console says more."
    assert scene.said[:2] == [f"{first} It is tried there again in {wait_s} s" for wait_s in (60, 120)]
    assert pass_time(3600) == 1
    scene.now += 3600
    scene.to(run=both)
    scene.at_work("run", a=2, b=2)
    scene.look()
    scene.nodes.ends("b", "run", -9)
    scene.at_work("run", a=2)
    scene.look()
    scene.now += ENDS_S + 1
    scene.to(run=both)
    assert scene.shares() == both, "it had joined, and is given another part at once"
