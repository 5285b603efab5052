"""The meeting, where one process can hold it: what cannot work is said at once, and waiting ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import LaunchError
from paceline.launch.coordinator import rendezvous
from paceline.launch.coordinator.coordinator import Coordinator
from paceline.launch.coordinator.head_register import HeadRecord
from paceline.launch.coordinator.host_agent import HostAgent
from paceline.launch.coordinator.join_request import mismatch
from paceline.launch.coordinator.rendezvous import join_hosts
from paceline.launch.io.event_loop import EventLoop
from paceline.launch.io.signals import Interrupted, StopSignals
from paceline.plan import CommandPlan, Plan
from paceline.plan.job import Job


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text("0123456789abcdef" * 2)
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def port() -> Iterator[int]:
    """A free port of loopback; nobody else is given it while the test runs."""
    with closing(socket.socket()) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))  # bound and not listening: those that listen with the same option still may
        yield sock.getsockname()[1]


def attend(
    said: list[str],
    signals: StopSignals | None = None,
    *,
    plan: CommandPlan | None = None,
    run_dir: str = "runs/r",
    **fields: Any,
) -> Coordinator | HostAgent:
    """Hold the meeting for one host; the side comes back closed."""
    job = Job(**{"workers": 3, "hosts": 2, "timeout_s": 10.0, **fields})
    with closing(EventLoop()) as loop:
        about: dict[str, Any] = {"plan": plan, "attempt": 4, "run_dir": run_dir, "loop": loop, "say": said.append}
        with closing(join_hosts(job, signals=signals or StopSignals(), **about)) as side:
            return side


def test_one_host_meets_nobody() -> None:
    side = attend([], hosts=1)
    assert isinstance(side, Coordinator)
    assert (side.host_index, side.address, side.attempt) == (0, "127.0.0.1", 4)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_the_first_host_is_the_coordinator_and_numbers_the_attempt(host: str, port: int, token_file: str) -> None:
    if host == "[::1]" and not _has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    fields: dict[str, Any] = {"head": f"{host}:{port}", "token_file": token_file, "hosts": 3}
    with ThreadPoolExecutor(3) as threads:
        sides = list(threads.map(lambda _: attend([], **fields), range(3)))
    assert sorted(type(side).__name__ for side in sides) == ["Coordinator", "HostAgent", "HostAgent"]
    assert sorted(side.host_index for side in sides) == [0, 1, 2]
    assert {side.attempt for side in sides} == {4}
    assert {side.address for side in sides} <= {"127.0.0.1", "::1"}


def test_every_hosts_address_is_no_meeting_point(token_file: str) -> None:
    with pytest.raises(LaunchError, match=r"head='0.0.0.0:29500' is every host's address: name one host"):
        attend([], head="0.0.0.0:29500", token_file=token_file)


@pytest.fixture
def led(port: int, token_file: str, tmp_path: Path) -> dict[str, Any]:
    """What a host is started with, where the register names its own address: the name is another host's now."""
    register(tmp_path, port, epoch=0, left=None)
    (tmp_path / "run.json").write_text("{}")
    head = f"127.0.0.1:{port}"
    return {"head": head, "token_file": token_file, "hosts": 1, "workers": 1, "run_dir": str(tmp_path)}


def register(run_dir: Path, port: int, *, epoch: int, left: str | None) -> None:
    record = HeadRecord(
        run="a", attempt=1, epoch=epoch, host="b", address=f"127.0.0.1:{port}", state={"left": left, "elastic": None}
    )
    (run_dir / "head.json").write_text(json.dumps(record.to_json()))


HOLDER = """
import sys
from pathlib import Path
from paceline import run_lock
print(run_lock.hold(Path(sys.argv[1])), flush=True)
input()
"""


