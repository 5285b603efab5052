"""Sites on this machine that are far from one another: each a network namespace, with a slow cable to one switch.

A process "on" a site sees that site's network and name; files, processors and memory are those of this machine. A rate
alone is shaped by the kernel; a delay needs a switch of our own (`testing/switch.py`). Needs root and the programs ip,
tc, nsenter and unshare.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.testing.network_namespaces import TOOLS, NamespaceHost, hosts_file, run_tool
from paceline.testing.network_namespaces import refusal as refusal_of_hosts

__all__ = ["DEVICE", "NAMES", "refusal", "remove_leftovers", "sites"]

NAMES = ("north", "east", "south", "west")  # of the first four; then site5, ...
DEVICE = "site0"  # of every site
PREFIX = "paceline-site"  # of the namespaces, before the number of the process that made them
NETNS = Path("/run/netns")
MTU = 9000  # larger frames cost the switch less of the processors
TUNSETIFF, TAP_WITHOUT_INFO = 0x400454CA, 0x1002
_numbers = itertools.count()


def refusal() -> str | None:
    """Why sites cannot be made here; None where they may be."""
    if (why := refusal_of_hosts()) is not None:
        return why
    return None if shutil.which("tc", path=TOOLS) else "there is no program tc (it belongs to iproute2)"


@contextlib.contextmanager
def sites(
    folder: Path, *, count: int = 4, bits_per_s: float | None = None, delay_s: float = 0.0, subnet: str = "10.84.0"
) -> Iterator[list[NamespaceHost]]:
    """Make sites that know each other by name, and remove them; RuntimeError where the system does not let us.

    Every cable takes `bits_per_s` each way (None: as fast as memory), and everything takes `delay_s` from one site to
    another, so twice that there and back. `folder` gets what they know as /etc/hosts. What a maker that was killed has
    left behind is removed first.
    """
    remove_leftovers()
    names = [*NAMES[:count], *(f"site{number}" for number in range(len(NAMES) + 1, count + 1))]
    addresses = {name: f"{subnet}.{number}" for number, name in enumerate(names, start=1)}
    prefix = f"{PREFIX}-{os.getpid()}-{next(_numbers)}"
    made = [
        NamespaceHost(
            name=name,
            address=address,
            namespace=f"{prefix}-{name}",
            device=DEVICE,
            hosts_file=hosts_file(folder / f"hosts.{name}", addresses),
        )
        for name, address in addresses.items()
    ]
    join = _joined_by_kernel if delay_s == 0 else _joined_with_delay
    with contextlib.ExitStack() as stack:
        for host in made:
            _namespace(stack, host.namespace)
        join(stack, made, f"{prefix}-switch", bits_per_s or 0.0, delay_s)
        for host in made:
            run_tool("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                run_tool("ip", "-n", host.namespace, "link", "set", device, "up")
        yield made


def remove_leftovers() -> list[str]:
    """Remove the namespaces of makers that were killed before they could do it, and return their names."""
    found = [path.name for path in NETNS.glob(f"{PREFIX}-*")] if NETNS.exists() else []
    left = [name for name in found if not Path(f"/proc/{name.removeprefix(PREFIX).split('-')[1]}").exists()]
    for name in left:
        run_tool("ip", "netns", "delete", name)
    return left


def _joined_by_kernel(
    stack: contextlib.ExitStack, hosts: Sequence[NamespaceHost], switch: str, bits_per_s: float, delay_s: float
) -> None:
    """Cables to a bridge, which lies in a namespace of its own; the kernel shapes both ends of each."""
    _namespace(stack, switch)
    run_tool("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
    run_tool("ip", "-n", switch, "link", "set", "bridge", "up")
    for number, host in enumerate(hosts):
        port = f"port{number}"
        cable = ["link", "add", port, "mtu", str(MTU), "type", "veth"]
        run_tool("ip", "-n", switch, *cable, "peer", DEVICE, "mtu", str(MTU), "netns", host.namespace)
        run_tool("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
        if bits_per_s:
            shape = ["root", "tbf", "rate", f"{int(bits_per_s)}bit", "burst", "256kb", "latency", "100ms"]
            for namespace, device in ((switch, port), (host.namespace, DEVICE)):
                run_tool("tc", "-n", namespace, "qdisc", "add", "dev", device, *shape)


def _joined_with_delay(
    stack: contextlib.ExitStack, hosts: Sequence[NamespaceHost], switch: str, bits_per_s: float, delay_s: float
) -> None:
    """TAP devices whose other ends are held by a process that passes the frames on."""
    taps: list[int] = []
    for number, host in enumerate(hosts):
        tap = os.open("/dev/net/tun", os.O_RDWR)
        stack.callback(os.close, tap)
        here = f"ps{os.getpid()}x{number}"  # its name until it is on its site
        fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", here.encode(), TAP_WITHOUT_INFO))
        run_tool("ip", "link", "set", here, "mtu", str(MTU), "netns", host.namespace, "name", DEVICE)
        taps.append(tap)
    words = [sys.executable, "-m", "paceline.testing.switch", str(bits_per_s), str(delay_s), *map(str, taps)]
    process = stack.enter_context(subprocess.Popen(words, pass_fds=taps, stdout=subprocess.PIPE))
    stack.callback(process.kill)
    if process.stdout is None or process.stdout.readline() != b"ready\n":
        raise RuntimeError(f"the switch of the sites ended at once, with {process.wait()}")


def _namespace(stack: contextlib.ExitStack, name: str) -> None:
    run_tool("ip", "netns", "add", name)
    stack.callback(run_tool, "ip", "netns", "delete", name, check=False)
