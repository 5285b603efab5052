"""Carries out membership decisions in elastic runs: starts, ends and informs workers, and records the cost of each
loss.

It is part of the coordinator. Workers' notices and exits go to the state machine `paceline.elastic.membership`; the
decisions that come back are carried out here.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from paceline import clock
from paceline.elastic.membership import Decision, EndWorker, GiveUp, Limits, Membership, StartReplica
from paceline.elastic.membership_messages import Finish, MembershipView, WorkerReport
from paceline.events import Event, Regrouped, WorkerJoined, WorkerLeft, WorkerLost
from paceline.host_memory import machine_load
from paceline.launch.job.outcome import WorkerExit

__all__ = ["ElasticController", "WorkerActions"]

UNTOLD_STARTS = 1000  # more than a coordinator starts between two words to the register; incarnations are no counts


class WorkerActions(Protocol):
    """What the controller can do to workers on any host."""

    def send(self, worker: int, message: Mapping[str, Any]) -> None: ...

    def start(self, replica: Sequence[int], *, workers: int, incarnation: int) -> None:
        """Start the workers of a replica; the run then has `workers` workers. `incarnation` is a number that no replica
        had before.
        """
        ...

    def kill(self, worker: int) -> None: ...

    def host_of(self, worker: int) -> str:
        """The name of a worker's host."""
        ...

    def publish(self) -> bool:
        """Tell the register what another coordinator needs to take over; False where that cannot be done now, and the
        newest generation must not be announced."""
        ...

    def new_generation(self, members: Collection[int]) -> bool:
        """Note that a new generation of these members is about to be announced; return whether it spans several
        hosts.
        """
        ...

    def generation_formed(self) -> None:
        """All members have joined the newest generation."""
        ...

    def give_up(self, reason: str, *, causes: Sequence[str], lost: Sequence[int]) -> None:
        """No replica with the run's state is left. `causes` led to it; `lost` are the workers that were lost by
        themselves.
        """
        ...


@dataclasses.dataclass(kw_only=True)
class LossIncident:
    """A loss of workers, until the other replicas have formed a new generation."""

    causes: list[str]
    lost: list[int]  # workers lost by themselves, without those ended with them
    began: float  # clock.now() when the first of them was lost, as far as can be known
    generation: int = 0
    noticed: float = 0.0  # when the last of the remaining workers noticed
    formed: float = 0.0
    at_step: int = 0  # committed before
    goes_on_at: int | None = None  # committed steps of the workers that go on
    num_undone: int = 0  # steps that their programs have undone by themselves


