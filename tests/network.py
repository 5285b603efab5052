"""Two hosts on this machine, for tests: those of `paceline.testing.network`, and a mark for tests that need them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from paceline.testing import network
from paceline.testing.network import Host, cut, mend

__all__ = ["TOOLS", "Host", "cut", "mend", "needs_network", "two_hosts"]

Test = TypeVar("Test", bound=Callable[..., None])
TOOLS = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def needs_network(test: Test) -> Test:
    """Skip a test, with the reason, where such hosts cannot be made."""
    not_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: network namespaces are made and removed")
    marked: Test = pytest.mark.needs("ip", "nsenter", "unshare")(test)
    return not_root(marked)


@contextlib.contextmanager
def two_hosts(
    folder: Path, *, names: tuple[str, str] = ("n1", "n2"), subnet: str = "10.78.0", own_name_is_loopback: bool = False
) -> Iterator[list[Host]]:
    """Make two hosts that know each other by name, and remove them."""
    with network.two_hosts(folder, names=names, subnet=subnet, own_name_is_loopback=own_name_is_loopback) as made:
        yield list(made)
