"""Several hosts on this machine, for tests of engines: network namespaces around a switch, and the end of one of them.

A process "on" a host sees that host's network and name; files and processes are those of this machine.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.testing.network_namespaces import NamespaceHost, hosts_file, run_tool

__all__ = ["bridged_hosts", "end_host", "processes_on"]

GONE_S = 10.0
_numbers = itertools.count()


@contextlib.contextmanager
def bridged_hosts(folder: Path, names: Sequence[str], *, subnet: str) -> Iterator[list[NamespaceHost]]:
    """Make these hosts, which know each other by name, and remove them with all that runs there."""
    number = f"{os.getpid()}-{next(_numbers)}"
    switch = f"paceline-{number}-switch"
    addresses = {name: f"{subnet}.{place}" for place, name in enumerate(names, start=1)}
    hosts = [
        NamespaceHost(
            name=name,
            address=addresses[name],
            namespace=f"paceline-{number}-{name}",
            device="eth0",
            hosts_file=hosts_file(folder / f"hosts.{name}", addresses),
        )
        for name in names
    ]
    try:
        run_tool("ip", "netns", "add", switch)
        run_tool("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        run_tool("ip", "-n", switch, "link", "set", "br0", "up")
        for place, host in enumerate(hosts):
            run_tool("ip", "netns", "add", host.namespace)
            port = f"port{place}"
            cable = ["link", "add", host.device, "netns", host.namespace, "type", "veth"]
            run_tool("ip", *cable, "peer", port, "netns", switch)
            run_tool("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            run_tool("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.device)
            for device in ("lo", host.device):
                run_tool("ip", "-n", host.namespace, "link", "set", device, "up")
        yield hosts
    finally:
        for host in hosts:
            with contextlib.suppress(FileNotFoundError):
                end_host(host)
            run_tool("ip", "netns", "delete", host.namespace, check=False)
        run_tool("ip", "netns", "delete", switch, check=False)


def processes_on(host: NamespaceHost) -> list[int]:
    """The processes that see a host's network."""
    inode = os.stat(f"/run/netns/{host.namespace}").st_ino
    found = list[int]()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}/ns/net").st_ino == inode:
                    found.append(int(name))
    return found


def end_host(host: NamespaceHost, signum: int = signal.SIGKILL) -> None:
    """kill -9 to all that runs on a host, until nothing does."""
    deadline = time.monotonic() + GONE_S
    while running := processes_on(host):
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {running} on {host.name} do not end")
        time.sleep(0.01)  # for their parents to reap them
