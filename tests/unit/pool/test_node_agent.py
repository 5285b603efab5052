"""A node's agent brings about what is wanted, whatever it has missed, and starts no part twice. Parts are pretended by
commands that sleep.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import run_lock
from paceline.errors import PlanError
from paceline.launch.coordinator import control_socket
from paceline.pool import node_agent, part_process, run_control
from paceline.pool.devices import NodeOffer
from paceline.pool.node_agent import ASK_AGAIN_S, SHARE_AGAIN_S, NodeAgent
from paceline.pool.node_files import NodeRecord, PartRecord, WantedPart, WantedParts, node_dir, node_name
from paceline.pool.part_process import ask_part, process_with, share_out, start_part
from paceline.pool.pool_run import PoolRun
from paceline.processes import this_host

RUN = PoolRun(
    name="run",
    command=("train.py",),
    folder="/",
    environment={"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "9", "RANK": "0"},
    run_dir="/nowhere/run",
    script="train.py",
    least=1,
    most=4,
    workers_each=1,
    submitted=1.0,
)


class Site:
    """A pool's folder, and this host as its node."""

    def __init__(self, pool: Path) -> None:
        self.pool, self.said, self.started = pool, list[str](), list[dict[str, Any]]()
        self.commands: list[tuple[str, ...]] = []
        RUN.add_to(pool)
        self.agent = self.new_agent()

    def new_agent(self) -> NodeAgent:
        return NodeAgent(self.pool, NodeOffer(slots=2, cores=2), say=self.said.append)

    def killed(self) -> None:
        """The agent is killed: the kernel frees its lock, and nothing else changes."""
        run_lock.release(node_dir(self.pool, self.agent.name))

    def want(self, **parts: WantedPart) -> None:
        WantedParts(parts=parts).save(self.pool, self.agent.name)
        self.agent.look()

    def start(self, pool: Path, run: PoolRun, wanted: WantedPart, *, mark: str, node: NodeRecord) -> Any:
        self.started.append({"run": run.name, "start": wanted.start})
        self.commands.append(run.command)
        environment = {**os.environ, "PACELINE_POOL_PART": mark}
        words = [sys.executable, "-c", "import signal; signal.pause()"]
        return subprocess.Popen(words, env=environment, start_new_session=True)

    def part(self, run: str = "run") -> Any:
        found = NodeRecord.load(self.pool, self.agent.name)
        assert found is not None
        return found.parts.get(run)

    def until_ended(self) -> None:
        os.waitid(os.P_PID, self.part().pid, os.WEXITED | os.WNOWAIT)
        self.agent.look()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    made = Site(tmp_path / "pool")
    monkeypatch.setattr(node_agent, "start_part", made.start)
    yield made
    run_lock.release(node_dir(made.pool, made.agent.name))
    for child in [*made.agent._children.values()]:
        child.kill()
        child.wait()


def test_a_part_is_started_once_asked_to_leave_once_and_forgotten_when_it_is_not_wanted(site: Site) -> None:
    site.want(run=WantedPart(start=1, submitted=1.0, replicas=2))
    site.agent.look()
    assert site.started == [{"run": "run", "start": 1}]
    assert not site.part().has_ended
    site.want(run=WantedPart(start=1, submitted=1.0, replicas=2, leaves=True, asked=1))
    site.until_ended()
    assert (site.part().has_ended, site.part().exit_code, site.part().asked) == (True, -signal.SIGTERM, 1)
    site.want(run=WantedPart(start=1, submitted=1.0, replicas=2))
    assert len(site.started) == 1, "a start that has ended is not repeated"
    site.want(run=WantedPart(start=2, submitted=1.0, replicas=2))
    assert len(site.started) == 2
    site.want()
    site.until_ended()
    site.agent.look()
    assert site.part() is None


def test_what_leaves_before_it_was_started_never_is(site: Site) -> None:
    site.want(run=WantedPart(start=1, submitted=1.0, replicas=2, leaves=True, asked=1))
    assert site.part().has_ended and site.started == []


def test_an_agent_that_was_killed_finds_its_parts_again(site: Site) -> None:
    site.want(run=WantedPart(start=1, submitted=1.0, replicas=2))
    children, site.agent._children = site.agent._children, {}
    pid = children["run"].pid
    site.killed()
    site.agent = site.new_agent()
    site.agent.look()
    assert site.said == [f"found the part of run again: process {pid}"]
    assert len(site.started) == 1
    site.killed()
    record = NodeRecord.load(site.pool, site.agent.name)  # as if it had been killed between start and note
    assert record is not None
    record.parts["run"].pid = 0
    record.save(site.pool)
    site.agent = site.new_agent()
    site.agent.look()
    assert site.part().pid == pid and len(site.started) == 1
    children["run"].kill()
    children["run"].wait()
    site.agent.look()
    assert site.part().has_ended and site.part().exit_code is None
    assert process_with(record.parts["run"].mark) is None


