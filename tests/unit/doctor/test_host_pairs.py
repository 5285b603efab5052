"""Pairs of hosts: rounds, the measurement over loopback, strangers, and hosts that are not there."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.doctor import host_pairs
from paceline.doctor.host_pairs import HostEnd, interface_of, rounds

SECRET = b"s" * 32


@pytest.fixture
def ends() -> Iterator[tuple[HostEnd, HostEnd]]:
    pair = HostEnd("east", "127.0.0.1", SECRET), HostEnd("west", "127.0.0.1", SECRET)
    yield pair
    for end in pair:
        end.close()


@pytest.mark.parametrize("num_hosts", [2, 3, 4, 5, 8, 13])
def test_rounds_have_each_pair_once_and_each_host_at_most_once_a_round(num_hosts: int) -> None:
    found = list(rounds(num_hosts))
    assert sorted(itertools.chain.from_iterable(found)) == list(itertools.combinations(range(num_hosts), 2))
    for pairs in found:
        members = list(itertools.chain.from_iterable(pairs))
        assert len(members) == len(set(members))
    assert len(found) == num_hosts - 1 + num_hosts % 2


def test_a_pair_has_latency_bandwidth_and_clocks(ends: tuple[HostEnd, HostEnd]) -> None:
    first, second = ends
    thread = threading.Thread(target=second.answer)
    thread.start()
    found = first.measure("west", second.address, second.port, seconds=0.05)
    thread.join(10)
    assert not thread.is_alive()
    assert (found.first, found.second, found.error) == ("east", "west", None)
    assert found.latency_s is not None and 1e-6 < found.latency_s < 0.1
    assert found.bandwidth is not None and found.bandwidth > 1e6
    assert found.clock_ahead_s is not None and abs(found.clock_ahead_s) < 0.1


def test_a_stranger_is_sent_away_and_the_peer_is_measured(ends: tuple[HostEnd, HostEnd]) -> None:
    first, second = ends
    thread = threading.Thread(target=second.answer)
    thread.start()
    with socket.create_connection((second.address, second.port)) as stranger:
        stranger.settimeout(5)
        stranger.sendall(b"PACELIN2" + bytes(64))  # a nonce, and no proof
        told = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := stranger.recv(1 << 16):
                told += piece
        assert told.startswith(b"PACELIN2")
        assert told[40:] in (b"", bytes(32)), "a refusal, and no proof"
    assert first.measure("west", second.address, second.port, seconds=0.01).error is None
    thread.join(10)


def test_a_peer_with_another_secret_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pairs, "LIMIT_S", 0.5)
    mine, other = HostEnd("east", "127.0.0.1", SECRET), HostEnd("west", "127.0.0.1", b"other")
    thread = threading.Thread(target=other.answer)
    thread.start()
    found = mine.measure("west", other.address, other.port, seconds=0.01)
    thread.join(10)
    mine.close()
    other.close()
    assert found.bandwidth is None
    assert found.error is not None


def test_a_host_that_is_not_there_is_an_error_with_its_cause(ends: tuple[HostEnd, HostEnd]) -> None:
    first, second = ends
    port = second.port
    second.close()
    found = first.measure("west", "127.0.0.1", port, seconds=0.01)
    assert found.error is not None
    assert "refused" in found.error
    assert (found.latency_s, found.bandwidth, found.clock_ahead_s) == (None, None, None)


def test_an_answer_ends_when_nobody_comes(ends: tuple[HostEnd, HostEnd], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pairs, "LIMIT_S", 0.05)
    end = HostEnd("alone", "127.0.0.1", SECRET)
    end.answer()
    end.close()


def interface(folder: Path, name: str, *, state: str = "up", speed: str, has_device: bool = True) -> None:
    (folder / name / "device" if has_device else folder / name).mkdir(parents=True)
    (folder / name / "operstate").write_text(state)
    (folder / name / "speed").write_text(speed)


def test_the_interface_in_use_and_a_faster_one(tmp_path: Path) -> None:
    interface(tmp_path, "lo", speed="1000")
    interface(tmp_path, "ib0", speed="200000")
    interface(tmp_path, "eth9", speed="400000", state="down")
    interface(tmp_path, "docker0", speed="400000", has_device=False)
    assert interface_of("127.0.0.1", net=tmp_path) == ("lo", 125e6, "ib0")
    (tmp_path / "ib0" / "speed").write_text("1500")
    assert interface_of("127.0.0.1", net=tmp_path) == ("lo", 125e6, None)
    (tmp_path / "lo" / "speed").write_text("-1")
    assert interface_of("127.0.0.1", net=tmp_path) == ("lo", None, None)


def test_an_end_of_a_container_has_no_rate_and_several_devices_in_one_have(tmp_path: Path) -> None:
    interface(tmp_path, "lo", speed="10000", has_device=False)
    interface(tmp_path, "eth0", speed="100000")
    assert interface_of("127.0.0.1", net=tmp_path) == ("lo", None, None)
    (tmp_path / "lo" / "bonding").mkdir()
    assert interface_of("127.0.0.1", net=tmp_path) == ("lo", 1.25e9, "eth0")
