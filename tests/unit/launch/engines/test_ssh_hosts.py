"""Hosts that SSH is given, and what each is told."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from engine_submissions import asked
from paceline.errors import LaunchError, PlanError
from paceline.launch.engines.catalog import host_count, read_engine, refusals
from paceline.launch.engines.host_driver import LOST
from paceline.launch.engines.ssh import Ssh, SshHost


def test_hosts_are_named_with_their_workers() -> None:
    engine = read_engine("ssh", hosts="a, me@b:4 ,[::1]:2")
    assert isinstance(engine, Ssh)
    assert engine.names == ("a", "me@b", "[::1]")
    assert engine.slots == (None, 4, 2)
    assert engine.workers is None
    assert Ssh(hosts=("a:1", "b:2")).workers == 3
    assert host_count(engine, "a,b,c") == "3"


@pytest.mark.parametrize("host", ["-oProxyCommand=x", "a:b", "a:0", "", "a b", "a:1:2"])
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(PlanError, match=r"Ssh.hosts has"):
        Ssh(hosts=(host,))


def test_a_host_is_named_once() -> None:
    with pytest.raises(PlanError, match="'a' twice"):
        Ssh(hosts=("a", "b", "a:2"))


@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        ((), "SSH needs the names of the hosts. Use --hosts a,b"),
        (("a", "b"), "hosts=4, and SSH was given 2 names. Use --hosts a,b."),
        (("a:1", "b:2", "c:3", "d:4"), "The hosts have 10 workers (a:1,b:2,c:3,d:4), and the job has 32."),
    ],
)
def test_numbers_that_do_not_fit_are_refused(hosts: tuple[str, ...], says: str) -> None:
    found = [str(one) for one in refusals(Ssh(hosts=hosts), asked(), detach=False)]
    assert len(found) == 1
    assert says in found[0]


def test_a_run_over_ssh_cannot_be_left() -> None:
    found = [str(one) for one in refusals(Ssh(hosts=("a", "b", "c", "d")), asked(), detach=True)]
    assert "ends with the command that has started it" in found[0]


def test_what_is_sent_can_be_read_and_names_no_token() -> None:
    connections, told = Ssh(hosts=("a:2", "b:6", "c:12", "d:12"), options=("-p", "22")).render(asked())
    assert connections.text.splitlines()[1].startswith("ssh -T -o BatchMode=yes")
    assert "-p 22 b 'exec " in connections.text.splitlines()[1]
    assert connections.text.splitlines()[1].endswith("/venv/bin/python -m paceline host'")
    assert "run /home/me/train.py --slots 12 --hosts 4 --workers 32 --run-dir /home/me/runs/big" in told.text
    assert told.text.count("run /home/me/train.py") == 3
    assert "token" not in told.text


def test_a_client_that_is_missing_is_named() -> None:
    with pytest.raises(LaunchError, match="no-such-ssh cannot be run"):
        SshHost("a", ["no-such-ssh", "a"]).begin()


def test_what_a_client_prints_is_read_to_its_last_line() -> None:
    host = SshHost(
        "a", [sys.executable, "-c", "import sys; print(sys.stdin.readline() * 3000, end='last'); sys.exit(7)"]
    )
    host.begin()
    host.send("x" * 50)
    found: list[str] = []
    while host.exit_code() is None:
        found += host.read()
    assert host.exit_code() == 7
    assert found == ["x" * 50] * 3000 + ["last"]
    host.end()
    host.end()
    assert host.exit_code() == LOST


def test_a_client_is_ended_and_reaped() -> None:
    before = _children()
    host = SshHost("a", [sys.executable, "-c", "import time; time.sleep(600)"])
    host.begin()
    (client,) = _children() - before
    host.end()
    assert not Path(f"/proc/{client}").exists()


def _children() -> set[str]:
    return set(Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split())
