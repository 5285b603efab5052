"""Two hosts on this machine: network namespaces with a name and an address each, joined by a cable that can be cut.

A process "on" a host sees that host's network, and its name; files and processes are those of this machine. Needs root
and the programs ip, nsenter and unshare.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["TOOLS", "NamespaceHost", "cut", "hosts_file", "mend", "refusal", "run_tool", "two_hosts"]

NAMES = ("near", "far")
TOOLS = os.pathsep.join([os.defpath, "/usr/sbin", "/sbin", "/usr/bin", "/bin"])
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NamespaceHost:
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


def refusal() -> str | None:
    """Why such hosts cannot be made here; None where they may be."""
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    missing = [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool, path=TOOLS) is None]
    return f"there is no program {missing[0]}" if missing else None


@contextlib.contextmanager
def two_hosts(
    folder: Path, *, names: tuple[str, str] = NAMES, subnet: str = "10.79.0", own_name_is_loopback: bool = False
) -> Iterator[tuple[NamespaceHost, NamespaceHost]]:
    """Make two hosts that know each other by name, and remove them; RuntimeError where the system does not let us.

    `own_name_is_loopback`: each takes its own name for 127.0.1.1, as Debian's installer leaves it.
    """
    addresses = {name: f"{subnet}.{number}" for number, name in enumerate(names, start=1)}
    number = next(_numbers)
    near, far = (
        NamespaceHost(
            name=name,
            address=addresses[name],
            namespace=f"paceline-{os.getpid()}-{number}-{name}",
            device=f"pd{os.getpid()}{number % 10}{end}",
            hosts_file=hosts_file(
                folder / f"hosts.{name}", addresses | ({name: "127.0.1.1"} if own_name_is_loopback else {})
            ),
        )
        for name, end in zip(names, "ab", strict=True)
    )
    try:
        for host in (near, far):
            run_tool("ip", "netns", "add", host.namespace)
        cable = ["link", "add", near.device, "netns", near.namespace, "type", "veth"]
        run_tool("ip", *cable, "peer", far.device, "netns", far.namespace)
        for host in (near, far):
            run_tool("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.device)
            for device in ("lo", host.device):
                run_tool("ip", "-n", host.namespace, "link", "set", device, "up")
        yield near, far
    finally:
        for host in (near, far):
            run_tool("ip", "netns", "delete", host.namespace, check=False)


def cut(host: NamespaceHost) -> None:
    """Pull the cable out of a host, with everything that goes on there unharmed."""
    run_tool("ip", "-n", host.namespace, "link", "set", host.device, "down")


def mend(host: NamespaceHost) -> None:
    """Put the cable back."""
    run_tool("ip", "-n", host.namespace, "link", "set", host.device, "up")


def hosts_file(path: Path, addresses: Mapping[str, str]) -> Path:
    """Write what a host knows as /etc/hosts."""
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def run_tool(program: str, *words: str, check: bool = True) -> None:
    """Run a program of the system's to its end; RuntimeError with what it said where it fails, unless not `check`."""
    found = shutil.which(program, path=TOOLS) or program
    done = subprocess.run([found, *words], capture_output=True, text=True)
    if check and done.returncode != 0:
        raise RuntimeError(f"{program} {' '.join(words)}: {done.stderr.strip()}")
