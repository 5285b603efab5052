"""Hosts that share a disk find each other in the run's directory."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import PlanError, RunFileError
from paceline.launch.coordinator.meeting_point import MeetingPoint, own_address
from paceline.plan import Job

HOLDER = """
import sys
from pathlib import Path
from paceline.launch.coordinator.meeting_point import MeetingPoint
point = MeetingPoint(Path(sys.argv[1]))
sock = point.listen()
print(point.address() if sock is not None else "taken", flush=True)
sys.stdin.read()
"""


def holder(run_dir: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", HOLDER, str(run_dir)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> str:
    if process.stdout is None:
        raise RuntimeError("it has no output")
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=30)


def test_the_first_host_listens_and_the_others_read_where(tmp_path: Path) -> None:
    point = MeetingPoint(tmp_path / "r")
    assert point.address() is None
    listener = point.listen()
    assert listener is not None
    with listener:
        host, port = listener.getsockname()
        assert MeetingPoint(tmp_path / "r").address() == f"{host}:{port}"
        other = holder(tmp_path / "r")
        assert said(other) == "taken"
        end(other)
        with socket.create_connection((host, port), 10):
            pass
    point.close()
    assert (tmp_path / "r").stat().st_mode & 0o077 == 0


def test_a_host_that_is_killed_leaves_its_place_to_another(tmp_path: Path) -> None:
    first = holder(tmp_path)
    before = said(first)
    point = MeetingPoint(tmp_path)
    assert point.listen() is None
    assert point.address() == before
    os.kill(first.pid, signal.SIGKILL)
    end(first)
    listener = point.listen()
    assert listener is not None
    assert point.address() != before
    listener.close()
    point.close()


@pytest.mark.thorough
def test_of_many_hosts_at_once_one_listens(tmp_path: Path) -> None:
    hosts = [holder(tmp_path) for _ in range(6)]
    answers = [said(host) for host in hosts]
    for host in hosts:
        end(host)
    assert answers.count("taken") == 5


@pytest.mark.parametrize("text", ["", "{", '{"address": 3}', "[]", json.dumps({"address": "x" * 9000})])
def test_a_damaged_file_is_no_address(tmp_path: Path, text: str) -> None:
    (tmp_path / "meeting.json").write_text(text)
    assert MeetingPoint(tmp_path).address() is None


def test_a_directory_that_cannot_be_made_is_an_error_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFileError, match="file"):
        MeetingPoint(tmp_path / "file" / "r").listen()


def test_the_own_address_can_be_bound() -> None:
    address = own_address()
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
        sock.bind((address, 0))


def test_hosts_that_meet_in_the_directory_need_its_name() -> None:
    assert Job(hosts=2, head="auto", run_dir="r").head == "auto"
    with pytest.raises(PlanError, match="head='auto' has the hosts meet in the run directory"):
        Job(hosts=2, head="auto")
