"""Carries out what the membership decides: starts, ends and tells workers, and says what each incident cost.

It is the head's part for elastic runs. It hears the workers' notices and how they end, passes both on to the state
machine (`paceline.elastic.membership`), and acts on what comes back.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from paceline.elastic.membership import Decision, EndWorker, GiveUp, Limits, Membership, StartReplica
from paceline.elastic.membership_messages import Finish, MembershipView
from paceline.events import Event, Regrouped, WorkerJoined, WorkerLeft, WorkerLost
from paceline.launch.job.outcome import WorkerExit

__all__ = ["ElasticController", "WorkerActions"]


class WorkerActions(Protocol):
    """The workers of all hosts, as the head reaches them."""

    def tell(self, worker: int, message: Mapping[str, Any]) -> None: ...

    def start(self, replica: Sequence[int], *, workers: int, incarnation: int) -> None:
        """Have the workers of a replica started; the run has so many `workers` then. `incarnation`: that nobody had
        before."""
        ...

    def kill(self, worker: int) -> None: ...

    def host_of(self, worker: int) -> str:
        """The name of a worker's host."""
        ...

    def forms(self, members: Collection[int]) -> bool:
        """A new generation is about to be told, of these members; returns whether they are on more than one host."""
        ...

    def formed(self) -> None:
        """All members have joined the newest generation."""
        ...

    def give_up(self, reason: str, *, causes: Sequence[str], lost: Sequence[int]) -> None:
        """Nobody is left who has the run's state. `causes`: what has led to it; `lost`: workers that were lost by it,
        and not ended with them."""
        ...


@dataclasses.dataclass(kw_only=True)
class LossIncident:
    """A loss of workers, until the others have formed again."""

    causes: list[str]
    lost: list[int]  # workers, but for those that were ended with them
    began: float  # time.time() when the first of them was lost, as far as can be known
    generation: int = 0
    noticed: float = 0.0  # when the last of the others knew
    formed: float = 0.0
    at_step: int = 0  # committed before
    goes_on_at: int | None = None  # committed steps of those who go on


