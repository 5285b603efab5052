"""The worker's connection to the coordinator of the run, which decides which workers are members; a thread reads it.

The thread also sends heartbeats, outside of the training thread, and notices SIGTERM: a request to leave, or, after
the coordinator has sent "end", the end itself. Python's own signal handlers would wait until the training thread comes
out of its present call. Where the supervisor has exited, this worker is an *orphan*: it can still save together with
the others and leave, and SIGTERM ends it at once.

Where the coordinator is on another host, each of its answers allows a worker to go on for a while. When that time is
over, the worker ends itself, whatever its own supervisor does (`paceline.elastic.lease`).

Under asynchronous updates the thread also *acknowledges* each generation for the training thread, at once: the training
thread needs no other member, and may be in the middle of a long batch.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from paceline import clock, environment
from paceline.comm.group import Disrupted
from paceline.comm.messages.json_channel import Channel, ChannelClosed
from paceline.elastic.heartbeats import heartbeat_interval_s
from paceline.elastic.lease import seconds_since_boot
from paceline.elastic.membership_messages import AT_ONCE, PREEMPTED, Finish, MembershipView
from paceline.errors import SyncError

__all__ = ["CoordinatorClient"]

SUPERVISOR_LOST = Finish(exit_code=PREEMPTED, reason="the supervisor of these workers has gone")


class CoordinatorClient:
    """Keeps the coordinator's newest message for the training thread, which only `check` interrupts, by raising."""

    def __init__(self, channel: Channel, worker: int, *, silence_s: float) -> None:
        """After `silence_s` without a message from this worker the coordinator counts it as lost."""
        self.worker = worker
        self._heartbeat_s = heartbeat_interval_s(silence_s)
        self._finish: Finish | None = None
        self._channel = channel
        self._view: MembershipView | None = None
        self._changed = threading.Condition()
        self.step: Callable[[], int] = lambda: 0  # the committed one; sent with every message
        self._ends = False  # the coordinator has sent "end": SIGTERM is no request any more
        self._signals: socket.socket | None = None
        self._requests = {int(signal.SIGTERM)}  # signals that ask to leave
        self._closed: ChannelClosed | None = None
        self._sent_at = 0.0
        self._until = math.inf  # by `seconds_since_boot`, this worker may go on
        self._is_closed = False  # this worker has finished its part of the run
        self.acknowledges = False  # generations, for the training thread; each interrupts all before it
        self.has_acknowledged = False  # one since this was set to False
        self._is_detached = False  # the training thread needs no other member
        self._is_joining = False  # this newcomer is in no generation yet

    def begin(self, *, hears_sigterm: bool) -> None:
        """Start the thread; `hears_sigterm`: in the main thread of a process of its own."""
        fd = self._channel.begin_listening()
        if hears_sigterm and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self._signals, theirs = socket.socketpair()
            theirs.setblocking(False)
            self._wakeup = theirs
            for signum in (signal.SIGTERM, *environment.notice_signals()):
                if signal.getsignal(signum) == signal.SIG_DFL:
                    signal.signal(signum, _ignore_signal)
                    self._requests.add(int(signum))
            signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
            # In processes that the user forks, these signals have their default effect.
            os.register_at_fork(after_in_child=lambda: _restore_signals(self._requests))
        threading.Thread(target=self._listen, args=(fd,), name="paceline-orders", daemon=True).start()

    @property
    def finish(self) -> Finish | None:
        """How the run is to end: by the coordinator's order, or, without a supervisor, saved and to be run again."""
        return self._finish or (SUPERVISOR_LOST if self._closed is not None else None)

    @property
    def is_orphaned(self) -> bool:
        """Whether the supervisor has exited."""
        return self._closed is not None

    def tell(self, op: str, **fields: Any) -> None:
        """Send a message to the coordinator. Nothing happens where it is lost: the thread notices that."""
        self._sent_at = time.monotonic()
        with contextlib.suppress(ChannelClosed):
            self._channel.send({"op": op, "step": self.step(), **fields})

    def report_snapshot(self) -> None:
        """Report one more complete memory checkpoint to the supervisor of this host alone; the coordinator does not
        take it as a heartbeat."""
        with contextlib.suppress(ChannelClosed):
            self._channel.send({"op": "kept"})

    def detach(self) -> None:
        """From now on the training thread needs no other member, and no generation interrupts it."""
        self._is_detached = True

    def join(self) -> None:
        """From now on the training thread takes part in the members' operations."""
        self._is_detached = False

    def join_detached(self) -> Finish | None:
        """Report that this newcomer needs no state from the others, and wait until it is a member.

        Returns how the run ends where it does instead."""
        self._is_joining = True
        self.tell("ready", generation=self.newest)
        with self._changed:
            while self._view is None or self.worker not in self._view.members:
                if self.finish is not None:
                    return self.finish
                self._changed.wait()
        return None

    @property
    def is_dismissed(self) -> bool:
        """Whether the others go on without this worker."""
        view = self._view
        return view is not None and self.worker not in view.members and not self._is_joining

    @property
    def members(self) -> tuple[int, ...]:
        """The members of the newest generation; none where there was only the first."""
        return () if self._view is None else self._view.members

    def await_enough(self) -> None:
        """Return when there are enough members to take steps, or this worker has something else to do."""
        with self._changed:
            while self._view is not None and self._view.holds and self.finish is None and not self.is_dismissed:
                self._changed.wait()

    def check(self, generation: int) -> None:
        """Raise Disrupted where the generation is over, at once."""
        view = self._view
        if view is not None and not self._is_detached and view.interrupts(generation):
            raise Disrupted(view.reason)

    def is_over(self, generation: int) -> bool:
        """Whether a newer generation has interrupted this one."""
        view = self._view
        return view is not None and view.interrupts(generation)

    def check_newest(self, generation: int) -> None:
        """Raise Disrupted where there is a newer generation of any kind, so that this one needs no joining."""
        view = self._view
        if view is not None and view.generation > generation:
            raise Disrupted(view.reason)

    def planned(self, generation: int) -> MembershipView | None:
        """The generation that is to begin between two steps, if there is one after `generation`."""
        view = None if self.acknowledges else self._view
        is_next = view is not None and view.generation > generation and not view.interrupts(generation)
        return view if is_next else None

    def close(self) -> None:
        """Read no more: this worker has finished its part of the run, though its process may go on."""
        self._is_closed = True
        self._channel.close()

    def end_if_overdue(self) -> None:
        """Kill this process where it may not go on without a newer answer: others may have begun again."""
        if seconds_since_boot() >= self._until and not self._is_closed:
            os.kill(os.getpid(), signal.SIGKILL)

    @property
    def newest(self) -> int:
        """The newest generation that this worker knows of; -1: none."""
        return -1 if self._view is None else self._view.generation

    def wait_for(self, generation: int, *, is_between_steps: bool, timeout_s: float) -> MembershipView:
        """Wait for the generation that a member of `generation` has to join; between two steps that is any newer one.

        Raises SyncError where the supervisor has exited, or nothing comes within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (view := self._view) is None or not (
                view.generation > generation if is_between_steps else view.interrupts(generation)
            ):
                if self._closed is not None:
                    raise SyncError(
                        "lost contact with a peer: the supervisor of this host, while the workers were regrouping"
                    )
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    raise SyncError(
                        f"generation {generation} is over, and the coordinator has announced no next one within "
                        f"{timeout_s:.0f} s"
                    )
            return view

    def wait_for_change(self, generation: int) -> Finish | None:
        """Wait until there is a generation after `generation`, or the run is to end, which is returned then."""
        with self._changed:
            while self._view is None or self._view.generation <= generation:
                if self.finish is not None:
                    return self.finish
                self._changed.wait()
            return None

    def _listen(self, fd: int) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            if self._signals is not None:
                selector.register(self._signals, selectors.EVENT_READ)
            while True:
                due_s = min(self._sent_at + self._heartbeat_s - time.monotonic(), self._until - seconds_since_boot())
                ready = {key.fd for key, _ in selector.select(max(0.0, due_s))}
                try:
                    if fd in ready:
                        for message in self._channel.take():
                            self._take(message)
                    self.end_if_overdue()
                    if time.monotonic() - self._sent_at >= self._heartbeat_s:
                        self.tell("alive")
                except (ChannelClosed, OSError) as end:
                    if self._signals is not None:
                        _restore_default_sigterm()  # it leaves anyway, without the wait for a save
                    with self._changed:
                        self._closed = end if isinstance(end, ChannelClosed) else ChannelClosed(str(end))
                        self._changed.notify_all()
                    return
                if self._signals is not None and self._signals.fileno() in ready:
                    asked = self._requests & set(self._signals.recv(4096))
                    if asked:
                        self._asked_to_leave(min(asked))

    def _take(self, message: Mapping[str, Any]) -> None:
        match message.get("op"):
            case "form":
                view = MembershipView.from_json(message)
                if self.acknowledges:
                    view = dataclasses.replace(view, after=AT_ONCE)
                with self._changed:
                    self._view = view
                    self._changed.notify_all()
                if self.acknowledges:
                    self._acknowledge(view)
            case "finish":
                with self._changed:
                    self._finish = Finish.from_json(message)
                    self._changed.notify_all()
            case "until":
                self._until = float(message["until"])
            case "end":
                self._ends = True
            case _:
                pass  # of a later version

    def _acknowledge(self, view: MembershipView) -> None:
        if self.worker in view.members:
            self._is_joining, self.has_acknowledged = False, True
            self.tell("formed", generation=view.generation, noticed=clock.now(), since_s=0.0, is_apart=True)
        elif self._is_joining:
            self.tell("ready", generation=view.generation)

    def _asked_to_leave(self, signum: int) -> None:
        if not self._ends:
            self.tell("leaving", signal=signal.Signals(signum).name)
            return
        _restore_default_sigterm()
        os.kill(os.getpid(), signal.SIGTERM)


def _restore_default_sigterm() -> None:
    """Have SIGTERM end this process, whatever call its training thread is in."""
    ctypes.CDLL(None).signal(signal.SIGTERM, None)  # SIG_DFL; Python's own call is for the main thread alone


def _restore_signals(signums: Iterable[int]) -> None:
    signal.set_wakeup_fd(-1)
    for signum in signums:
        signal.signal(signum, signal.SIG_DFL)


def _ignore_signal(signum: int, frame: object) -> None:
    """Do nothing: the wakeup descriptor has passed the signal to the thread."""
