"""How the hosts of a job find each other: the user starts the same command once on each host, in any order.

`--head HOST:PORT` names the rendezvous address; with `--head auto` the first host writes it into the run's directory
(`paceline.launch.coordinator.meeting_point`). The supervisor that can listen there becomes the coordinator
(`paceline.launch.coordinator.host_admission`). Every other supervisor connects to it
(`paceline.launch.coordinator.join_request`), proves the job's token and says what it was started for. Once all hosts
are there, started for the same job, the coordinator assigns the worker ranks: first its own, then the others' in order
of arrival.

For a restart the remaining hosts meet in the same way, each with its previous index. The coordinator has kept
listening, so no other process can take its place.

A host that comes while an elastic job runs joins with the same command (`Coordinator.join`). So a job that starts on
one host also has a rendezvous address if `--head` names one.
"""

from __future__ import annotations

import dataclasses
import errno
import socket
import time
from collections.abc import Callable
from pathlib import Path

from paceline import environment, run_lock
from paceline.errors import LaunchError
from paceline.launch.coordinator.coordinator import Coordinator
from paceline.launch.coordinator.head_register import HeadRecord, HeadRegister
from paceline.launch.coordinator.host_admission import HostAdmission
from paceline.launch.coordinator.host_agent import HostAgent
from paceline.launch.coordinator.join_request import JobTerms, JoinRequest
from paceline.launch.coordinator.meeting_point import MeetingPoint
from paceline.launch.coordinator.new_head import NewHead
from paceline.launch.coordinator.takeover import Takeover
from paceline.launch.io.event_loop import EventLoop
from paceline.launch.io.signals import Interrupted, StopSignals
from paceline.launch.job.restart_plan import RestartPlan
from paceline.launch.snapshots.snapshot_replication import SnapshotReplication
from paceline.launch.snapshots.snapshot_store import SnapshotStore
from paceline.plan.command_plan import CommandPlan
from paceline.plan.job import AUTO, Job, head_address

__all__ = ["MAX_RENDEZVOUS_S", "RetainedHostState", "join_hosts"]

MAX_RENDEZVOUS_S = 300.0  # even if job.timeout_s is longer
RESTART_RENDEZVOUS_S = 30.0  # for a restart: the hosts were there a moment ago
RETRY_S = 0.5
LOOK_S = 1.0  # between two looks at the register while hosts are waited for
HANDOVER_S = 20.0  # for a host to take over from a coordinator that has left; a process starts there
TELL_S = 5.0  # between two messages that say what is being waited for
TURN_S = 0.1
LOOPBACK = "127.0.0.1"
NOWHERE = ("", 0)  # until the hosts have met


