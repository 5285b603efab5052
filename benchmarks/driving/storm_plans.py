"""The kinds of plan of `storms.py`, the kinds of fault, and which of these are drawn for which plan."""

from __future__ import annotations

import dataclasses
import random

from paceline.plan import ParameterServer, Plan

__all__ = ["FAULTS", "PLANS", "STEPS", "Fault", "StormPlan", "drawn"]

BATCH, EPOCHS, SAMPLES = 24, 10, 240
STEPS = SAMPLES // BATCH * EPOCHS
FIRST, LAST = 4, STEPS - 25  # steps at which a fault comes: not so late that the run is over before it
FAULTS = {  # and what each is, for people
    "kill": "SIGKILL to a worker",
    "kill two": "SIGKILL to two workers at once",
    "kill again": "SIGKILL to a worker, and to another one while the first is recovered from",
    "kill at start": "SIGKILL to a worker that has taken no step yet, after another fault or at the start",
    "kill in a save": "SIGKILL to a worker while a checkpoint is written",
    "kill all": "SIGKILL to the supervisor and all workers",
    "supervisor": "SIGKILL to the supervisor",
    "warm parent": "SIGKILL to the process from which workers are forked",
    "notice": "SIGTERM to the supervisor, as a cluster does before it takes the machine",
    "Ctrl-C": "SIGINT to the supervisor",
    "leave": "SIGTERM to a worker",
    "pause": "SIGSTOP to a worker for less than silence_s, then SIGCONT",
    "long pause": "SIGSTOP to a worker for more than silence_s, then SIGCONT",
    "supervisor paused": "SIGSTOP to the supervisor, then SIGCONT",
    "full disk": "no room for another byte in the run's directory, for a while",
    "slow disk": "each fsync takes 0.3 s, for a while",
    "loader error": "an exception in the process that reads samples",
    "loader killed": "SIGKILL to the process that reads samples",
    "server": "SIGKILL to a parameter server",
    "cut": "the cable between two hosts is pulled, for a while or until one side has ended",
    "host": "SIGKILL to the supervisor of the second host, and its command again",
}
ANYWHERE = tuple(name for name in FAULTS if name not in ("server", "cut", "host"))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StormPlan:
    """A plan under which storms are run."""

    name: str
    text: str  # without batch and precision
    workers: int
    model: str = "gpt"
    more: tuple[str, ...] = ()  # faults beyond those of every plan
    hosts: int = 1

    @property
    def plan(self) -> Plan:
        text = f"{self.text}+batch(size={BATCH},micro=4)"
        return Plan.parse(f"{text}+compute(precision=fp64)" if Plan.parse(text).wire.exact else text)

    @property
    def is_elastic(self) -> bool:
        return self.plan.layout.is_elastic

    @property
    def faults(self) -> tuple[str, ...]:
        sync = self.plan.sync
        by_number = isinstance(sync, ParameterServer) and (sync.staleness != 0 or sync.drop)  # nothing is read ahead
        return tuple(name for name in (*ANYWHERE, *self.more) if not (by_number and name.startswith("loader")))


PLANS = {
    plan.name: plan
    for plan in (
        StormPlan(name="replicas", text="replicas=2", workers=2),
        StormPlan(name="replicas, snapshots", text="replicas=2+guard(snapshot_every=4)", workers=2),
        StormPlan(name="elastic", text="replicas=1-3", workers=3),
        StormPlan(name="shard", text="shard=2", workers=2),
        StormPlan(name="tensor", text="tensor=2", workers=2),
        StormPlan(name="stages", text="stages=2", workers=2),
        StormPlan(name="context", text="context=2", workers=2),
        StormPlan(name="experts", text="experts=2", workers=2, model="moe"),
        StormPlan(name="replicas x shard", text="replicas=2,shard=2", workers=4),
        StormPlan(name="elastic x shard", text="replicas=1-2,shard=2", workers=4),
        StormPlan(name="tensor x stages", text="tensor=2,stages=2", workers=4),
        StormPlan(name="local SGD", text="replicas=1-3+localsgd(every=4)", workers=3),
        StormPlan(name="gossip", text="replicas=1-3+gossip(average_every=8)", workers=3),
        StormPlan(
            name="servers", text="replicas=1-3+parameterserver(servers=2,mirrored=true)", workers=3, more=("server",)
        ),
        StormPlan(
            name="asynchronous servers",
            text="replicas=1-3+parameterserver(staleness=none)",
            workers=3,
            more=("server",),
        ),
        StormPlan(
            name="bounded staleness", text="replicas=1-3+parameterserver(staleness=3)", workers=3, more=("server",)
        ),
        StormPlan(name="backup workers", text="replicas=3+parameterserver(drop=1)", workers=3, more=("server",)),
        StormPlan(name="PowerSGD", text="replicas=1-3+powersgd(rank=2)", workers=3),
        StormPlan(name="top-k", text="replicas=2+topk(ratio=0.05)", workers=2),
        StormPlan(name="int8", text="replicas=1-3+int8", workers=3),
    )
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault, as it was drawn."""

    kind: str
    step: int  # it comes when the run has committed this step
    after_s: float  # and so long after that
    victim: float  # 0 to 1: which of those that it may hit
    lasts_s: float  # of pauses, disks and cables

    def __str__(self) -> str:
        return f"{self.kind} at step {self.step}"


def drawn(plan: StormPlan, seed: int, *, num: tuple[int, int] = (3, 6), kinds: tuple[str, ...] = ()) -> list[Fault]:
    """The faults of one storm: the same for the same plan and seed."""
    draw = random.Random(f"{seed} {plan.name}")
    steps = sorted(draw.randint(FIRST, LAST) for _ in range(draw.randint(*num)))
    if len(steps) > 1 and draw.random() < 0.5:  # two at once
        number = draw.randrange(len(steps) - 1)
        steps[number + 1] = steps[number]
    legal = [kind for kind in plan.faults if not kinds or kind in kinds]
    return [
        Fault(
            kind=draw.choice(legal),
            step=step,
            after_s=draw.uniform(0, 0.05),
            victim=draw.random(),
            lasts_s=draw.uniform(0.1, 1.5),
        )
        for step in steps
    ]
