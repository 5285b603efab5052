"""What can be done to a run, as data: a fault, and a programme of several, each with a line of text.

A fault comes at a place in a step of a worker, never at a time of the clock: the same programme does the same again.
It comes once, at the first such place that the worker reaches, in that step or later.

    kill:worker=2,step=40                        SIGKILL, at a place that follows from worker and step
    kill:worker=0,step=40,where=commit           ... when it has the sums of the step, and others may not
    stop:worker=1,step=10                        SIGSTOP; with seconds=1, it goes on after a second
    slow:worker=1,step=10,times=3,steps=20       computing takes three times as long, for 20 steps
    flip:worker=1,step=10                        a bit of its weights changes, after the step
    kill_server:worker=0,step=10                 SIGKILL to the parameter servers that the worker has started
    kill:worker=2,step=9; term:worker=1,step=20  a programme
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from paceline.errors import PlanError

__all__ = ["KINDS", "OF_SERVERS", "PLACES", "Fault", "Programme", "why_not"]

KINDS = {  # and what each is, for people
    "kill": "the worker gets SIGKILL",
    "term": "the worker gets SIGTERM, as in a preemption",
    "stop": "the worker gets SIGSTOP: it is there, and says nothing",
    "slow": "the worker computes several times slower",
    "cut": "the worker is cut off from all others",
    "full_disk": "the disk of the checkpoints is full during one save",
    "torn_checkpoint": "everything is killed in the middle of a save, and the newest whole checkpoint is torn",
    "flip": "one bit of the worker's weights changes between two steps",
    "nan": "what the model makes of one of the worker's micro-batches is not a number",
    "spike": "what the model makes of one of the worker's micro-batches is far off, and the loss leaps",
}
OF_SERVERS = {"kill_server": "the parameter servers that the worker has started get SIGKILL"}  # under such plans
EXCHANGE = "exchange"  # no fault: all batches have other samples, so that losses say whether a script uses them
PLACES = {  # in the order in which a step comes by them
    "forward": "in the forward pass",
    "sum": "its part of the gradients is handed over, the sum not there",
    "commit": "it has the sum, others may not",
    "save": "in the middle of a save",
    "regroup": "during the recovery from another loss",
}
ANY = "any"
BY_CHANCE = ("forward", "sum", "commit")  # what "any" may turn out to be
OF_THE_WRITER = ("full_disk", "torn_checkpoint")  # worker 0 writes the checkpoints
LOSES_A_WORKER = ("kill", "term", "stop", "cut")
POISONS = ("nan", "spike")  # the step is left out, so what comes after it differs from an undisturbed run
OF_THE_NUMBERS = ("flip", *POISONS)  # have no place in a step to choose
SPIKE_FROM = 6  # step: before that a guard with the smallest window does not know what to expect
MAJORITY = 3  # workers, of which one may be wrong


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault. PlanError where it makes no sense."""

    kind: str  # of KINDS
    worker: int  # rank
    step: int  # from 1: the step that it is in the middle of, or the newest committed one when it saves
    where: str = ANY  # of PLACES; "any": follows from worker and step
    seconds: float | None = None  # stop: until it is continued; None: never
    times: float = 3.0  # slow: this often the usual computing time
    steps: int = 20  # slow: for so many

    def __post_init__(self) -> None:
        if self.kind not in (*KINDS, *OF_SERVERS, EXCHANGE):
            raise PlanError(f"There is no fault {self.kind!r}. Use one of: {', '.join((*KINDS, *OF_SERVERS))}.")
        if self.where != ANY and self.where not in PLACES:
            raise PlanError(f"{self.kind}: there is no place {self.where!r} in a step. Use any, {', '.join(PLACES)}.")
        if self.worker < 0 or self.step < 1 or self.steps < 1:
            raise PlanError(
                f"{self.kind}: worker={self.worker}, step={self.step}, steps={self.steps}: workers count from 0, "
                "steps from 1."
            )
        if self.times <= 1 or (self.seconds is not None and self.seconds <= 0):
            raise PlanError(
                f"{self.kind}: times={self.times}, seconds={self.seconds}: times is more than 1, seconds more than 0."
            )
        if self.kind in OF_THE_WRITER and (self.worker != 0 or self.where not in (ANY, "save")):
            raise PlanError(f"{self.kind} is a fault of worker 0's, which writes the checkpoints: {self.kind}:step=...")

        if self.kind in OF_THE_NUMBERS and self.where != ANY:
            raise PlanError(f"{self.kind}: where={self.where} has no meaning for it; leave that out.")
        if self.kind == "spike" and self.step < SPIKE_FROM:
            raise PlanError(
                f"spike: step={self.step}; it must be at least {SPIKE_FROM}, so that losses are known to leap from."
            )

    @property
    def place(self) -> str:
        """Where it comes: `where`, with "any" decided."""
        if self.kind in OF_THE_WRITER:
            return "save"
        if self.where != ANY:
            return self.where
        return random.Random(f"{self.worker} {self.step}").choice(BY_CHANCE)

    @property
    def loses_a_worker(self) -> bool:
        """Whether the run goes on without the worker, if it can."""
        return self.kind in LOSES_A_WORKER and self.seconds is None

    @property
    def poisons(self) -> bool:
        """Whether its step is to be left out."""
        return self.kind in POISONS

    @property
    def ends_the_run(self) -> bool:
        """Whether the whole run is killed, to be started again."""
        return self.kind == "torn_checkpoint"

    def __str__(self) -> str:
        fields = [field for field in dataclasses.fields(self) if field.name != "kind"]
        told = [(field.name, getattr(self, field.name)) for field in fields if self._is_told(field)]
        return f"{self.kind}:" + ",".join(f"{name}={value}" for name, value in told)

    def _is_told(self, field: dataclasses.Field[Any]) -> bool:
        return field.name in ("worker", "step") or getattr(self, field.name) != field.default

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read a fault's line of text; PlanError where it is none."""
        kind, _, rest = text.strip().partition(":")
        fields: dict[str, Any] = {"worker": 0} if kind in OF_THE_WRITER else {}
        readers = {"worker": int, "step": int, "where": str, "seconds": float, "times": float, "steps": int}
        for part in filter(None, (part.strip() for part in rest.split(","))):
            name, _, value = part.partition("=")
            if name not in readers:
                raise PlanError(f"{text.strip()}: a fault has no {name!r}. It has: {', '.join(readers)}.")
            try:
                fields[name] = readers[name](value)
            except ValueError:
                raise PlanError(f"{text.strip()}: {name} is {value!r}; it must be a number.") from None
        for name in ("worker", "step"):
            if name not in fields and kind in (*KINDS, *OF_SERVERS):
                raise PlanError(f"{text.strip()}: say the {name} too, as in {kind}:worker=1,step=10.")
        given: dict[str, Any] = {"kind": kind, "worker": 0, "step": 1, **fields}
        return cls(**given)