def join_hosts(
    job: Job,
    *,
    plan: CommandPlan | None,
    attempt: int,
    run_dir: str,
    loop: EventLoop,
    say: Callable[[str], None],
    signals: StopSignals,
    asked: Job | None = None,
    restart_plan: RestartPlan | None = None,
    retained: RetainedHostState | None = None,
    replication: SnapshotReplication | None = None,
    takeover: Takeover | None = None,
) -> Coordinator | HostAgent:
    """Wait until all hosts are there, and return this host's role: coordinator or host agent.

    `takeover`: the coordinator was lost, and this process takes over with the hosts that return to it, at
    `retained.listener`.

    `asked` is the job as the user started it; a restart (`restart_plan`) may have fewer workers or hosts, and
    `retained` says which host this one was. `replication` is announced to the other hosts.

    Raise LaunchError if hosts do not come in time or do not fit together, Interrupted if a signal comes first.
    """
    host = socket.gethostname()
    if job.workers is None:
        raise LaunchError("The number of workers is not known: it has to be decided before a job is launched.")
    if job.hosts == 1 and job.head is not None and job.launcher == "inline":
        say(f"head={job.head!r} is not used: launcher='inline' runs on this host alone")
    if takeover is None and job.hosts == 1 and (job.head is None or job.launcher == "inline"):
        return Coordinator(
            host=host,
            address=LOOPBACK,
            job=job,
            remote_hosts=[],
            admission=None,
            attempt=attempt,
            run_dir=run_dir,
            say=say,
            restart_plan=restart_plan,
        )
    if job.head is None:
        raise LaunchError(
            f"A job on {job.hosts} hosts needs a rendezvous address: use head='HOST:PORT' (--head), the "
            "same on every host."
        )
    token = environment.token(job)
    if retained is not None and retained.head is not None:
        job = dataclasses.replace(job, head=retained.head)
    meeting_point = None
    if job.head == AUTO and takeover is not None:
        job = dataclasses.replace(job, head=takeover.record.address)
    elif job.head == AUTO:
        meeting_point = MeetingPoint(Path(run_dir))
        if retained is not None:
            retained.meeting_point = meeting_point
    terms = JobTerms(
        job=job,
        asked=asked or job,
        plan=_written(plan or CommandPlan()),
        attempt=attempt,
        run_dir=run_dir,
        host=host,
        token=token,
        at=NOWHERE if meeting_point is not None else head_address(str(job.head)),
    )
    timeout = _RendezvousTimeout(
        terms, loop, say, signals, limit_s=RESTART_RENDEZVOUS_S if restart_plan is not None else MAX_RENDEZVOUS_S
    )
    rendezvous = _Rendezvous(
        terms,
        loop,
        say,
        timeout,
        replication=replication,
        restart_plan=restart_plan,
        takeover=takeover,
        meeting_point=meeting_point,
    )
    if takeover is None and (restart_plan is None or retained is None):
        return rendezvous.hold(None if retained is None else retained.give_listener())
    if retained is None:
        raise LaunchError("a coordinator that takes over needs the socket at which its hosts return")
    listener = retained.give_listener()
    if listener is None:
        return rendezvous.join(retained.host_index)
    return rendezvous.gather(listener)


def _written(plan: CommandPlan) -> str:
    """What command and job file say of a plan, as text. Defaults that were written count, too: what a program leaves to
    its command it takes over from these alone."""
    defaults = sorted(set(plan.given_defaults))
    return f"{plan}, with {', '.join(defaults)}" if defaults else str(plan)


class _RendezvousTimeout:
    """Turns the event loop, reports what is being waited for, and ends the wait."""

    def __init__(
        self, terms: JobTerms, loop: EventLoop, say: Callable[[str], None], signals: StopSignals, *, limit_s: float
    ) -> None:
        self._terms, self._loop, self._say, self._signals = terms, loop, say, signals
        self._began = time.monotonic()
        self._limit_s = min(terms.job.timeout_s, limit_s)
        self._tell_at = self._began + TELL_S

    def turn(self, progress: str) -> None:
        """Turn the loop once; raise LaunchError after the time limit, Interrupted after a signal."""
        self._loop.turn(TURN_S)
        self._signals.check()
        now = time.monotonic()
        passed = now - self._began
        if passed > self._limit_s:
            raise LaunchError(
                f"Gave up after {passed:.0f} s {progress}. Start the same command on all {self._terms.job.hosts} "
                "hosts, with a head that each of them reaches (its name, the port, firewalls).",
                is_accident=True,
            )
        if now >= self._tell_at:
            self._tell_at = now + TELL_S
            self._say(f"{progress} ({passed:.0f} s)")


