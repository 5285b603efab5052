"""Two hosts on this machine, for tests: those of `paceline.testing.network_namespaces`, and a mark for tests that need
them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from paceline.testing import network_namespaces
from paceline.testing.network_namespaces import NamespaceHost, cut, mend

__all__ = ["TOOLS", "NamespaceHost", "cut", "free_port", "mend", "needs_network", "two_hosts"]

Test = TypeVar("Test", bound=Callable[..., None])
# Below those that the kernel gives to connecting sockets (ip_local_port_range): one of them could be taken by any
# process before the program that is told of it listens there. Each session of tests begins elsewhere.
_ports = itertools.count(10_000 + os.getpid() * 67 % 20_000)
TOOLS = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def needs_network(test: Test) -> Test:
    """Skip a test, with the reason, where such hosts cannot be made."""
    not_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: network namespaces are made and removed")
    marked: Test = pytest.mark.needs("ip", "nsenter", "unshare")(test)
    return not_root(marked)


@contextlib.contextmanager
def two_hosts(
    folder: Path, *, names: tuple[str, str] = ("n1", "n2"), subnet: str = "10.78.0", own_name_is_loopback: bool = False
) -> Iterator[list[NamespaceHost]]:
    """Make two hosts that know each other by name, and remove them."""
    with network_namespaces.two_hosts(
        folder, names=names, subnet=subnet, own_name_is_loopback=own_name_is_loopback
    ) as made:
        yield list(made)


def free_port() -> int:
    """A port of 127.0.0.1 where nobody listens, which no other test and no connection is given."""
    for port in _ports:
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise AssertionError("there is no end of numbers")