@dataclasses.dataclass(frozen=True, slots=True)
class Programme:
    """Faults of one run, in no order but that of their steps."""

    faults: tuple[Fault, ...] = ()

    @classmethod
    def of(cls, faults: Programme | Fault | str | Iterable[Fault]) -> Programme:
        """Return a programme of whatever says what should happen."""
        if isinstance(faults, Programme):
            return faults
        if isinstance(faults, str):
            return cls.parse(faults)
        return cls((faults,) if isinstance(faults, Fault) else tuple(faults))

    @classmethod
    def parse(cls, text: str) -> Programme:
        """Read faults with semicolons between them; PlanError where one is none."""
        return cls(tuple(Fault.parse(part) for part in text.split(";") if part.strip()))

    @classmethod
    def random(
        cls,
        seed: int,
        *,
        steps: int,
        workers: int,
        kinds: Sequence[str] = tuple(KINDS),
        num: int = 1,
        each: int = 1,
        last_stage: Sequence[int] = (),
        last_save: int | None = None,
    ) -> Programme:
        """Draw `num` faults for a run of so many steps; the same for the same arguments. `each`: workers of a replica;
        `last_save`: faults of a save come by then, where not at the run's end.

        A spike comes at a worker of a pipeline's `last_stage`: what others make may be normalized before the loss.

        One worker, drawn as well, is never lost, nor any of its replica where there are others, so that the run's state
        is never gone with the last of them; with one worker only faults are drawn that it survives.
        """
        draw = random.Random(f"{seed} {steps} {workers} {num}")
        survivor = draw.randrange(workers)
        others = [worker for worker in range(workers) if worker // each != survivor // each]
        others = others or [worker for worker in range(workers) if worker != survivor]
        possible = [kind for kind in kinds if not why_not(kind, steps=steps, workers=workers, each=each)]
        if num > 1 and workers // each == MAJORITY:  # another fault may just have taken one
            possible = [kind for kind in possible if kind != "flip"]
        if not possible or steps < 4 or num < 1:
            raise PlanError(
                f"There is no programme of {num} faults of {', '.join(kinds)} for {workers} worker(s) and {steps} "
                "steps: use at least 1 fault, 4 steps, and 2 workers for faults that lose one."
            )
        found = [
            _drawn(draw, draw.choice(possible), others or [survivor], between, last_save or steps)
            for between in _spans(steps, num)  # each in its own part of the run
        ]
        if last_stage:
            found = [
                dataclasses.replace(one, worker=last_stage[one.worker % len(last_stage)])
                if one.kind == "spike"
                else one
                for one in found
            ]
        return cls(tuple(found))

    @classmethod
    def of_each_kind(
        cls,
        seed: int,
        *,
        steps: int,
        workers: int,
        kinds: Sequence[str] = tuple(KINDS),
        each: int = 1,
        last_stage: Sequence[int] = (),
        servers: int = 0,
        last_save: int | None = None,
    ) -> Programme:
        """Draw one fault of each of these kinds that can be survived by so many workers, `each` of them a replica; for
        runs of their own. `servers`: parameter servers, of which one is killed, too; `last_stage` and `last_save` as
        for `random`."""
        kinds = [kind for kind in kinds if not why_not(kind, steps=steps, workers=workers, each=each)]
        return cls(
            tuple(
                fault
                for number, kind in enumerate(kinds)
                for fault in cls.random(
                    seed * len(KINDS) + number,
                    steps=steps,
                    workers=workers,
                    kinds=[kind],
                    each=each,
                    last_stage=last_stage,
                    last_save=last_save,
                )
            )
            + tuple(Fault(kind=kind, worker=0, step=max(2, steps // 2)) for kind in OF_SERVERS if servers)
        )

    def require(self, *, steps: int, workers: int, each: int = 1, servers: int = 0) -> None:
        """Raise PlanError where a fault cannot come in a run of so many steps and workers, `each` of them a replica,
        and parameter servers."""
        for fault in self.faults:
            if fault.kind in OF_SERVERS and fault.worker >= servers:
                who = f"workers 0 to {min(servers, workers) - 1} have" if servers else "the plan has no ParameterServer"
                raise PlanError(f"{fault} needs a worker that has started a parameter server: {who}.")
            if fault.step > steps or fault.worker >= workers:
                raise PlanError(
                    f"{fault} cannot come: the run has steps 1 to {steps} and workers 0 to {workers - 1}. "
                    "Name others, or use more of them (--steps, --workers)."
                )
            if reason := why_not(fault.kind, steps=steps, workers=workers, each=each):
                raise PlanError(f"{fault} {reason}.")

    def __iter__(self) -> Iterator[Fault]:
        return iter(self.faults)

    def __len__(self) -> int:
        return len(self.faults)

    def __str__(self) -> str:
        return "; ".join(map(str, self.faults))


def why_not(kind: str, *, steps: int, workers: int, each: int) -> str:
    """Why a run of so many steps and workers, `each` of them a replica, could not keep what is promised for a kind of
    fault; "" where it can."""
    if kind == "spike" and steps < SPIKE_FROM:
        return f"needs {SPIKE_FROM} steps, so that losses are known to leap from"
    if kind == "flip" and workers // each < MAJORITY:
        who = "workers" if each == 1 else "replicas"
        return f"needs {MAJORITY} {who}, so that a majority says whose weights are right"
    if kind in LOSES_A_WORKER and workers < 2:
        return "needs 2 workers, so that one is left"
    return ""


def _drawn(draw: random.Random, kind: str, workers: Sequence[int], between: tuple[int, int], last_save: int) -> Fault:
    worker, step, where = draw.choice(workers), draw.randint(*between), draw.choice(BY_CHANCE)
    if kind in OF_THE_WRITER:
        return Fault(kind=kind, worker=0, step=min(step, last_save))
    if kind in OF_THE_NUMBERS:
        return Fault(kind=kind, worker=worker, step=max(step, SPIKE_FROM) if kind == "spike" else step)
    return Fault(kind=kind, worker=worker, step=step, where=where)


def _spans(steps: int, num: int) -> Iterator[tuple[int, int]]:
    """Cut the middle half of the steps into `num` parts: before it little was done, after it little would be seen."""
    first, last = max(2, steps // 4), max(3, steps * 3 // 4)
    for number in range(num):
        low = first + (last - first) * number // num
        yield low, max(low, first + (last - first) * (number + 1) // num - 1)
