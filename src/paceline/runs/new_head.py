"""The process of a coordinator that takes over: `python -m paceline.runs.new_head`, started by a host's supervisor.

It may be started before it is needed. It gets its job as one JSON object on standard input, becomes the coordinator by
the run's register, and has the other hosts return to it; from then on it is the run's coordinator, without workers of
its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import sys
from pathlib import Path

from paceline import config
from paceline.errors import LaunchError
from paceline.launch.coordinator.head_register import HeadRecord, HeadRegister, Superseded
from paceline.launch.coordinator.takeover import Takeover
from paceline.launch.fork.process_lifetime import set_parent_death_signal
from paceline.plan.job import Assignment, Job, assignment_from_json, head_address
from paceline.processes import this_host
from paceline.runs.attempt import Attempt
from paceline.runs.restart_loop import run_with_restarts

__all__ = ["main"]


def main() -> int:
    """Take over, and lead the run to its end; return its exit status. Without a word it was not needed."""
    set_parent_death_signal(signal.SIGKILL)
    said = sys.stdin.read()
    if not said:
        return 0
    words = json.loads(said)
    if os.getppid() != words["parent"]:
        return 0
    place = assignment_from_json(words["assignment"])
    return _lead(place, config.read(Job, words["asked"]), HeadRecord.from_json(words["before"]))


def _lead(place: Assignment, asked: Job, before: HeadRecord) -> int:
    register = HeadRegister(Path(place.run_dir))
    with _listen(place.address, head_address(before.address)[1]) as listener:
        address = f"{place.address}:{listener.getsockname()[1]}"
        record = dataclasses.replace(before, epoch=before.epoch + 1, host=this_host(), address=address)
        try:
            register.take_over(record)
        except Superseded:
            return 0  # another host was faster
        job = dataclasses.replace(place.job, run_dir=place.run_dir)
        attempt = Attempt(
            job,
            plan=place.plan,
            given=place.given,
            command_started=place.command_started,
            asked=asked,
            takeover=Takeover(register=register, record=record, before=before),
        )
        try:
            _, outcome = run_with_restarts(attempt, None, listener=listener.dup())
        except LaunchError as error:
            print(f"paceline: {error}", file=sys.stderr, flush=True)
            return 1
    return outcome.exit_code


def _listen(address: str, port: int) -> socket.socket:
    """A socket at the port of the lost coordinator, which firewalls let pass, or at any other one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for number in (port, 0):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address, number))
            sock.listen()
        except OSError:
            sock.close()
        else:
            return sock
    raise LaunchError(f"cannot listen at {address}")


if __name__ == "__main__":
    sys.exit(main())