def test_a_host_that_got_the_coordinators_name_begins_nothing_while_that_one_still_leaves(
    led: dict[str, Any], tmp_path: Path
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "True\n"
            with pytest.raises(LaunchError, match=r"connecting to the coordinator at 127.0.0.1"):
                attend([], **led, timeout_s=1.5)
        finally:
            holder.communicate("\n")
    assert isinstance(attend([], **led), Coordinator), "nobody leads the run any more"


def test_after_a_coordinator_has_left_another_host_has_its_time_to_take_over(
    led: dict[str, Any], port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(tmp_path, port, epoch=0, left="SIGTERM came on host b")
    with pytest.raises(LaunchError, match=r"connecting to the coordinator at 127.0.0.1"):
        attend([], **led, timeout_s=1.5)
    monkeypatch.setattr(rendezvous, "HANDOVER_S", 1.0)
    assert isinstance(attend([], **led), Coordinator), "nobody has taken over"


def test_where_the_coordinator_was_lost_the_run_begins_again_at_once(led: dict[str, Any]) -> None:
    assert isinstance(attend([], **led, timeout_s=2.0), Coordinator)


def test_a_name_that_nobody_knows_is_waited_for_and_said(token_file: str) -> None:
    with pytest.raises(LaunchError, match=r"the name no-such-host.invalid is not known"):
        attend([], head="no-such-host.invalid:29500", token_file=token_file, timeout_s=0.6)


def test_a_port_where_something_else_listens_is_said_at_once(token_file: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        at = f"127.0.0.1:{other.getsockname()[1]}"

        def greet() -> None:
            sock, _ = other.accept()
            with sock:
                sock.sendall(b"220 mail.example.org ESMTP\r\n")
                sock.recv(100)

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(LaunchError, match=f"cannot join the job at {at}: it does not speak Paceline's protocol"):
            attend([], head=at, token_file=token_file)
        thread.join(10)


def test_a_signal_ends_the_waiting(port: int, token_file: str) -> None:
    signals = StopSignals()
    signals.note(signal.SIGTERM)
    with pytest.raises(Interrupted) as interrupted:
        attend([], signals, head=f"127.0.0.1:{port}", token_file=token_file)
    assert interrupted.value.signum == signal.SIGTERM


@pytest.mark.parametrize("first", ["coordinator", "member"])
def test_a_signal_that_came_to_one_host_that_waits_is_no_loss_to_the_other(
    first: str, port: int, token_file: str
) -> None:
    signals = {"coordinator": StopSignals(), "member": StopSignals()}
    said: dict[str, list[str]] = {"coordinator": [], "member": []}
    has_begun = threading.Event()

    class Said(list[str]):
        def append(self, text: str) -> None:
            super().append(text)
            if text.endswith("has come: 2 of 3"):
                signals[first].note(signal.SIGINT)
            elif "has left: it was stopped" in text:
                signals["coordinator"].note(signal.SIGTERM)

    def host(name: str) -> int:
        said[name] = Said()
        if name == "member":
            assert has_begun.wait(10.0)
        with pytest.raises(Interrupted) as interrupted:
            attend(said[name], signals[name], head=f"127.0.0.1:{port}", token_file=token_file, hosts=3)
        return interrupted.value.signum

    class Looked(StopSignals):
        def check(self) -> None:
            has_begun.set()  # it listens already
            super().check()

    signals["coordinator"] = Looked()
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(host, ["coordinator", "member"]))
    assert found == ([signal.SIGINT] * 2 if first == "coordinator" else [signal.SIGTERM, signal.SIGINT])
    if first == "coordinator":
        assert said["member"] == ["the coordinator gave up: interrupted by SIGINT"]


def test_a_job_on_several_hosts_needs_a_token(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    with pytest.raises(LaunchError, match="The job has no token"):
        attend([], head=f"127.0.0.1:{port}")


def test_hosts_whose_commands_write_other_defaults_are_of_other_jobs(port: int, token_file: str) -> None:
    fields: dict[str, Any] = {"head": f"127.0.0.1:{port}", "token_file": token_file, "timeout_s": 2.0}
    texts = ("replicas=3+batch(size=32)", "replicas=3")

    def host(text: str) -> str:
        with pytest.raises(LaunchError) as refused:
            attend([], plan=CommandPlan.of(Plan.parse(text), given=Plan.names_in(text)), **fields)
        return str(refused.value)

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(host, texts))
    assert any("plan: 'replicas=3" in one and "replicas=3, with plan.batch.size=32" in one for one in found), found


def test_hosts_write_one_plan_in_any_order(port: int, token_file: str) -> None:
    fields: dict[str, Any] = {"head": f"127.0.0.1:{port}", "token_file": token_file}
    texts = ("replicas=3+batch(size=32,seed=0)", "batch(seed=0,size=32)+replicas=3")
    plans = [CommandPlan.of(Plan.parse(text), given=Plan.names_in(text)) for text in texts]
    with ThreadPoolExecutor(2) as threads:
        sides = list(threads.map(lambda plan: attend([], plan=plan, **fields), plans))
    assert sorted(type(side).__name__ for side in sides) == ["Coordinator", "HostAgent"]


def test_what_differs_is_named_with_both_values() -> None:
    assert mismatch({"workers": 2, "plan": "a"}, {"workers": 2, "plan": "a"}) == ""
    assert mismatch({"workers": 2, "plan": "a"}, {"plan": "b"}) == (
        "plan: 'a' on the coordinator's host, 'b' here, workers: 2 on the coordinator's host, None here"
    )


def _has_ipv6() -> bool:
    try:
        with closing(socket.socket(socket.AF_INET6)) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True
