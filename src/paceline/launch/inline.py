"""Runs worker 0 in the calling process for launcher="inline", so that pdb works in it.

The debugger needs the terminal and the main thread, so the supervisor runs in a thread. The other workers are forked as
usual. The supervisor sends no signals to worker 0, and the other workers wait for worker 0 for days.

The first Ctrl-C has all workers finish the step, save and leave. In the debugger, before the first step, and the second
time, it is a KeyboardInterrupt as in any program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import Any

from paceline.comm.messages.json_channel import Channel
from paceline.launch.fork.forked_worker import call_entry
from paceline.launch.io.event_loop import EventLoop, MessageStream
from paceline.launch.io.signals import StopSignals
from paceline.launch.job.outcome import JobOutcome
from paceline.launch.supervisor import Supervisor
from paceline.plan.job import Assignment

__all__ = ["INLINE_TIMEOUT_S", "run_inline"]

DEBUGGERS = ("pdb", "bdb", "ipdb", "IPython", "pudb", "pydevd", "debugpy")
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
    with (
        _first_interrupt_leaves(supervisor, signals),
        ThreadPoolExecutor(1, thread_name_prefix="paceline-supervisor") as threads,
    ):
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


@contextlib.contextmanager
def _first_interrupt_leaves(supervisor: Supervisor, signals: StopSignals) -> Iterator[None]:
    """Meanwhile the first Ctrl-C asks all workers to save and leave, where they take steps and no debugger runs."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    has_come = False

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal has_come
        if has_come or not supervisor.has_begun or _is_debugging(frame):
            signal.default_int_handler(signum, frame)
        has_come = True
        signals.note(signum)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _is_debugging(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def _wait(running: Future[JobOutcome], signals: StopSignals) -> JobOutcome:
    """Wait for the other workers; Ctrl-C ends them."""
    while True:
        try:
            return running.result()
        except KeyboardInterrupt:
            signals.note(signal.SIGINT)