def test_a_part_that_the_pool_had_given_up_ends_before_another_one_starts(site: Site) -> None:
    site.want(run=WantedPart(start=1, submitted=1.0, replicas=2))
    site.want(run=WantedPart(start=2, submitted=1.0, replicas=1))
    assert len(site.started) == 1
    site.until_ended()
    site.agent.look()
    assert [one["start"] for one in site.started] == [1, 2]


def test_a_part_is_started_by_the_command_of_its_own_run_and_not_of_one_that_had_its_name(site: Site) -> None:
    site.want(run=WantedPart(start=1, submitted=1.0, replicas=1, leaves=True, asked=1))
    RUN.remove_from(site.pool)
    site.want(run=WantedPart(start=2, submitted=2.0, replicas=1))
    assert site.commands == []
    assert site.said == [f"run is not started: the queue does not show it on {site.agent.name}"]
    dataclasses.replace(RUN, submitted=2.0, command=("new.py",)).add_to(site.pool)
    site.agent.look()
    assert site.commands == [("new.py",)]
    site.want(run=WantedPart(start=2, submitted=2.0, replicas=1, leaves=True, asked=1))
    site.until_ended()
    site.want(run=WantedPart(start=3, submitted=1.0, replicas=1))
    assert site.commands == [("new.py",)], "the first one is gone"
    (site.pool / "queue" / "run.json").write_text("{")
    site.agent.look()
    site.agent.look()
    assert len([text for text in site.said if "is no queued run" in text]) == 1


