"""Hosts and slots from the options of horovodrun: lists, host files, and scripts that are asked again during a run.

A script prints a line `HOST:SLOTS` or `HOST` for each host. What it prints later gives an elastic run on this host more
workers, or fewer.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from paceline.errors import PlanError

__all__ = ["HostScript", "count_of", "hosts_of", "is_here", "lines_of"]

LOCAL = ("localhost", "127.0.0.1", "::1")
LIMIT_S = 60.0  # for a script
EVERY_S = 1.0  # as in Horovod


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HostScript:
    """A script that says which hosts there are. `slots`: of a host that it names without a number."""

    path: str
    slots: int
    least: int = 1  # workers of the run
    most: int = 1

    def hosts(self) -> list[tuple[str, int]]:
        """Ask the script. Raises PlanError where it fails, or prints something else."""
        try:
            found = subprocess.run(
                [os.path.abspath(self.path)], capture_output=True, text=True, timeout=LIMIT_S, check=True
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise PlanError(f"--host-discovery-script {self.path} has failed: {error}.") from error
        return hosts_of(found.stdout.splitlines(), self.slots)

    def wanted(self) -> int:
        """Return how many workers the run is to have by what the script says now of this host."""
        here = sum(slots for name, slots in self.hosts() if is_here(name))
        return max(self.least, min(self.most, here))

    def follow(self, resize: Callable[[int], str | None], *, begins_with: int, ends: threading.Event) -> None:
        """Ask the script every second until `ends`, and call `resize(workers)` when the number has changed.

        `resize` returns why it could not be done, or "" where it is; None: the run takes no requests now, and is asked
        again. A script that fails is reported once, and asked again.
        """
        number, said = begins_with, ""
        while not ends.wait(EVERY_S):
            try:
                wanted = self.wanted()
                answer = resize(wanted) if wanted != number else ""
                number = wanted if answer == "" else number
                problem = answer or ""
            except PlanError as error:
                problem = str(error)
            if problem and problem != said:
                print(f"horovodrun: {problem}", file=sys.stderr)
            said = problem


def hosts_of(lines: Iterable[str], default: int) -> list[tuple[str, int]]:
    """Read lines that name a host each. Raises PlanError for what is none."""
    return [_host_of(line, default) for line in lines if line.strip() and not line.strip().startswith("#")]


def _host_of(line: str, default: int) -> tuple[str, int]:
    """Read `host:slots`, or `host slots=n` as in a host file. Raises PlanError for something else."""
    name, _, rest = line.strip().replace(" slots=", ":").replace("\t", "").partition(":")
    slots = default if not rest else count_of(f"the slots of {name}", rest.strip())
    if not name or slots is None:
        raise PlanError(f"{line!r} is no host: write HOST:SLOTS, as in node1:4.")
    return name.strip(), slots


def lines_of(path: Path) -> list[str]:
    """Read a host file. Raises PlanError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise PlanError(f"the host file {path} cannot be read: {error.strerror}.") from error


def is_here(name: str) -> bool:
    """Return whether a name is that of this host."""
    return name in LOCAL or name in (socket.gethostname(), socket.getfqdn())


def count_of(what: str, text: str | None) -> int | None:
    """Return the number that an option gives, None where it is not given. Raises PlanError for another value."""
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise PlanError(f"{what} is {text!r}; it must be a whole number, 1 or more.")
    return int(text)
