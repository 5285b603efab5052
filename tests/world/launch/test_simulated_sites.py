"""Far sites on this machine: what goes between them takes its time, and the example trains there and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from network_hosts import needs_network
from paceline.testing.sites import NETNS, PREFIX, remove_leftovers, sites
from programs import write_program

EXAMPLE = Path(__file__).parents[3] / "examples" / "four_sites.py"
ECHO = """
import socket, sys
server = socket.create_server(("", 5000))
print("ready", flush=True)
connection, _ = server.accept()
while got := connection.recv(1 << 16):
    connection.sendall(got)
"""
ASK = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000))
began = time.monotonic()
connection.sendall(b"?")
connection.recv(1)
once = time.monotonic() - began
size = int(sys.argv[2])
connection.sendall(bytes(size))
while size:
    size -= len(connection.recv(1 << 16))
print(once, time.monotonic() - began - once)
"""


def namespaces() -> list[str]:
    return sorted(path.name for path in NETNS.glob(f"{PREFIX}-*"))


def shaped() -> list[str]:
    """What the kernel was told to slow down, on the sites that were made here and their switch."""
    ours = [name for name in namespaces() if name.startswith(f"{PREFIX}-{os.getpid()}-")]
    shows = [["tc", "-n", name, "qdisc", "show"] for name in ours]
    said = [subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout for words in shows]
    return [line for text in said for line in text.splitlines() if " tbf " in line]


@needs_network
@pytest.mark.needs("tc")
@pytest.mark.parametrize(("bits_per_s", "delay_s"), [(8e6, 0.03), (8e6, 0.0), (None, 0.0)])
def test_what_goes_from_a_site_to_another_by_name_takes_its_delay_and_rate(
    tmp_path: Path, bits_per_s: float | None, delay_s: float
) -> None:
    num_bytes = 1 << 20
    with sites(tmp_path, count=2, bits_per_s=bits_per_s, delay_s=delay_s) as (north, east):
        assert len(namespaces()) >= 2
        assert bool(shaped()) == (bits_per_s is not None and delay_s == 0)
        with subprocess.Popen([*east.prefix, sys.executable, "-c", ECHO], stdout=subprocess.PIPE) as server:
            assert server.stdout is not None and server.stdout.readline() == b"ready\n"
            ask = [*north.prefix, sys.executable, "-c", ASK, east.name, str(num_bytes)]
            said = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=True).stdout
    there_and_back_s, echo_s = map(float, said.split())
    assert there_and_back_s >= 2 * delay_s
    # What the cable's buffer (of the kernel's shaping: its burst) takes at once is not slowed down.
    least_s = 0.0 if bits_per_s is None else (num_bytes - (256 << 10)) * 8 / bits_per_s
    assert least_s <= echo_s


@needs_network
@pytest.mark.needs("tc")
def test_sites_of_a_maker_that_was_killed_are_removed_by_the_next() -> None:
    with subprocess.Popen(["true"]) as gone:
        pass
    left = f"{PREFIX}-{gone.pid}-0-north"
    subprocess.run(["ip", "netns", "add", left], check=True)
    assert left in remove_leftovers()
    assert left not in namespaces()


@needs_network
@pytest.mark.needs("tc")
def test_the_example_trains_on_its_sites_and_leaves_none_behind(tmp_path: Path) -> None:
    before = namespaces()
    said = started(tmp_path, "--wire", "int8", "--", "--max-steps", "4").communicate(timeout=120)[0]
    assert "finished at step 4" in said and "2 workers (1 of them here on north" in said, said
    assert "0.25" in said.partition("wire ")[2]
    assert namespaces() == before


@needs_network
@pytest.mark.needs("tc")
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_example_that_is_stopped_while_it_starts_leaves_no_site_behind(
    tmp_path: Path, signum: int, status: int
) -> None:
    before = namespaces()
    with started(tmp_path, "--", "--epochs", "100000") as example:
        assert example.stdout is not None
        said = ""
        while " has come" not in said:  # so both have begun
            line = example.stdout.readline()
            assert line, said
            said += line
        # As a terminal does it: Ctrl-C is for all that the command has started.
        os.killpg(example.pid, signum) if signum == signal.SIGINT else example.send_signal(signum)
        said += example.communicate(timeout=120)[0]
    # Each site gets the terminal's Ctrl-C by itself: one may see first that the other one has gone, and ends alike.
    assert example.returncode == status, said
    assert namespaces() == before


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    """The example, with two sites and a model that is small."""
    site = ["--sites", "2", "--ms", "2", "--script", str(write_program(folder)), *words]
    return subprocess.Popen(
        [sys.executable, str(EXAMPLE), *site],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
