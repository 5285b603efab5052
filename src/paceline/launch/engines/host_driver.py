"""Starts `paceline host` on each host by some transport, and stays with them to the run's end.

The first host says where it listens, and the driver tells the others. A host that is lost while others are at work is
started again, and joins them: an elastic run takes it in, and any other may restart with it. The driver's own end is
that of the run: the hosts save and leave.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from paceline.elastic.membership_messages import PREEMPTED
from paceline.errors import LaunchError
from paceline.launch.engines.engine import Say

__all__ = ["HELLO", "HostDriver", "Transport"]

HELLO = "paceline-host"  # begins a host's answer (paceline.runs.host_process)
TURN_S = 0.03
START_S = 120.0  # until a host has answered: Python's start, on a busy machine with a slow disk
AGAIN_S, SELDOM_S = 1.0, 30.0  # until a lost host is tried again, at first and later
END_S = 15.0  # beyond the time that the workers have to save: until the hosts that are left are ended
LAST_WORDS = 5  # lines of a host that failed


class Transport(Protocol):
    """One host, as a driver reaches it."""

    @property
    def name(self) -> str: ...

    def begin(self) -> None:
        """Start `paceline host` there, also again."""
        ...

    def send(self, line: str) -> None:
        """Write to its standard input; does nothing where it has ended."""
        ...

    def read(self) -> list[str]:
        """Return the whole lines that are new; never waits."""
        ...

    def exit_code(self) -> int | None:
        """How it ended, once all that it printed was read; None while it runs. LOST where the host is gone."""
        ...

    def end(self) -> None:
        """End it at once."""
        ...


LOST = 255  # what ssh says, too
GIVEN_UP = 76  # the others went on without it: it may join them
UNFIT = 2  # the job cannot work there


@dataclasses.dataclass(kw_only=True)
class _Host:
    transport: Transport
    slots: int | None  # None: an even share
    began: float = 0.0
    is_up: bool = False  # it has answered
    is_told: bool = False  # where the hosts meet
    code: int | None = None  # how it ended the last time
    again_at: float | None = None
    again_s: float = AGAIN_S
    said: list[str] = dataclasses.field(default_factory=list[str])  # its last lines, for the case that it fails
    real_name: str = ""  # as it knows itself


class HostDriver:
    """Runs one job."""

    def __init__(
        self,
        transports: Sequence[tuple[Transport, int | None]],
        *,
        runs: Callable[[int | None], Mapping[str, Any]],
        about: Mapping[str, Any],
        say: Say,
        log: Path | None,
        grace_s: float,
        shows: bool = True,
        on_answer: Callable[[str], None] | None = None,
    ) -> None:
        """`transports`: the hosts in order, with the workers of each; `runs(slots)`: what one is told to run, the
        `words` of a `paceline run` without `--head`, or a function; `about`: the rest, with the token. `log` gets a
        copy of what they print, and so does our own output, unless `shows` is False. `on_answer` gets the lines that
        begin with `about["mark"]`, without it.
        """
        self._hosts = [_Host(transport=transport, slots=slots) for transport, slots in transports]
        self._runs, self._about, self._say, self._grace_s = runs, dict(about), say, grace_s
        self._shows, self._on_answer, self._mark = shows, on_answer, f"{about.get('mark', '')} "
        self._log = None if log is None else log.open("a", encoding="utf-8")
        self._head: str | None = None
        self._has_begun = False  # all hosts have answered
        self._unfit_at: float | None = None  # when a host ended at its start, by itself
        self._signals: list[int] = []
        self._signalled_at: float | None = None
        self.on_names: Callable[[dict[str, str]], None] = lambda _: None  # called with real name -> name of the hosts

    def note_signal(self, signum: int) -> None:
        """Have the run end as after this signal: the first has it save and leave."""
        self._signals.append(signum)

    def run(self) -> int:
        """Start the hosts and return the run's exit status. Raises LaunchError, which names the hosts that failed,
        where it could not begin. On every path the hosts are ended.
        """
        try:
            for number, host in enumerate(self._hosts):
                self._begin(host, is_first=number == 0)
            while not self._is_over():
                self._turn(time.monotonic())
                time.sleep(TURN_S)  # transports have no common way to wake us
            return self._exit_code()
        finally:
            for host in self._hosts:
                host.transport.end()
            if self._log is not None:
                self._log.close()

    def _begin(self, host: _Host, *, is_first: bool) -> None:
        host.began, host.is_up, host.is_told, host.code, host.again_at = time.monotonic(), False, is_first, None, None
        host.said.clear()
        host.transport.begin()
        host.transport.send(json.dumps({**self._about, **self._runs(host.slots), "is_first": is_first}))

    def _turn(self, now: float) -> None:
        for host in self._hosts:
            if host.again_at is not None and now >= host.again_at:
                self._begin(host, is_first=False)
            if host.code is not None:
                continue
            for line in host.transport.read():
                self._receive(host, line)
            if host.is_up and not host.is_told and self._head is not None:
                host.transport.send(json.dumps({"head": self._head}))
                host.is_told = True
            if not host.is_up and now - host.began > START_S:
                host.said.append(f"it did not answer within {START_S:.0f} s")
                host.transport.end()
            code = host.transport.exit_code()
            if code is not None:
                self._ended(host, code, now)
        self._pass_signals(now)

    def _receive(self, host: _Host, line: str) -> None:
        if not host.is_up and line.startswith(HELLO + " "):
            about = json.loads(line[len(HELLO) :])
            host.is_up, host.real_name = True, str(about["host"])
            self._has_begun = self._has_begun or all(one.is_up for one in self._hosts)
            host.again_s = AGAIN_S
            if "head" in about:
                self._head = str(about["head"])
            self.on_names({one.real_name: one.transport.name for one in self._hosts if one.real_name})
            return
        if self._on_answer is not None and line.startswith(self._mark):
            self._on_answer(line.removeprefix(self._mark))
            return
        host.said = [*host.said[1 - LAST_WORDS :], line]
        if host.is_up:
            self._show(f"{host.transport.name}: {line}" if line.startswith("paceline: ") else line)

    def _show(self, line: str) -> None:
        for stream in (sys.stdout if self._shows else None, self._log):
            if stream is not None:
                stream.write(line + "\n")
                stream.flush()

    def _ended(self, host: _Host, code: int, now: float) -> None:
        host.code = code
        if not self._has_begun:
            raise LaunchError(self._failures())
        if code == LOST or not host.is_up:
            if host.again_s == AGAIN_S:
                self._say(f"{_called(host)} is lost: {_last(host.said) or 'its connection has ended'}")
        elif code == UNFIT and now - host.began < START_S:
            self._unfit_at = now
        if (code in (LOST, GIVEN_UP) or not host.is_up) and self._is_at_work() and self._signalled_at is None:
            host.again_at, host.again_s = now + host.again_s, min(SELDOM_S, 2 * host.again_s)

    def _failures(self) -> str:
        """Wait a moment for others that fail, too, and name them all."""
        until = time.monotonic() + 1.0
        while time.monotonic() < until and any(host.code is None for host in self._hosts):
            for host in self._hosts:
                if host.code is None:
                    for line in host.transport.read():
                        self._receive(host, line)
                    host.code = host.transport.exit_code()
            time.sleep(TURN_S)
        failed = [host for host in self._hosts if host.code not in (None, 0)]
        rows = [f"  {host.transport.name}: {_last(host.said) or f'exit status {host.code}'}" for host in failed]
        return "\n".join([f"The job cannot begin: {len(failed)} of its {len(self._hosts)} hosts failed:", *rows])

    def _pass_signals(self, now: float) -> None:
        while self._signals:
            signum = self._signals.pop(0)
            self._signalled_at = self._signalled_at or now
            at_work = [host for host in self._hosts if host.code is None and host.is_told]
            for host in at_work[:1] if signum == signal.SIGINT else at_work:  # the first one tells all of Ctrl-C
                host.transport.send(json.dumps({"signal": signum}))
        if self._unfit_at is not None and now > self._unfit_at + END_S:
            self._unfit_at = None
            self._signals.append(signal.SIGTERM)  # the others wait for a host that cannot come
        if self._signalled_at is not None and now > self._signalled_at + self._grace_s + END_S:
            for host in self._hosts:
                host.transport.end()

    def _is_at_work(self) -> bool:
        return any(host.code is None and host.is_told for host in self._hosts)

    def _is_over(self) -> bool:
        return not self._is_at_work() and all(host.code is not None for host in self._hosts)

    def _exit_code(self) -> int:
        """What the hosts say that ended by themselves; 76 where all were lost. One that left alone says 75 of itself,
        and another one says how the run ended."""
        said = [host.code for host in self._hosts if host.code not in (None, LOST, GIVEN_UP) and host.is_up]
        return next((code for code in said if code != PREEMPTED), PREEMPTED if said else GIVEN_UP)


def _called(host: _Host) -> str:
    """A host in a sentence: some transports number them."""
    return host.transport.name if host.transport.name.startswith("host ") else f"host {host.transport.name}"


def _last(lines: Sequence[str]) -> str:
    return next((line.strip().removeprefix("paceline: ") for line in reversed(lines) if line.strip()), "")
