"""Two hosts on this machine, for tests: network namespaces with a name and an address each, joined by a cable (veth).

A process "on" a host sees that host's network, and its name; files and processes are those of this machine. Needs root.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

__all__ = ["Host", "cut", "mend", "needs_network", "two_hosts"]

Test = TypeVar("Test", bound=Callable[..., None])
TOOLS = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """One of them."""

    name: str
    address: str
    namespace: str
    device: str  # its end of the cable
    hosts_file: Path  # what it knows as /etc/hosts

    @property
    def prefix(self) -> list[str]:
        """What to put before a command to run it on this host."""
        # nsenter, not `ip netns exec`: that one remounts /sys, without cgroups.
        enter = ["nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "--uts", "--mount"]
        become = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
        return [*enter, "sh", "-c", become, self.name, str(self.hosts_file)]


def needs_network(test: Test) -> Test:
    """Skip a test, with the reason, where such hosts cannot be made."""
    not_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: network namespaces are made and removed")
    marked: Test = pytest.mark.needs("ip", "nsenter", "unshare")(test)
    return not_root(marked)


@contextlib.contextmanager
def two_hosts(
    folder: Path, *, names: tuple[str, str] = ("n1", "n2"), subnet: str = "10.78.0", own_name_is_loopback: bool = False
) -> Iterator[list[Host]]:
    """Make two hosts that know each other by name, and remove them.

    `own_name_is_loopback`: each takes its own name for 127.0.1.1, as Debian's installer leaves it.
    """
    addresses = [f"{subnet}.{number}" for number in (1, 2)]
    for own in names:
        lines = ["127.0.0.1 localhost"]
        for address, name in zip(addresses, names, strict=True):
            lines.append(f"{'127.0.1.1' if own_name_is_loopback and name == own else address} {name}")
        (folder / f"hosts.{own}").write_text("\n".join(lines) + "\n")
    hosts = [
        Host(
            name=name,
            address=address,
            namespace=f"paceline-{os.getpid()}-{name}",
            device=f"pl{os.getpid()}{'ab'[number]}",
            hosts_file=folder / f"hosts.{name}",
        )
        for number, (name, address) in enumerate(zip(names, addresses, strict=True))
    ]
    try:
        for host in hosts:
            _ip("netns", "add", host.namespace)
        one, other = hosts
        cable = ["link", "add", one.device, "netns", one.namespace, "type", "veth"]
        _ip(*cable, "peer", other.device, "netns", other.namespace)
        for host in hosts:
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.device)
            for device in ("lo", host.device):
                _ip("-n", host.namespace, "link", "set", device, "up")
        yield hosts
    finally:
        for host in hosts:
            _ip("netns", "delete", host.namespace, check=False)


def cut(host: Host) -> None:
    """Pull the cable out of a host, with everything that goes on there unharmed."""
    _ip("-n", host.namespace, "link", "set", host.device, "down")


def mend(host: Host) -> None:
    """Put the cable back."""
    _ip("-n", host.namespace, "link", "set", host.device, "up")


def _ip(*words: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *words], env=os.environ | {"PATH": TOOLS}, capture_output=True, text=True)
    if check and done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
