"""Several hosts make one job: each in a network namespace, with a name and an address of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from network_hosts import free_port
from supervised_launch import REFUSED, Announcements, Supervised, supervised

TOKEN = "0123456789abcdef0123456789abcdef"
ADDRESSES = {"left": "10.77.0.1", "right": "10.77.0.2"}
PORT = 29471
GONE_S = 10.0

pytestmark = [
    pytest.mark.needs("ip", "unshare"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: network namespaces are made and removed"),
]


# Connects to the coordinator, sends what a browser would, and prints all that comes back.
NONSENSE = f"""
import socket, sys
with socket.create_connection(("{ADDRESSES["left"]}", {PORT}), timeout=10) as sock:
    sock.sendall(b"GET / HTTP/1.1")
    try:
        while data := sock.recv(100):
            sys.stdout.buffer.write(data)
    except ConnectionResetError:
        pass
"""


class Net:
    """Two hosts, "left" and "right", and the cable between them."""

    def __init__(self) -> None:
        self.spaces = {name: f"paceline-{os.getpid()}-{name}" for name in ADDRESSES}
        self._cables = {name: f"pl{os.getpid()}{name[0]}" for name in ADDRESSES}

    def build(self) -> None:
        for space in self.spaces.values():
            ip("netns", "add", space)
        left, right = self._cables.values()
        ip(
            "link",
            "add",
            left,
            "netns",
            self.spaces["left"],
            "type",
            "veth",
            "peer",
            right,
            "netns",
            self.spaces["right"],
        )
        for name, space in self.spaces.items():
            ip("-n", space, "address", "add", f"{ADDRESSES[name]}/24", "dev", self._cables[name])
            for device in ("lo", self._cables[name]):
                ip("-n", space, "link", "set", device, "up")

    def remove(self) -> None:
        for space in self.spaces.values():
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)

    def on(self, name: str) -> list[str]:
        """What to put before a command to run it on a host."""
        rename = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name]
        return ["ip", "netns", "exec", self.spaces[name], *rename]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> Iterator[Net]:
    monkeypatch.setenv("PATH", os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"]))
    made = Net()
    try:
        made.build()
        yield made
    finally:
        made.remove()


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Announcements]:
    with closing(Announcements(tmp_path / "pipe")) as announcements:
        yield announcements


@pytest.fixture
def start(net: Net, tmp_path: Path) -> Iterator[Any]:
    """Starts supervisors: `start("left", "0:wait", workers=3)`."""
    with ExitStack() as stack:

        def one(name: str, *args: str, token: str = TOKEN, plan: str | None = None, **fields: Any) -> Supervised:
            job = {"workers": 3, "hosts": 2, "head": f"{ADDRESSES['left']}:{PORT}", "args": args, **fields}
            options = {"job": job, "run_dir": str(tmp_path / name), "plan": plan}
            environment = {"PACELINE_TOKEN": token}
            return stack.enter_context(supervised(options, prefix=net.on(name), environment=environment))

        yield one


def test_two_hosts_find_who_is_who(start: Any, pipe: Announcements) -> None:
    args = [f"*:tell={pipe.path}"]
    supervisors = [start("right", *args), start("left", *args)]  # the first to start is not always the coordinator
    told = {one["rank"]: one for one in pipe.take(3)}
    left, right = [0, "left", ADDRESSES["left"]], [1, "right", ADDRESSES["right"]]
    assert [told[rank]["host"] for rank in range(3)] == [left, left, right]
    assert [told[rank]["local"] for rank in range(3)] == [[0, 2], [1, 2], [0, 1]]
    assert not any(one["token"] for one in told.values()), "workers see the token"
    for supervisor in supervisors:
        code, outcome, _ = supervisor.result()
        assert outcome is not None
        assert (code, outcome.state, [ended.host for ended in outcome.exits]) == (
            0,
            "finished",
            ["left", "left", "right"],
        )


def test_a_failure_anywhere_is_told_everywhere(start: Any) -> None:
    args = ["2:raise", "*:wait"]  # they wait for each other in the key-value store of the coordinator
    supervisors = [start("left", *args), start("right", *args)]
    for supervisor in supervisors:
        code, outcome, _ = supervisor.result(limit_s=30)
        assert supervisor.left() == []
        assert outcome is not None
        assert (code, outcome.state) == (1, "failed")
        first = next(failure for failure in outcome.failures if not failure.sent_by_us)
        assert (first.worker, first.host) == (2, "right")
        assert first.error is not None and first.error["message"] == "worker 2 has had enough"
        assert [failure.worker for failure in outcome.failures] == [0, 1, 2]


def test_strangers_are_refused_and_told_and_change_nothing(start: Any, net: Net, pipe: Announcements) -> None:
    """One that talks nonsense and one with another token, before the job is complete and while it runs."""
    nonsense = [*net.on("right"), sys.executable, "-c", NONSENSE]
    args = [f"*:wait={pipe.path}"]
    left = start("left", *args)
    wrong = start("right", *args, token="f" * 32)
    code, _, said = wrong.result()
    assert code == REFUSED
    assert "it holds another token than this host" in said[-1]
    assert "refused a connection from 10.77.0.2: its token is wrong" in left.hear("refused")
    right = start("right", *args)
    pipe.take(3)
    heard = subprocess.run(nonsense, capture_output=True, timeout=60, check=True).stdout
    assert len(heard) <= 40, "more than the greeting was said to a stranger"
    assert "it does not speak Paceline's protocol" in left.hear("refused")
    late = start("right", *args, token="e" * 32)
    assert late.result()[0] == REFUSED
    assert "its token is wrong" in left.hear("refused")
    left.process.send_signal(signal.SIGTERM)  # all this time the job went on
    for supervisor in (left, right):
        code, outcome, _ = supervisor.result(limit_s=GONE_S)
        assert outcome is not None
        assert (code, outcome.state) == (143, "stopped")


def test_another_job_is_refused_with_both_values(start: Any) -> None:
    left = start("left", workers=3, plan="replicas=3")
    code, _, said = start("right", workers=4, plan="replicas=3").result()
    assert code == REFUSED
    assert "workers: 3 on the coordinator's host, 4 here" in said[-1]
    assert "workers: 3 on the coordinator's host, 4 here" in left.hear("refused host right")
    right = start("right", workers=3, plan="replicas=3")
    assert (left.result()[0], right.result()[0]) == (0, 0)


def test_a_lost_host_is_named_and_ends_the_job(start: Any, pipe: Announcements) -> None:
    args = [f"2:family={pipe.path}", f"*:wait={pipe.path}"]
    left, right = start("left", *args), start("right", *args)
    pipe.take(3)
    right.process.kill()
    code, outcome, _ = left.result(limit_s=GONE_S)
    assert right.left(limit_s=GONE_S) == []
    assert left.left(limit_s=0) == []
    assert outcome is not None
    assert (code, outcome.state) == (76, "failed")
    lost = next(failure for failure in outcome.failures if not failure.sent_by_us)
    assert (lost.worker, lost.host) == (2, "right")
    assert lost.error is not None
    assert lost.error["kind"] == "HostLost"
    assert lost.error["message"].startswith("host right (10.77.0.2) was lost: ")


def test_a_member_whose_head_is_lost_ends_its_workers_and_says_so(start: Any, pipe: Announcements) -> None:
    args = [f"*:family={pipe.path}"]
    left, right = start("left", *args), start("right", *args)
    pipe.take(3)
    left.process.kill()
    code, outcome, said = right.result(limit_s=GONE_S)
    assert right.left(limit_s=0) == []
    assert left.left(limit_s=GONE_S) == []
    assert outcome is not None
    assert (code, outcome.state) == (76, "failed")
    assert any(text.startswith("the coordinator left (10.77.0.1) was lost: ") for text in said)
    assert outcome.failures[0].error is not None and "the coordinator left" in outcome.failures[0].error["message"]


@pytest.mark.parametrize("where", ["left", "right"])
def test_ctrl_c_on_one_host_stops_the_job_on_all(where: str, start: Any, pipe: Announcements) -> None:
    args = [f"*:wait={pipe.path}"]
    supervisors = {"left": start("left", *args), "right": start("right", *args)}
    pipe.take(3)
    supervisors[where].process.send_signal(signal.SIGINT)
    for supervisor in supervisors.values():
        code, outcome, _ = supervisor.result(limit_s=GONE_S)
        assert supervisor.left(limit_s=0) == []
        assert outcome is not None
        assert (code, outcome.state, outcome.failures) == (130, "stopped", ())


def test_a_host_whose_imports_fail_tells_the_others(start: Any, net: Net, tmp_path: Path, pipe: Announcements) -> None:
    left = start("left", f"*:early={pipe.path}")
    job = {"workers": 3, "hosts": 2, "head": f"{ADDRESSES['left']}:{PORT}", "args": [f"*:early={pipe.path}"]}
    options = {"job": job, "run_dir": str(tmp_path / "right"), "modules": ["no_such_module"]}
    with supervised(options, prefix=net.on("right"), environment={"PACELINE_TOKEN": TOKEN}) as right:
        assert right.result()[0] == REFUSED
    code, outcome, _ = left.result(limit_s=GONE_S)
    assert outcome is not None
    assert (code, outcome.state) == (1, "failed")
    first = next(failure for failure in outcome.failures if not failure.sent_by_us)
    assert first.error is not None
    assert "host right: An import of the workers' modules failed: ModuleNotFoundError" in first.error["message"]


def test_two_supervisors_on_one_machine_are_two_hosts(tmp_path: Path) -> None:
    job = {"workers": 2, "hosts": 2, "head": f"127.0.0.1:{free_port()}", "args": ["*:large=100"]}
    with ExitStack() as stack:
        environment = {"PACELINE_TOKEN": TOKEN}
        options = [{"job": job, "run_dir": str(tmp_path / str(number))} for number in range(2)]
        both = [stack.enter_context(supervised(one, environment=environment)) for one in options]
        results = [one.result() for one in both]
    assert [(code, outcome and outcome.state) for code, outcome, _ in results] == [(0, "finished")] * 2


@pytest.mark.parametrize("name", ["left", "right"])
def test_a_host_that_stays_alone_gives_up_and_says_what_it_waited_for(name: str, start: Any) -> None:
    code, _, said = start(name, timeout_s=1.0).result()
    assert code == REFUSED
    expected = {
        "left": "waiting at 10.77.0.1:29471 for 1 more host; here: left",
        "right": "connecting to the coordinator at 10.77.0.1:29471; last try: Connection refused",
    }
    assert expected[name] in said[-1]
    assert "Start the same command on all 2 hosts" in said[-1]


def test_ctrl_c_while_hosts_are_waited_for_leaves_nothing(start: Any) -> None:
    left = start("left")
    right = start("right", workers=2)  # is refused: so we know that the coordinator is there
    assert right.result()[0] == REFUSED
    left.process.send_signal(signal.SIGINT)
    code, outcome, _ = left.result(limit_s=GONE_S)
    assert left.left(limit_s=0) == []
    assert outcome is not None
    assert (code, outcome.state) == (130, "stopped")