class _Rendezvous:
    """This host's part in the rendezvous."""

    def __init__(
        self,
        terms: JobTerms,
        loop: EventLoop,
        say: Callable[[str], None],
        timeout: _RendezvousTimeout,
        *,
        replication: SnapshotReplication | None,
        restart_plan: RestartPlan | None,
        takeover: Takeover | None = None,
        meeting_point: MeetingPoint | None = None,
    ) -> None:
        self._terms, self._loop, self._say, self._patience = terms, loop, say, timeout
        self._replication, self._restart_plan, self._takeover = replication, restart_plan, takeover
        self._meeting_point = meeting_point
        self._register = HeadRegister(Path(terms.run_dir))
        self._num_join_attempts = 0
        self._was_refused = False
        # Run and epoch whose coordinator has left, and since when that is known.
        self._left: tuple[tuple[str, int], float] | None = None

    def hold(self, listener: socket.socket | None = None) -> Coordinator | HostAgent:
        """Try to become the coordinator, else to join it, until one succeeds or the time is over. `listener`: this host
        is to be the coordinator, at this socket, unless another one leads the run already."""
        while True:
            led = self._register.read()
            if led is not None and led.epoch > 0:  # perhaps it is still led by the host that took over
                member = self._try_to_join(None, at=led.address)
                if member is not None:
                    return member
                if self._was_refused:
                    continue
            if listener is None and led is not None and self._is_under_way(led):
                member = self._try_to_join(None)
                if member is not None:
                    return member
                continue
            listener = listener or self._listen()
            if listener is not None:
                try:
                    return self.gather(listener, led=led)
                except _LedElsewhere:
                    listener = None
                    continue
            member = self._try_to_join(None)
            if member is not None:
                return member

    def _is_under_way(self, led: HeadRecord) -> bool:
        """Whether the run of the register goes on, although this host could listen at its address: a name that engines
        give to each of its first hosts in turn leads to this one as soon as the one before was asked to leave. That one
        still leaves, or has left, and another host is about to take over.
        """
        if led.state.get("left") is not None:
            if self._left is None or self._left[0] != (led.run, led.epoch):
                self._left = (led.run, led.epoch), time.monotonic()
            return time.monotonic() - self._left[1] < HANDOVER_S
        return led.address == self._terms.point and run_lock.is_held(Path(self._terms.run_dir))

    def _listen(self) -> socket.socket | None:
        if self._meeting_point is None:
            return _listen(self._terms)
        listener = self._meeting_point.listen()
        if listener is not None:
            self._meet_at(self._meeting_point.address())
        return listener

    def _meet_at(self, address: str | None) -> None:
        if address is not None:
            job = dataclasses.replace(self._terms.job, head=address)
            self._terms = dataclasses.replace(self._terms, job=job, at=head_address(address))

    def join(self, host_index: int) -> HostAgent:
        """Join the coordinator again after a loss."""
        while (member := self._try_to_join(host_index)) is None:
            pass
        return member

    def gather(self, listener: socket.socket, *, led: HeadRecord | None = None) -> Coordinator:
        """Become the coordinator: admit the other hosts. With the register as it was, `led`: raise _LedElsewhere once
        another host has taken over there, from a coordinator that this host was before it was started again."""
        admission = HostAdmission(
            listener,
            self._terms,
            self._loop,
            self._say,
            replication=self._replication,
            restart_plan=self._restart_plan,
            takeover=self._takeover,
        )
        try:
            look_at = time.monotonic() + LOOK_S
            while not admission.complete:
                self._patience.turn(admission.progress)
                now = time.monotonic()
                admission.tick(now)
                if now >= look_at and self._restart_plan is None and self._takeover is None:
                    look_at = now + LOOK_S
                    self._check_not_led(led)
            return admission.welcome()
        except _LedElsewhere as other:
            admission.give_up(str(other), may_retry=True)
            raise
        except BaseException as error:  # also Interrupted and KeyboardInterrupt: the sockets must be closed
            signum = error.signum if isinstance(error, Interrupted) else None
            admission.give_up(str(error) or type(error).__name__, signum=signum)
            raise

    def _check_not_led(self, before: HeadRecord | None) -> None:
        led = self._register.read()
        if led is not None and led.epoch > 0 and (before is None or (led.run, led.epoch) != (before.run, before.epoch)):
            raise _LedElsewhere(f"the run goes on, led by host {led.host} ({led.address})")

    def _try_to_join(self, host_index: int | None, *, at: str | None = None) -> HostAgent | None:
        """Try once to join the coordinator; return None, after a pause, if that failed and may be retried. `at`: at
        this address, where there may be none any more; `_was_refused` then says whether there is one.
        """
        if at is None and host_index is None and self._meeting_point is not None:
            address = self._meeting_point.address()
            if address is None:
                self._pause(f"waiting for the first host to come to {self._terms.run_dir}")
                return None
            self._meet_at(address)
        self._was_refused = False
        self._num_join_attempts += 1
        point = at or self._terms.point
        join_request = JoinRequest(
            self._terms if at is None else dataclasses.replace(self._terms, at=head_address(at)),
            self._loop,
            self._say,
            number=self._num_join_attempts,
            replication=self._replication,
            host_index=host_index,
        )
        try:
            while join_request.member is None and not join_request.failed:
                self._patience.turn(join_request.progress)
                join_request.tick(time.monotonic())
            if join_request.member is not None:
                if join_request.member.is_late:
                    self._say(f"joined the run {join_request.member.run_dir} at {point}; waiting for work")
                return join_request.member
        except Interrupted as early:
            join_request.withdraw(early.signum)
            raise
        finally:
            join_request.close()
        self._was_refused = join_request.was_refused
        if at is not None and not join_request.was_refused:
            return None
        if join_request.signum is not None:
            self._say(join_request.failed)
            raise Interrupted(join_request.signum)
        if join_request.final:
            raise LaunchError(f"This host cannot join the job at {point}: {join_request.failed}")
        self._pause(f"connecting to the coordinator at {point}; last try: {join_request.failed}")
        return None

    def _pause(self, progress: str) -> None:
        again_at = time.monotonic() + RETRY_S
        while time.monotonic() < again_at:
            self._patience.turn(progress)