class ElasticController:
    """Decides nothing by itself. `workers` begin the run; `emit` takes events for the run's record."""

    def __init__(
        self, limits: Limits, *, workers: int, worker_actions: WorkerActions, emit: Callable[[Event], None]
    ) -> None:
        self.workers_each = limits.workers_each
        self._worker_actions, self._emit = worker_actions, emit
        self._membership = Membership(limits, replicas=workers // limits.workers_each, now=time.monotonic())
        self._incident: LossIncident | None = None
        self._step = 0  # the newest that anybody has committed
        self._lost_at: dict[int, float] = {}  # worker -> when its predecessor was lost
        self._num_started = 0  # replicas, since the run began
        self._coming: set[int] = set()  # workers that were started, and have not taken a step
        self._left_at: dict[int, int] = {}  # worker -> the last step that it took part in, as it said when it left
        self._spread = (-1, False)  # the newest generation, and whether it is on more than one host
        self._members: set[int] = set(self._membership.form.members)  # when we last told anybody

    @property
    def finish(self) -> Finish | None:
        """What everybody was told, once the run is to end."""
        return self._membership.ending

    def is_member(self, worker: int) -> bool:
        return self._membership.is_member(worker)

    def is_over(self, worker: int) -> bool:
        """Whether a worker has come to the end of its program's part in the run, though its process may go on."""
        return self._membership.is_over(worker)

    # What happens.

    def heard(self, worker: int, notice: Mapping[str, Any]) -> None:
        """A worker's notice; KeyError or TypeError where it makes no sense."""
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
                    self._worker_actions.formed()
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
        """Workers have ended that were not told to, or are to end because nothing came of them for `silent_s` seconds.
        `room`: for so many replicas there are free slots (None: for all that were lost)."""
        workers, causes = [one.worker for one in exits], dict[int, str]()
        for ended in exits:
            cause = cause_of(ended)
            others = [one.worker for one in exits if cause_of(one) == cause]
            reason = causes[self._replica(ended.worker)] = self._with_replicas(cause, others)
            self._note_lost(ended.worker, reason, ended.host, since_s=silent_s)
            if self._incident is not None and ended.worker in self._members:
                self._incident.lost.append(ended.worker)
        reason = next(iter(causes.values()), "")
        self._do(self._membership.lost(workers, time.monotonic(), reason=reason, room=room), causes)

    def ended(self, worker: int, *, host: str, has_saved: bool) -> None:
        """A worker has ended in good order: it left as it was to, or its program has come to its end."""
        self._note_left(worker, host, has_saved=has_saved)
        self._do(self._membership.ended(worker, time.monotonic(), has_saved=has_saved))

    def leave(self, workers: Collection[int], reason: str, *, room: int) -> bool:
        """Have these workers leave between two steps; `room`: for so many replicas there are free slots elsewhere.

        Returns whether the run goes on without them: otherwise everybody has been told to save and leave.
        """
        self._do(self._membership.leave(workers, time.monotonic(), reason=reason, room=room))
        return self.finish is None

    def resize(self, replicas: int) -> None:
        """Go on with so many; ValueError where the plan does not allow it."""
        self._do(self._membership.resize(replicas, time.monotonic()))

    def grow(self, slots: int) -> int:
        """A host has come with room for so many workers; returns by how many replicas the run grows."""
        before = self._membership.target
        self._do(self._membership.grow(slots // self.workers_each, time.monotonic()))
        return self._membership.target - before

    def stop(self, exit_code: int, reason: str) -> None:
        """Have everybody save and leave."""
        self._do(self._membership.finish(exit_code, reason))

    def tick(self, now: float, *, unheard: Collection[int] = ()) -> None:
        """Time passes; of the `unheard` workers nothing can be heard, as their hosts say nothing either."""
        self._do(self._membership.tick(now, unheard=unheard))

    # What is done.

    def _do(self, decisions: Sequence[Decision], causes: Mapping[int, str] | None = None) -> None:
        """`causes`: why replicas are lost, by their numbers; the rest of their workers is ended with them."""
        told = dict(causes or {})
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
                        reason = told.setdefault(self._replica(worker), own)
                        self._note_lost(worker, reason, host, since_s=decision.silent_s)
                    self._worker_actions.kill(worker)
                case Finish():
                    for worker in self._membership.workers:
                        self._worker_actions.tell(worker, decision.to_json())
                case GiveUp():
                    earlier = self._incident.causes if self._incident is not None else []
                    before = ", ".join(cause for cause in earlier if cause not in decision.reason)
                    reason = decision.reason + (f"; before it {before}" if before else "")
                    lost = [] if self._incident is None else self._incident.lost
                    self._worker_actions.give_up(reason, causes=earlier or [decision.reason], lost=lost)

    def _form(self, form: MembershipView) -> None:
        self._members = set(form.members)
        if self._incident is not None and not form.planned:
            self._incident.generation = form.generation
        if form.generation > self._spread[0]:  # said again, it is the same generation still
            self._spread = form.generation, self._worker_actions.forms(form.members)
        message = dataclasses.replace(form, is_spread=self._spread[1]).to_json()
        for worker in {*form.members, *self._membership.left_out}:
            self._worker_actions.tell(worker, message)

    def _note_lost(self, worker: int, reason: str, host: str, *, since_s: float = 0.0) -> None:
        now = time.time() - since_s
        self._lost_at[worker] = now
        self._emit(WorkerLost(rank=worker, host=host, step=self._step, reason=reason, silent_s=round(since_s, 3)))
        if worker not in self._members:
            return
        if self._incident is None:
            self._incident = LossIncident(causes=[reason], lost=[], began=now, at_step=self._step)
        elif reason not in self._incident.causes:
            self._incident.causes.append(reason)

    def _note_formed(self, worker: int, notice: Mapping[str, Any]) -> None:
        incident = self._incident
        if incident is None or int(notice["generation"]) < incident.generation:
            return
        # Of members that take batches by themselves each has another step, and none of them is lost.
        step = incident.at_step if notice.get("is_apart") else int(notice["step"])
        incident.noticed = max(incident.noticed, float(notice["noticed"]))
        incident.formed = max(incident.formed, time.time())
        incident.goes_on_at = step if incident.goes_on_at is None else min(step, incident.goes_on_at)
        if not self._membership.would_form(worker, int(notice["generation"])):
            return
        self._incident = None
        self._emit(
            Regrouped(
                causes=tuple(incident.causes),
                members=self._membership.form.members,
                step=incident.goes_on_at,
                detected_s=round(max(0.0, incident.noticed - incident.began), 3),
                regrouped_s=round(max(0.0, incident.formed - incident.noticed), 3),
                steps_lost=max(0, incident.at_step - incident.goes_on_at),
                holds=self._membership.form.holds,
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
        """Say that the others go on without a worker; where everybody saves and leaves, the run's end tells that."""
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
                members=self._membership.form.members,
                resized=resized,
            )
        )

    def _note_joined(self, worker: int, step: int, *, pid: int) -> None:
        if worker not in self._coming:
            return
        self._coming.discard(worker)
        lost_at = self._lost_at.pop(worker, None)
        after_s = None if lost_at is None else round(time.time() - lost_at, 3)
        self._emit(WorkerJoined(rank=worker, step=step, after_s=after_s, pid=pid))


def _spelled(workers: Collection[int]) -> str:
    return ", ".join(map(str, sorted(workers)))


def cause_of(ended: WorkerExit) -> str:
    """How a worker was lost, in words."""
    if ended.error and ended.error.get("kind") in ("HostLost", "Hang", "NotStarted"):
        return str(ended.error["message"])  # the same for all of these workers, and so told once; or it names its own
    if ended.error and ended.signal is None:
        return f"worker {ended.worker}: {ended.error.get('message', '')}".splitlines()[0]
    if ended.signal is not None:
        return f"worker {ended.worker} (pid {ended.pid}) killed by signal {ended.signal}"
    return f"worker {ended.worker} (pid {ended.pid}) ended with exit code {ended.exit_code}"
