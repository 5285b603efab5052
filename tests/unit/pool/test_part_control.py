"""How runs come to the replicas that they should have: on pretended nodes, with a pretended clock."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from paceline.pool import part_process
from paceline.pool.batch_growth import BatchGrowth
from paceline.pool.leave_requests import LEAVE_S
from paceline.pool.node_files import NodeRecord, WantedPart
from paceline.pool.part_control import (
    OVER_S,
    RESIZE_AGAIN_S,
    STUCK_S,
)
from paceline.pool.pool_state import RunEntry
from pool_parts import RUN, FakeNodes, Scene


def test_runs_side_by_side_have_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = dataclasses.replace(RUN, least=2, most=2)
    on_cpu = dataclasses.replace(RUN, command=("--device", "cpu", "train.py"))
    scene = Scene(monkeypatch, FakeNodes(a=("4", "5", "6", "7", "8")), one=fixed, two=fixed, three=fixed, cpu=on_cpu)
    target = {"one": {"a": 2}, "two": {"a": 2}, "three": {"a": 2}, "cpu": {"a": 1}}
    scene.to(**target)
    assert (scene.gpus("one"), scene.gpus("two")) == ({"a": ("4", "5")}, {"a": ("6", "7")})
    assert scene.gpus("cpu") == {"a": ()}, "it sees none"
    assert scene.entries["three"].phase == "waiting"
    assert scene.nodes.wanted["a"]["two"].gpus == ("6", "7")
    scene.nodes.ends("a", "one", 0)
    assert scene.look("one").exit_code == 0 and not scene.look("one").is_there
    scene.entries["one"].phase = "finished"
    scene.to(**target)
    assert scene.gpus("three") == {"a": ("4", "5")}


def test_on_gpus_a_run_changes_its_replicas_by_saving_and_going_on(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, FakeNodes(a=("0", "1", "2", "3")), run=RUN)
    scene.to(run={"a": 2})
    assert (scene.entries["run"].fixed, scene.entries["run"].is_live) == (2, False)
    scene.to(run={"a": 4})
    assert scene.entries["run"].phase == "running", "before its first step it is left in peace"
    scene.at_work("run", a=2)
    scene.to(run={"a": 4})
    part = scene.nodes.wanted["a"]["run"]
    assert (scene.entries["run"].phase, part.leaves, part.ends_run, part.fixed) == ("leaving", True, True, 2)
    scene.nodes.ends("a", "run", 75)
    assert scene.look().exit_code == 75
    scene.entries["run"].phase = "waiting"
    scene.seen.clear()
    scene.to(run={"a": 4})
    assert (scene.entries["run"].fixed, scene.gpus("run")) == (4, {"a": ("0", "1", "2", "3")})
    assert scene.nodes.wanted["a"]["run"].workers == 4


def test_an_elastic_run_begins_on_one_node_and_others_join_it(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, FakeNodes(a=None, b=None), run=RUN)
    both = {"a": 2, "b": 2}
    scene.to(run=both)
    assert scene.shares() == {"a": 2}
    scene.at_work("run", a=2)
    scene.to(run=both)
    first, second = scene.nodes.wanted["a"]["run"], scene.nodes.wanted["b"]["run"]
    assert (second.hosts, second.workers, second.is_open) == (1, 2, True)
    assert first.start != second.start
    assert first.shares == second.shares == both
    scene.at_work("run", a=2, b=2)
    scene.to(run={"b": 2})
    leaves = scene.nodes.wanted["a"]["run"]
    assert (leaves.leaves, leaves.ends_run, leaves.asked, scene.shares()) == (True, False, 1, {"b": 2})
    scene.now += LEAVE_S + 1
    scene.to(run={"b": 2})
    assert scene.nodes.wanted["a"]["run"].asked == 2
    assert scene.parts.held() == {"a": 2, "b": 2}, "until it has ended"
    scene.nodes.ends("a", "run", 75)
    assert scene.look().is_there and scene.parts.held() == {"b": 2}


def test_a_run_whose_part_has_finished_gets_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, FakeNodes(a=None, b=None), run=RUN)
    both = {"a": 2, "b": 2}
    scene.to(run=both)
    scene.at_work("run", a=2)
    scene.to(run=both)
    scene.at_work("run", a=2, b=2)
    scene.nodes.ends("a", "run", 0)
    assert scene.look().is_there
    scene.now += OVER_S - 1
    scene.to(run=both)
    assert scene.shares() == {"b": 2}, "the others are about to end as well"
    scene.now += 2
    scene.seen["run"] = dataclasses.replace(scene.seen["run"], state="finished")
    scene.to(run=both)
    assert scene.shares() == {"b": 2}
    scene.at_work("run", b=2)
    scene.to(run=both)
    assert scene.shares() == both, "it goes on after all"


def test_a_run_is_not_started_while_another_process_works_in_its_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, FakeNodes(a=None, b=None), run=RUN)
    scene.locked.add(Path("/nowhere/run"))
    scene.to(run={"a": 2})
    assert (
        scene.entries["run"].phase == "waiting" and "another process works in its directory" in scene.entries["run"].why
    )
    scene.locked.clear()
    scene.to(run={"a": 2})
    assert scene.entries["run"].phase == "running"


def test_a_run_that_can_neither_give_nor_take_is_paused_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, FakeNodes(a=None, b=None), run=RUN, other=RUN)
    scene.to(run={"a": 2}, other={"b": 2})
    for name, node in (("run", "a"), ("other", "b")):
        scene.at_work(name, **{node: 2})
    swapped = {"run": {"b": 2}, "other": {"a": 2}}
    scene.to(**swapped)
    assert [entry.phase for entry in scene.entries.values()] == ["running", "running"]
    scene.now += STUCK_S + 1
    scene.to(**swapped)
    assert scene.entries["run"].phase == "leaving"


def test_a_run_that_was_taken_out_holds_its_devices_until_it_has_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scene = Scene(monkeypatch, FakeNodes(a=("0", "1")), run=RUN, next=RUN)
    scene.to(run={"a": 2})
    scene.take_out("run")
    for _ in range(2):
        scene.to(next={"a": 2})
        scene.parts.look_at_parting()
        assert scene.entries["next"].phase == "waiting"
        assert scene.nodes.wanted["a"]["run"].ends_run
        assert scene.parts.held() == {"a": 2}
        scene.restart(tmp_path)
    scene.to(next={"a": 2})
    scene.now += LEAVE_S + 1
    scene.to(next={"a": 2})
    assert scene.nodes.wanted["a"]["run"].asked == 2, "a pool that was killed meanwhile asks once more, too"
    scene.nodes.ends("a", "run", 75)
    scene.parts.look_at_parting()
    scene.to(next={"a": 2})
    assert scene.entries["next"].phase == "running" and "run" not in scene.nodes.wanted["a"]
    assert scene.record.taken_out == {}


def test_a_name_that_is_queued_again_is_another_run_and_waits_for_the_end_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch, FakeNodes(a=None), run=RUN)
    scene.to(run={"a": 1})
    first = scene.nodes.wanted["a"]["run"]
    run = scene.runs["run"]
    scene.take_out("run")
    scene.runs["run"], scene.record.runs["run"] = dataclasses.replace(run, submitted=2.0), RunEntry()
    scene.to(run={"a": 1})
    assert scene.entries["run"].phase == "waiting" and "had its name before" in scene.entries["run"].why
    assert (scene.nodes.wanted["a"]["run"].start, scene.nodes.wanted["a"]["run"].leaves) == (first.start, True)
    scene.nodes.ends("a", "run", 0)
    scene.parts.look_at_parting()
    scene.to(run={"a": 1})
    second = scene.nodes.wanted["a"]["run"]
    assert (second.leaves, second.submitted, first.submitted) == (False, 2.0, 1.0)
    assert scene.nodes.starts == [("a", "run"), ("a", "run")], "its part is another one than that which has ended"
    presence = scene.look()
    assert (presence.is_there, presence.exit_code) == (True, None), "it has not inherited the end of the first"


def test_the_first_start_of_a_run_waits_for_its_directory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, FakeNodes(a=None), run=RUN)
    scene.locked.add(Path("/nowhere/run"))
    scene.to(run={"a": 1})
    assert scene.entries["run"].starts == 0


def test_a_run_that_refuses_its_replicas_has_those_that_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, FakeNodes(a=None), run=RUN)
    scene.to(run={"a": 1})
    scene.at_work("run", a=1)
    scene.to(run={"a": 2})
    part = scene.nodes.views["a"].record.parts["run"]
    part.problem = "the run is about to end"
    scene.look()
    assert scene.shares() == {"a": 1} and scene.entries["run"].replicas == 1
    assert scene.said == ["run keeps its replicas on a: the run is about to end"]
    num_changes = scene.num_changes
    for _ in range(40):
        scene.now += RESIZE_AGAIN_S / 41
        scene.to(run={"a": 2})
        scene.look()
    assert scene.num_changes == num_changes and scene.shares() == {"a": 1}, "it is left in peace for a while"
    part.problem = ""  # as its agent notes when the run has agreed to what it has
    scene.now += RESIZE_AGAIN_S
    scene.to(run={"a": 2})
    scene.look()
    assert scene.shares() == {"a": 2}, "it is asked again"
    part.problem = "the run is about to end"
    scene.look()
    scene.now += RESIZE_AGAIN_S + 1
    scene.to(run={"a": 2})
    assert scene.shares() == {"a": 1}, "it is left in peace for longer"
    scene.nodes.ends("a", "run", 0)
    presence = scene.look()
    assert (presence.exit_code, presence.problem) == (0, ""), "it was started, and has ended by itself"


def test_a_run_that_has_refused_to_grow_gives_what_it_has_and_one_that_refuses_that_is_paused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch, FakeNodes(a=None), run=RUN)
    scene.nodes.views["a"].record.slots = 4
    scene.to(run={"a": 2})
    scene.at_work("run", a=2)
    part = scene.nodes.views["a"].record.parts["run"]

    def pass_time(replicas: int, seconds: int) -> int:
        """Return how often the run refuses so many replicas meanwhile."""
        times = 0
        for _ in range(seconds):
            scene.now += 1.0
            scene.to(run={"a": replicas})
            is_offered = scene.shares() == {"a": replicas}
            part.problem, times = "no" if is_offered else "", times + is_offered
            scene.look()
        return times

    assert (pass_time(3, 600), scene.shares(), scene.entries["run"].phase) == (6, {"a": 2}, "running")
    assert pass_time(1, 1) == 1, "less was not refused"
    assert pass_time(1, int(STUCK_S) + 2) == 0
    assert scene.entries["run"].phase == "leaving", "others need what it does not give"


def test_a_run_goes_on_with_another_batch_on_the_replicas_that_it_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    grows = dataclasses.replace(RUN, growth=BatchGrowth(least=64, most=256, micro=8))
    scene = Scene(monkeypatch, FakeNodes(a=None), run=grows)
    scene.to(run={"a": 2})
    entry = scene.entries["run"]
    assert (entry.batch, scene.nodes.wanted["a"]["run"].batch) == (64, 64), "its noise scale is not known yet"
    entry.noise_scale, entry.step_s, entry.samples_s, entry.let_in = 1e6, {"2": 1.0}, 0.5, 123.0
    entry.moves = {"a": 2}
    scene.parts.pause("run", entry)
    scene.to(run={"a": 2})
    assert scene.nodes.wanted["a"]["run"].ends_run
    scene.nodes.ends("a", "run", 75)
    scene.look()
    entry.phase = "waiting"
    scene.to(run={"a": 2})
    assert (entry.phase, entry.batch, scene.nodes.wanted["a"]["run"].batch) == ("running", 128, 128)
    assert (entry.moves, entry.let_in) == ({}, 123.0), "its turn has not begun anew"


def test_a_part_is_started_with_its_batch_and_the_micro_batch_of_the_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(part_process, "start", lambda *_, more, **__: started.append(list(more)))
    node = NodeRecord(name="a", host="a", slots=2)
    grows = dataclasses.replace(RUN, growth=BatchGrowth(least=64, most=256, micro=8))
    for run, batch in ((RUN, 0), (grows, 0), (grows, 128)):
        part_process.start_part(
            tmp_path, run, WantedPart(start=1, submitted=1.0, replicas=1, batch=batch), mark="m", node=node
        )
    assert started[0] == []
    assert started[1] == ["--set", "plan.batch.size=64", "--set", "plan.batch.micro=8"]
    assert started[2] == ["--set", "plan.batch.size=128", "--set", "plan.batch.micro=8"]
