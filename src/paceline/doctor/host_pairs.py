"""Latency, bandwidth and clocks between two hosts, over one TCP connection that both have proved.

Pairs are measured in rounds, in which each host is in at most one pair, so that pairs do not share a host's network.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from paceline import clock
from paceline.comm.messages.secure_socket import prove_token
from paceline.comm.messages.token_handshake import TokenRefused
from paceline.doctor.measured import HostPair

__all__ = ["HostEnd", "interface_of", "rounds"]

PINGS = 64
PIECE = bytes(1 << 18)
LIMIT_S = 10.0  # of one pair, for each wait
CLOCK = struct.Struct("!d")
NET = Path("/sys/class/net")


def rounds(num_hosts: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of disjoint pairs that contain each pair once (a round-robin tournament, by the circle method)."""
    hosts = list(range(num_hosts + num_hosts % 2))
    for _ in range(len(hosts) - 1):
        half = len(hosts) // 2
        pairs = zip(hosts[:half], reversed(hosts[half:]), strict=True)
        yield sorted((min(pair), max(pair)) for pair in pairs if max(pair) < num_hosts)
        hosts = [hosts[0], hosts[-1], *hosts[1:-1]]


class HostEnd:
    """One host's end: listens at `address` from the beginning, and admits peers that know the secret."""

    def __init__(self, name: str, address: str, secret: bytes) -> None:
        self._name, self._secret = name, secret
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self._listener.settimeout(LIMIT_S)
        self.address, self.port = address, int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    def measure(self, name: str, address: str, port: int, *, seconds: float) -> HostPair:
        """Be the first of a pair: connect to the second, and measure."""
        latency = bandwidth = ahead = error = None
        try:
            with socket.create_connection((address, port), timeout=LIMIT_S) as link:
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                prove_token(link, self._secret, is_head=False)
                link.settimeout(LIMIT_S)
                times: list[float] = []
                clocks: list[float] = []
                for _ in range(PINGS):
                    started = clock.now()
                    link.sendall(b"p")
                    theirs = CLOCK.unpack(_read(link, CLOCK.size))[0]
                    ended = clock.now()
                    times.append(ended - started)
                    clocks.append(theirs - (started + ended) / 2)
                latency, ahead = statistics.median(times) / 2, statistics.median(clocks)
                started, sent = time.perf_counter(), 0
                while time.perf_counter() - started < seconds:
                    link.sendall(PIECE)
                    sent += len(PIECE)
                link.shutdown(socket.SHUT_WR)
                _read(link, 1)  # all has arrived
                bandwidth = sent / (time.perf_counter() - started)
        except (OSError, TokenRefused) as problem:
            error = f"{type(problem).__name__}: {problem}"
        return HostPair(
            first=self._name,
            second=name,
            address=address,
            latency_s=latency,
            bandwidth=bandwidth,
            clock_ahead_s=ahead,
            error=error,
        )

    def answer(self) -> None:
        """Be the second of a pair; returns when the first is done, or did not come within the limit."""
        until = time.monotonic() + LIMIT_S
        with contextlib.suppress(OSError):
            while time.monotonic() < until:
                link, _ = self._listener.accept()
                with link:
                    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    try:
                        prove_token(link, self._secret, is_head=True)
                    except (OSError, TokenRefused):  # a stranger
                        continue
                    link.settimeout(LIMIT_S)
                    for _ in range(PINGS):
                        _read(link, 1)
                        link.sendall(CLOCK.pack(clock.now()))
                    while link.recv(1 << 20):
                        pass
                    link.sendall(b"d")
                return


def _read(link: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        piece = link.recv(num_bytes - len(found))
        if not piece:
            raise ConnectionError("the connection ended")
        found += piece
    return found


def interface_of(address: str, *, net: Path = NET) -> tuple[str, float | None, str | None]:
    """Return the interface with this address, its bytes per second if known, and one of at least twice as much."""
    import psutil

    owner = next(
        (name for name, found in psutil.net_if_addrs().items() if any(one.address == address for one in found)), ""
    )
    rates = {path.name: rate for path in sorted(net.glob("*")) if (rate := _rate(path)) is not None}
    own = rates.get(owner)
    faster = max((name for name in rates if name != owner), key=lambda name: rates[name], default=None)
    if own is None or faster is None or rates[faster] < 2 * own:
        faster = None
    return owner, own, faster


def _rate(path: Path) -> float | None:
    """Bytes per second of an interface that is up. None, too, for one without a device behind it (bridges, ends of
    containers): the kernel names a speed for it that nothing has.
    """
    if not any((path / name).exists() for name in ("device", "bonding")):
        return None
    try:
        if (path / "operstate").read_text().strip() != "up":
            return None
        speed = int((path / "speed").read_text())
    except (OSError, ValueError):
        return None
    return speed * 1e6 / 8 if speed > 0 else None
