"""Runs worker 0 in the calling process for launcher="inline", so that pdb works in it.

The debugger needs the terminal and the main thread, so the supervisor runs in a thread. The other workers are forked as
usual. The supervisor sends no signals to worker 0, Ctrl-C works as in any program, and the other workers wait for
worker 0 for days.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from paceline.comm.messages.json_channel import Channel
from paceline.launch.fork.forked_worker import call_entry
from paceline.launch.io.event_loop import EventLoop, MessageStream
from paceline.launch.io.signals import StopSignals
from paceline.launch.job.outcome import JobOutcome
from paceline.launch.supervisor import Supervisor
from paceline.plan.job import Assignment

__all__ = ["INLINE_TIMEOUT_S", "run_inline"]

INLINE_TIMEOUT_S = 7 * 24 * 3600.0  # least job.timeout_s: worker 0 may stand in a debugger


def run_inline(
    supervisor: Supervisor, assignment: Assignment, *, entry: str, loop: EventLoop, signals: StopSignals
) -> JobOutcome:
    """Run `assignment` in this process and the other workers as forks; return when all have ended.

    `entry` owns the channel's file descriptor, as in every worker, and has to close it. Exceptions of `entry` are
    raised here, and LaunchError if the other workers could not be started.
    """
    worker = assignment.rank
    ours, theirs = socket.socketpair()
    supervisor.local_workers.add_inline(worker, ours)
    exit_reader, exit_writer = socket.socketpair()

    def exited(message: Mapping[str, Any]) -> None:
        supervisor.local_workers.inline_exited(worker, **message)
        link.close()

    link = MessageStream(exit_reader, loop, on_message=exited, on_close=lambda _: None)
    report = Channel(exit_writer)
    status = 1
    with ThreadPoolExecutor(1, thread_name_prefix="paceline-supervisor") as threads:
        running = threads.submit(supervisor.run)
        try:
            status = call_entry(entry, dataclasses.replace(assignment, channel_fd=theirs.detach()))
        except KeyboardInterrupt:
            status = 128 + signal.SIGINT
            signals.note(signal.SIGINT)
        finally:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform == "linux" else 1)
            if not running.done():
                report.send({"pid": os.getpid(), "exit_code": status, "peak_memory_bytes": peak})
            outcome = _wait(running, signals)
            link.close()
            report.close()
        return outcome


def _wait(running: Future[JobOutcome], signals: StopSignals) -> JobOutcome:
    """Wait for the other workers; Ctrl-C ends them."""
    while True:
        try:
            return running.result()
        except KeyboardInterrupt:
            signals.note(signal.SIGINT)