class Asked:
    """Notes how parts are asked, in place of doing it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, leads_here: bool = True) -> None:
        self.how, self.now = list[str](), time.monotonic()
        monkeypatch.setattr(node_agent, "ask_part", self._ask)
        monkeypatch.setattr(node_agent, "leads_here", lambda run_dir: leads_here)
        monkeypatch.setattr(node_agent.time, "monotonic", lambda: self.now)

    def _ask(self, part: PartRecord, *, run_dir: str = "") -> None:
        self.how.append(run_dir or "signal")


def test_an_agent_that_ends_asks_no_part_a_second_time_unless_it_is_hurried(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = dataclasses.replace(RUN, name="second")
    second.add_to(site.pool)
    both = {name: WantedPart(start=1, submitted=1.0, replicas=1) for name in ("run", "second")}
    site.want(**both)
    asked = Asked(monkeypatch)
    monkeypatch.setattr(node_agent.time, "sleep", lambda seconds: setattr(asked, "now", asked.now + 10.0))
    site.want(run=dataclasses.replace(both["run"], leaves=True, asked=1), second=both["second"])
    assert asked.how == ["signal"]
    site.agent.leave(lambda: False)
    assert asked.how == ["signal"] * 2, "the second one alone: the first one is saving"
    assert f"the part of run on {site.agent.name} has not ended in 60 s: it goes on" in site.said
    site.agent.leave(lambda: True)
    assert asked.how == ["signal"] * 4


@pytest.mark.parametrize(
    ("leads_here", "how"),
    [(True, ["/nowhere/run", "/nowhere/run", "signal"]), (False, ["/nowhere/run", "signal", "signal"])],
)
def test_the_coordinator_of_a_run_that_ends_has_the_time_to_save(
    site: Site, monkeypatch: pytest.MonkeyPatch, leads_here: bool, how: list[str]
) -> None:
    part = WantedPart(start=1, submitted=1.0, run_dir="/nowhere/run", replicas=1, is_open=True)
    site.want(run=part)
    asked = Asked(monkeypatch, leads_here=leads_here)
    ends = dataclasses.replace(part, leaves=True, ends_run=True)
    site.want(run=dataclasses.replace(ends, asked=1))
    site.want(run=dataclasses.replace(ends, asked=2))
    assert asked.how == how[:1] + ([] if leads_here else how[1:2])
    site.want(run=dataclasses.replace(ends, asked=3))
    assert asked.how[-1] == "signal", "in the end it is asked again"
    site.agent.record.parts["run"].asked = 0  # an agent that has missed the first time
    site.want(run=dataclasses.replace(ends, asked=2))
    assert asked.how[-1] == how[1]


def test_a_part_that_is_not_wanted_any_more_is_asked_again_after_a_while(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.want(run=WantedPart(start=1, submitted=1.0, replicas=1))
    asked = Asked(monkeypatch)
    for parts in ({}, {"run": WantedPart(start=2, submitted=1.0, replicas=1)}):
        asked.how.clear()
        asked.now += 2 * ASK_AGAIN_S
        site.want(**parts)
        site.agent.look()
        assert asked.how == ["signal"]
        asked.now += ASK_AGAIN_S + 1
        site.agent.look()
        site.agent.look()
        assert asked.how == ["signal"] * 2
    assert site.part().asked == 4 and not site.part().has_ended


def test_a_coordinator_that_refuses_or_stands_still_is_told_its_shares_once_in_a_while(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, int]] = []
    answers: list[str | None] = [None, "no", "", ""]

    def share_out(run_dir: str, shares: dict[str, int], *, is_open: bool) -> str | None:
        told.append(shares)
        return answers[len(told) - 1]

    monkeypatch.setattr(node_agent, "share_out", share_out)
    now = Asked(monkeypatch)
    part = WantedPart(start=1, submitted=1.0, replicas=1, is_open=True, shares={"a": 1})
    site.want(run=part)
    more = dataclasses.replace(part, shares={"a": 2})
    for attempt in range(1, 5):  # does not answer, refuses, agrees, is told again
        for _ in range(3):
            site.want(run=more)
            assert len(told) == attempt
        assert site.part().problem == ("no" if attempt == 2 else "")
        now.now += SHARE_AGAIN_S + 0.1
    assert told == [{"a": 2}] * 4


def test_a_coordinator_that_stands_still_does_not_hold_the_agent_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = SimpleNamespace(pid=os.getpid(), is_here=lambda: True)
    monkeypatch.setattr(part_process, "_running", lambda run_dir: record)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(control_socket._name(os.getpid()))
        listener.listen(4)  # and never answers
        begun = time.monotonic()
        assert share_out(str(tmp_path), {"a": 1}, is_open=True) is None
        ask_part(PartRecord(start=1, pid=os.getpid(), pid_started_s=0.0), run_dir=str(tmp_path))
        assert time.monotonic() - begun < control_socket.ANSWER_S / 2
    assert share_out(str(tmp_path), {"a": 1}, is_open=False) is None, "it takes no commands"


def test_one_process_is_the_agent_of_a_host_and_a_damaged_file_is_named(site: Site) -> None:
    site.killed()
    probe = "from pathlib import Path; from paceline.pool.node_agent import *; from paceline.pool.devices import *; "
    probe += "NodeAgent(Path('.'), NodeOffer(slots=1, cores=1), say=print); print('has it'); input()"
    with subprocess.Popen(
        [sys.executable, "-c", probe], cwd=site.pool, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "has it\n"
        with pytest.raises(PlanError, match=f"is a node of .* already: process {other.pid} on {this_host()} serves it"):
            site.new_agent()
        other.communicate("\n", timeout=10)
    site.agent = site.new_agent()
    (node_dir(site.pool, site.agent.name) / "wanted.json").write_text("{")
    site.agent.look()
    assert any("wanted.json cannot be read" in text for text in site.said)


def test_a_host_name_that_is_no_folder_is_refused() -> None:
    with pytest.raises(PlanError, match="which cannot be a node's folder"):
        node_name("../else")


def test_a_part_gets_the_gpus_of_the_pool_and_says_what_the_run_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[str], dict[str, str]]] = []

    def popen(words: list[str], **more: Any) -> Any:
        asked.append((words, more["env"]))

    monkeypatch.setattr(run_control.subprocess, "Popen", popen)
    node = NodeRecord(name="n", host="n", slots=4, cores=8, gpus=("0", "1", "2", "3"))
    start_part(
        tmp_path,
        RUN,
        WantedPart(start=1, submitted=1.0, replicas=2, workers=2, gpus=("1", "3"), fixed=2),
        mark="m",
        node=node,
    )
    joins = WantedPart(start=2, submitted=1.0, replicas=1, hosts=1, workers=2, is_open=True)
    start_part(tmp_path, RUN, joins, mark="m", node=node)
    start_part(tmp_path, RUN, joins, mark="m", node=node)
    (first, variables), (second, others), (third, _) = asked
    assert (variables["CUDA_VISIBLE_DEVICES"], variables["PACELINE_WORLD"]) == ("1,3", "none")
    assert " ".join(first[3:]) == (
        "run --run-dir /nowhere/run --workers 2 --threads 2 --set plan.layout.replicas=2 train.py"
    )
    token = tmp_path / "tokens" / "run"
    assert " ".join(second[3:]) == (
        "run --run-dir /nowhere/run --workers 2 --threads 2 --hosts 1 --slots 1 --head auto "
        f"--token-file {token} train.py"
    )
    assert third == second and token.stat().st_mode & 0o077 == 0 and len(token.read_text()) == 64
    assert others["CUDA_VISIBLE_DEVICES"] == "", "GPUs that are hidden from the pool are hidden from its runs"


@pytest.mark.parametrize(
    ("command", "uses"),
    [
        (("train.py",), True),
        (("--device", "cpu", "train.py"), False),
        (("train.py", "--device=cpu"), False),
        (("train.py", "--", "--device", "cpu"), True),
    ],
)
def test_a_run_on_the_cpu_takes_no_gpu(command: tuple[str, ...], uses: bool) -> None:
    assert dataclasses.replace(RUN, command=command).uses_gpus is uses