class ElasticController:
    """Carries out the decisions of `Membership`. The run starts with `workers`; `emit` writes events to its record."""

    def __init__(
        self, limits: Limits, *, workers: int, worker_actions: WorkerActions, emit: Callable[[Event], None]
    ) -> None:
        self.workers_each = limits.workers_each
        self._worker_actions, self._emit = worker_actions, emit
        self._membership = Membership(limits, replicas=workers // limits.workers_each, now=time.monotonic())
        self._incident: LossIncident | None = None
        self._step = 0  # the newest committed step
        self._lost_at: dict[int, float] = {}  # worker -> when its predecessor was lost
        self._num_started = 0  # replicas, since the run began
        self._coming: set[int] = set()  # started workers that have taken no step yet
        self._left_at: dict[int, int] = {}  # worker -> the last step that it took part in, as it said when it left
        self._spread = (-1, False)  # the newest generation, and whether it spans several hosts
        self._members: set[int] = set(self._membership.view.members)  # of the last announced generation
        self._unannounced: MembershipView | None = None  # the register does not have it yet

    # A change of the coordinator.

    def to_json(self) -> dict[str, Any]:
        """Return plain data from which another coordinator can take over."""
        limits = self._membership.limits
        plan: dict[str, Any] = {"least": limits.least, "most": limits.most, "workers_each": limits.workers_each}
        plan["joins_in_calls"] = limits.program_s is not None
        return {**plan, "num_started": self._num_started, "membership": self._membership.to_json()}

    def take_over(self, data: Mapping[str, Any]) -> None:
        """Go on where the lost coordinator was when it told `data`; call `resume` next. Raise LookupError, TypeError or
        ValueError if that is something else."""
        self._membership = Membership.taken_over(self._membership.limits, data["membership"], time.monotonic())
        self._num_started = int(data["num_started"]) + UNTOLD_STARTS
        self._members = set(self._membership.view.members)
        self._spread = self._membership.generation, False

    def resume(self, reports: Mapping[int, WorkerReport], *, host: str, reason: str, room: int) -> None:
        """The hosts that are left have told of their workers; all others are lost with the coordinator's `host`."""
        self._step = max((report.step for report in reports.values()), default=0)
        self._coming = {worker for worker, report in reports.items() if report.is_new}
        for number, worker in enumerate(sorted(self._members - reports.keys())):
            self._note_lost(worker, reason, host, since_s=0.0, by_itself=number == 0)
        self._do(self._membership.resume(reports, time.monotonic(), reason=reason, room=room))
        if self._membership.generation == self._spread[0] and self._incident is not None:
            self._incident = None  # nobody has to regroup

    @property
    def finish(self) -> Finish | None:
        """What all workers were told, once the run is to end."""
        return self._membership.ending

    def is_member(self, worker: int) -> bool:
        return self._membership.is_member(worker)

    def is_over(self, worker: int) -> bool:
        """Return whether a worker has finished its part in the run, though its process may still be alive."""
        return self._membership.is_over(worker)

    # What workers and the coordinator report.

    def on_notice(self, worker: int, notice: Mapping[str, Any]) -> None:
        """Handle a worker's notice; raise KeyError or TypeError if it is invalid."""
        now, membership = time.monotonic(), self._membership
        self._step = max(self._step, int(notice.get("step", 0)))
        match notice["op"]:
            case "ready":
                self._do(membership.ready(worker, now, generation=int(notice["generation"])))
            case "stuck":
                self._do(membership.stuck(worker, int(notice["generation"]), now, peer=notice.get("peer")))
            case "formed":
                self._note_formed(worker, notice)
                self._do(membership.formed(worker, int(notice["generation"]), now))
                if membership.is_formed:
                    self._worker_actions.generation_formed()
            case "committed":
                membership.committed(worker, now)
                self._note_joined(worker, int(notice["step"]), pid=int(notice["pid"]))
            case "leaving":
                self._do(membership.leaving(worker, now, why=str(notice.get("signal", "SIGTERM"))))
            case "left":
                membership.heard(worker, now)
                self._left_at[worker] = int(notice["step"])
            case "over":
                self._do(membership.over(worker, now))
            case _:
                membership.heard(worker, now)

    def lost(self, exits: Sequence[WorkerExit], *, room: int | None = None, silent_s: float = 0.0) -> None:
        """Workers ended unexpectedly, or are ended because nothing was heard of them for `silent_s` seconds. `room` is
        for how many replicas there are free slots (None: for all that were lost).
        """
        workers, causes = [one.worker for one in exits], dict[int, str]()
        for ended in exits:
            cause = cause_of(ended)
            others = [one.worker for one in exits if cause_of(one) == cause]
            reason = causes[self._replica(ended.worker)] = self._with_replicas(cause, others)
            self._note_lost(ended.worker, reason, ended.host, since_s=silent_s, by_itself=True)
        reason = next(iter(causes.values()), "")
        self._do(self._membership.lost(workers, time.monotonic(), reason=reason, room=room), causes)

    def ended(self, worker: int, *, host: str, has_saved: bool) -> None:
        """A worker ended as planned: it left on request, or its program finished."""
        self._note_left(worker, host, has_saved=has_saved)
        self._do(self._membership.ended(worker, time.monotonic(), has_saved=has_saved))

    def leave(self, workers: Collection[int], reason: str, *, room: int) -> bool:
        """Make these workers leave between two steps; return whether the run goes on without them.

        `room` is for how many replicas there are free slots elsewhere. If too few remain, all workers have been told to
        save and leave.
        """
        self._do(self._membership.leave(workers, time.monotonic(), reason=reason, room=room))
        return self.finish is None

    def resize(self, replicas: int) -> None:
        """Go on with this many replicas; raise ValueError if the plan does not allow it."""
        self._do(self._membership.resize(replicas, time.monotonic()))

    def answer_command(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out the user command `paceline resize`, and return the answer to it."""
        try:
            self.resize(int(request["replicas"]))
        except ValueError as error:
            return {"error": str(error)}
        return {"says": f"it will have {request['replicas']} replicas"}

    def refusal(self, replicas: int) -> str:
        """Say why the hosts that are here cannot have this many replicas; "" where they can."""
        limits = self._membership.limits
        if limits.least <= replicas <= limits.most:
            return ""
        return (
            f"the plan allows {limits.least} to {limits.most} replicas; the hosts that are here would have {replicas}"
        )

    def answer_shares(self, replicas: int, excess: Sequence[int], *, room: int) -> dict[str, Any]:
        """Go on with this many replicas, without the `excess` workers; `room` is for how many more there are slots."""
        if excess:
            self.leave(excess, f"resized to {replicas} replica{'s' * (replicas != 1)}", room=room)
        if replicas == self._membership.target:
            return {"says": f"it has {replicas} replicas"}
        return self.answer_command({"replicas": replicas})

    def grow(self, slots: int) -> int:
        """A host joined with room for `slots` workers; return by how many replicas the run grows."""
        before = self._membership.target
        self._do(self._membership.grow(slots // self.workers_each, time.monotonic()))
        return self._membership.target - before

    def stop(self, exit_code: int, reason: str) -> None:
        """Make all workers save and leave."""
        self._do(self._membership.finish(exit_code, reason))

    def tick(self, now: float, *, unheard: Collection[int] = ()) -> None:
        """Let time pass. Nothing can be heard of the `unheard` workers, because their hosts are silent too."""
        if self._unannounced is not None:
            self._form(self._unannounced)
        self._do(self._membership.tick(now, unheard=unheard, load=machine_load()))

    # How decisions are carried out.

    def _do(self, decisions: Sequence[Decision], causes: Mapping[int, str] | None = None) -> None:
        """`causes` says why replicas are lost, by their number; their remaining workers are ended with them."""
        reasons = dict(causes or {})
        for decision in decisions:
            match decision:
                case MembershipView():
                    self._form(decision)
                case StartReplica():
                    self._coming.update(decision.workers)
                    self._num_started += 1
                    workers = self._membership.num_workers
                    self._worker_actions.start(decision.workers, workers=workers, incarnation=self._num_started)
                case EndWorker(worker=worker):
                    if worker in self._members and decision.is_loss:
                        host = self._worker_actions.host_of(worker)
                        own = self._with_replicas(decision.reason, [worker])
                        is_first = self._replica(worker) not in reasons
                        reason = reasons.setdefault(self._replica(worker), own)
                        self._note_lost(worker, reason, host, since_s=decision.silent_s, by_itself=is_first)
                    self._worker_actions.kill(worker)
                case Finish():
                    for worker in self._membership.workers:
                        self._worker_actions.send(worker, decision.to_json())
                case GiveUp():
                    earlier = self._incident.causes if self._incident is not None else []
                    before = ", ".join(cause for cause in earlier if cause not in decision.reason)
                    reason = decision.reason + (f"; before it {before}" if before else "")
                    lost = [] if self._incident is None else self._incident.lost
                    self._worker_actions.give_up(reason, causes=earlier or [decision.reason], lost=lost)

    def _form(self, form: MembershipView) -> None:
        self._unannounced = None if self._worker_actions.publish() else form
        if self._unannounced is not None:
            return
        self._members = set(form.members)
        if self._incident is not None and not form.planned:
            self._incident.generation = form.generation
        if form.generation > self._spread[0]:  # an announcement may be repeated
            self._spread = form.generation, self._worker_actions.new_generation(form.members)
        message = dataclasses.replace(form, is_spread=self._spread[1]).to_json()
        for worker in {*form.members, *self._membership.left_out}:
            self._worker_actions.send(worker, message)

    def _note_lost(self, worker: int, reason: str, host: str, *, since_s: float, by_itself: bool) -> None:
        """`by_itself`: not ended with another worker of its replica, which explains it."""
        now = clock.now() - since_s
        self._lost_at[worker] = now
        self._emit(WorkerLost(rank=worker, host=host, step=self._step, reason=reason, silent_s=round(since_s, 3)))
        if worker not in self._members:
            return
        if self._incident is None:
            self._incident = LossIncident(causes=[reason], lost=[], began=now, at_step=self._step)
        elif reason not in self._incident.causes:
            self._incident.causes.append(reason)
        if by_itself:
            self._incident.lost.append(worker)

    def _note_formed(self, worker: int, notice: Mapping[str, Any]) -> None:
        incident = self._incident
        if incident is None or int(notice["generation"]) < incident.generation:
            return
        # Members that take async batches are at different steps, and none of these steps is lost.
        step = incident.at_step if notice.get("is_apart") else int(notice["step"])
        # By the clock of this host: that of another one may be an hour off.
        told = clock.now() - float(notice["since_s"]) if "since_s" in notice else float(notice["noticed"])
        incident.noticed = max(incident.noticed, told)
        incident.formed = max(incident.formed, clock.now())
        incident.num_undone = max(incident.num_undone, int(notice.get("undone", 0)))
        incident.goes_on_at = step if incident.goes_on_at is None else min(step, incident.goes_on_at)
        if not self._membership.would_form(worker, int(notice["generation"])):
            return
        self._incident = None
        self._emit(
            Regrouped(
                causes=tuple(incident.causes),
                members=self._membership.view.members,
                step=incident.goes_on_at,
                detected_s=round(max(0.0, incident.noticed - incident.began), 3),
                regrouped_s=round(max(0.0, incident.formed - incident.noticed), 3),
                steps_lost=max(incident.num_undone, incident.at_step - incident.goes_on_at),
                holds=self._membership.view.holds,
                workers_each=self.workers_each,
            )
        )

    def replicas_of(self, workers: Collection[int]) -> frozenset[int]:
        """All workers of the replicas that these are of."""
        each = self.workers_each
        firsts = {self._replica(worker) * each for worker in workers}
        return frozenset(worker for first in firsts for worker in range(first, first + each))

    def _replica(self, worker: int) -> int:
        return worker // self.workers_each

    def _with_replicas(self, cause: str, workers: Collection[int]) -> str:
        """Return "worker 3 was killed, and with it replica 1 (workers 2, 3)"; of single workers, the cause alone."""
        if self.workers_each == 1:
            return cause
        numbers = sorted({self._replica(worker) for worker in workers})
        named = [f"{number} (workers {_spelled(self.replicas_of([number * self.workers_each]))})" for number in numbers]
        return f"{cause}, and with it replica{'s' * (len(named) > 1)} {', '.join(named)}"

    def _note_left(self, worker: int, host: str, *, has_saved: bool) -> None:
        """Record that the run goes on without a worker; if all save and leave, the run's end reports it."""
        step, why = self._left_at.pop(worker, self._step), self._membership.why_left(worker)
        if why is None or has_saved or self.is_member(worker):
            return
        reason, resized = why
        self._emit(
            WorkerLeft(
                rank=worker,
                host=host,
                step=step,
                reason=reason,
                members=self._membership.view.members,
                resized=resized,
            )
        )

    def _note_joined(self, worker: int, step: int, *, pid: int) -> None:
        if worker not in self._coming:
            return
        self._coming.discard(worker)
        lost_at = self._lost_at.pop(worker, None)
        after_s = None if lost_at is None else round(clock.now() - lost_at, 3)
        self._emit(WorkerJoined(rank=worker, step=step, after_s=after_s, pid=pid))


def _spelled(workers: Collection[int]) -> str:
    return ", ".join(map(str, sorted(workers)))


def cause_of(ended: WorkerExit) -> str:
    """How a worker was lost, in words."""
    if ended.error and ended.error.get("kind") in ("HostLost", "Hang", "NotStarted"):
        return str(ended.error["message"])  # the same for all these workers, so it is reported once
    if ended.error and ended.signal is None:
        return f"worker {ended.worker}: {ended.error.get('message', '')}".splitlines()[0]
    if ended.signal is not None:
        return f"worker {ended.worker} (pid {ended.pid}) killed by signal {ended.signal}"
    return f"worker {ended.worker} (pid {ended.pid}) ended with exit code {ended.exit_code}"
