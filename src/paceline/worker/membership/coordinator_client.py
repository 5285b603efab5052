"""What the head tells this worker about membership, heard by a thread of its own.

The thread also says that this process is alive, outside of the training thread, and notices SIGTERM: a request to
leave, or, after the head has said "end", the end itself. Python's own signal handlers would wait until the training
thread comes out of whatever it is in. Where the supervisor has gone, this worker is an *orphan*: what it can still do
with the others is to save and leave, and SIGTERM ends it at once.

Where the head is on another host, a worker may go on for a while after each word that the head has answered, and then
ends itself, whatever its own supervisor does (`paceline.elastic.lease`).

Where members take batches by themselves, the thread also *acknowledges* each generation for the training thread, at
once: nothing of what that is doing depends on who else is there, and it may be in the middle of a long batch.
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

from paceline import environment
from paceline.comm.group import Disrupted
from paceline.comm.messages.json_channel import Channel, ChannelClosed
from paceline.elastic.heartbeats import heartbeat_interval_s
from paceline.elastic.lease import clock
from paceline.elastic.membership_messages import AT_ONCE, PREEMPTED, Finish, MembershipView
from paceline.errors import SyncError

__all__ = ["CoordinatorClient"]

SUPERVISOR_GONE = Finish(exit_code=PREEMPTED, reason="the supervisor of these workers has gone")


class CoordinatorClient:
    """The newest word of the head. The training thread asks; it is interrupted only by what `check` raises."""

    def __init__(self, channel: Channel, worker: int, *, silence_s: float) -> None:
        """After `silence_s` without a word of it the head takes this worker for lost."""
        self.worker = worker
        self._alive_s = heartbeat_interval_s(silence_s)
        self._finish: Finish | None = None
        self._channel = channel
        self._form: MembershipView | None = None
        self._changed = threading.Condition()
        self.step: Callable[[], int] = lambda: 0  # committed; told with every word
        self._ends = False  # the head has said so: SIGTERM is no request any more
        self._signals: socket.socket | None = None
        self._requests = {int(signal.SIGTERM)}  # signals that ask to leave
        self._closed: ChannelClosed | None = None
        self._told_at = 0.0
        self._until = math.inf  # by `clock`, this worker may go on
        self._is_closed = False  # it has done with the run
        self.acknowledges = False  # generations, for the training thread; each interrupts all before it
        self.has_acknowledged = False  # one since this was set to False
        self._is_apart = False  # the training thread needs no other member
        self._is_coming = False  # this worker came later, and is in no generation yet

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
            # Whom the user forks is ended by them as usual.
            os.register_at_fork(after_in_child=lambda: _forget_signals(self._requests))
        threading.Thread(target=self._listen, args=(fd,), name="paceline-orders", daemon=True).start()

    @property
    def finish(self) -> Finish | None:
        """How the run is to end: as the head has said; where the supervisor has gone, saved and to be run again."""
        return self._finish or (SUPERVISOR_GONE if self._closed is not None else None)

    @property
    def is_orphaned(self) -> bool:
        """Whether the supervisor has gone."""
        return self._closed is not None

    def tell(self, op: str, **fields: Any) -> None:
        """Say something to the head; nothing happens where it has gone, which is noticed elsewhere."""
        self._told_at = time.monotonic()
        with contextlib.suppress(ChannelClosed):
            self._channel.send({"op": op, "step": self.step(), **fields})

    def report_snapshot(self) -> None:
        """Say to the supervisor of this host, and nobody else, that one more snapshot counts: for the head that is no
        sign of life."""
        with contextlib.suppress(ChannelClosed):
            self._channel.send({"op": "kept"})

    def part(self) -> None:
        """The training thread does without the other members: no generation concerns it until it joins them again."""
        self._is_apart = True

    def join(self) -> None:
        """The training thread is going to do something together with the others."""
        self._is_apart = False

    def come(self) -> Finish | None:
        """Say that this worker, which came later, needs nothing of the others, and wait until it is one of them.

        Returns how the run ends where it does instead."""
        self._is_coming = True
        self.tell("ready", generation=self.newest)
        with self._changed:
            while self._form is None or self.worker not in self._form.members:
                if self.finish is not None:
                    return self.finish
                self._changed.wait()
        return None

    @property
    def is_dismissed(self) -> bool:
        """Whether the others go on without this worker."""
        form = self._form
        return form is not None and self.worker not in form.members and not self._is_coming

    @property
    def members(self) -> tuple[int, ...]:
        """Those of the newest generation; none where there was only the first."""
        return () if self._form is None else self._form.members

    def await_enough(self) -> None:
        """Return when there are enough members to take steps, or this worker has something else to do."""
        with self._changed:
            while self._form is not None and self._form.holds and self.finish is None and not self.is_dismissed:
                self._changed.wait()

    def check(self, generation: int) -> None:
        """Raise Disrupted where the generation is over, at once."""
        form = self._form
        if form is not None and not self._is_apart and form.interrupts(generation):
            raise Disrupted(form.reason)

    def is_over(self, generation: int) -> bool:
        """Whether a newer generation has interrupted this one."""
        form = self._form
        return form is not None and form.interrupts(generation)

    def check_newest(self, generation: int) -> None:
        """Raise Disrupted where there is a newer generation of any kind: for who is about to join this one."""
        form = self._form
        if form is not None and form.generation > generation:
            raise Disrupted(form.reason)

    def planned(self, generation: int) -> MembershipView | None:
        """The generation that is to begin between two steps, if there is one after `generation`."""
        form = None if self.acknowledges else self._form
        is_next = form is not None and form.generation > generation and not form.interrupts(generation)
        return form if is_next else None

    def close(self) -> None:
        """Hear no more: this worker has done with the run, though its process may go on."""
        self._is_closed = True
        self._channel.close()

    def end_if_overdue(self) -> None:
        """Kill this process where it may not go on without a newer word of the head: others may have begun again."""
        if clock() >= self._until and not self._is_closed:
            os.kill(os.getpid(), signal.SIGKILL)

    @property
    def newest(self) -> int:
        """The newest generation that this worker has heard of; -1: none."""
        return -1 if self._form is None else self._form.generation

    def wait_for(self, generation: int, *, is_between_steps: bool, timeout_s: float) -> MembershipView:
        """Wait for the generation that who stands in `generation` has to join; between two steps that is any newer one.

        Raises SyncError where the head has gone, or says nothing.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (form := self._form) is None or not (
                form.generation > generation if is_between_steps else form.interrupts(generation)
            ):
                if self._closed is not None:
                    raise SyncError("the supervisor of this host has gone while the workers were regrouping")
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    raise SyncError(
                        f"generation {generation} is over, and nobody has said within {timeout_s:.0f} s who goes on"
                    )
            return form

    def wait_for_change(self, generation: int) -> Finish | None:
        """Wait until there is a generation after `generation`, or the run is to end, which is returned then."""
        with self._changed:
            while self._form is None or self._form.generation <= generation:
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
                due_s = min(self._told_at + self._alive_s - time.monotonic(), self._until - clock())
                ready = {key.fd for key, _ in selector.select(max(0.0, due_s))}
                try:
                    if fd in ready:
                        for message in self._channel.take():
                            self._take(message)
                    self.end_if_overdue()
                    if time.monotonic() - self._told_at >= self._alive_s:
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
                form = MembershipView.from_json(message)
                if self.acknowledges:
                    form = dataclasses.replace(form, after=AT_ONCE)
                with self._changed:
                    self._form = form
                    self._changed.notify_all()
                if self.acknowledges:
                    self._acknowledge(form)
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

    def _acknowledge(self, form: MembershipView) -> None:
        if self.worker in form.members:
            self._is_coming, self.has_acknowledged = False, True
            self.tell("formed", generation=form.generation, noticed=time.time(), is_apart=True)
        elif self._is_coming:
            self.tell("ready", generation=form.generation)

    def _asked_to_leave(self, signum: int) -> None:
        if not self._ends:
            self.tell("leaving", signal=signal.Signals(signum).name)
            return
        _restore_default_sigterm()
        os.kill(os.getpid(), signal.SIGTERM)


def _restore_default_sigterm() -> None:
    """Have SIGTERM end this process, whatever its training thread is in."""
    ctypes.CDLL(None).signal(signal.SIGTERM, None)  # SIG_DFL; Python's own call is for the main thread alone


def _forget_signals(signums: Iterable[int]) -> None:
    signal.set_wakeup_fd(-1)
    for signum in signums:
        signal.signal(signum, signal.SIG_DFL)


def _ignore_signal(signum: int, frame: object) -> None:
    """The wakeup descriptor has told the thread."""