class _LedElsewhere(Exception):
    """Another host leads the run already."""


def _listen(terms: JobTerms) -> socket.socket | None:
    """Return a listening socket if the rendezvous address is this host's and free, else None."""
    try:
        found = socket.getaddrinfo(*terms.at, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return None  # perhaps not known yet: the join request reports it
    for family, kind, protocol, _, address in found:
        if str(address[0]) in ("0.0.0.0", "::"):
            raise LaunchError(f"head={terms.point!r} is every host's address: name one host that all others reach.")
        sock = socket.socket(family, kind, protocol)
        try:
            # So that connections of an earlier job do not block the port.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen()
        except OSError as error:
            sock.close()
            if error.errno in (errno.EACCES, errno.EPERM):
                raise LaunchError(
                    f"Port {terms.at[1]} of head={terms.point!r} needs privileges: use one from 1024 up."
                ) from error
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
                raise LaunchError(f"Cannot listen at head={terms.point!r}: {error.strerror}.") from error
        else:
            return sock
    return None


@dataclasses.dataclass(kw_only=True)
class RetainedHostState:
    """What a supervisor keeps from one start of its workers to the next, besides the warm parent; its creator closes
    it.
    """

    signals: StopSignals
    memory_checkpoints: SnapshotStore = dataclasses.field(default_factory=SnapshotStore)  # the workers' states
    listener: socket.socket | None = None  # the coordinator's: returning hosts wait there
    host_index: int = 0  # this host's
    head: str | None = None  # HOST:PORT of the coordinator, if another one has taken over from that of the job's `head`
    record: HeadRecord | None = None  # what this coordinator has written to the run's register
    meeting_point: MeetingPoint | None = None  # with `head="auto"`
    new_head: NewHead = dataclasses.field(default_factory=NewHead)  # the process that takes over here, if it must

    def close(self) -> None:
        """Wait for the process that has taken over, and release the snapshots' memory and the listening socket."""
        self.new_head.close()
        self.memory_checkpoints.close()
        if self.meeting_point is not None:
            self.meeting_point.close()
        listener = self.give_listener()
        if listener is not None:
            listener.close()

    def give_listener(self) -> socket.socket | None:
        """Return the listening socket, which is the caller's from then on."""
        listener, self.listener = self.listener, None
        return listener
