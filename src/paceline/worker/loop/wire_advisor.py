"""Says when the wire costs more than it saves, and, where the network is slow, which one would pay.

After some warm steps the first worker judges what it has measured in the last ones (`sync/compression_advice.py`), and
again after twice as many, four times as many, and so on. It reports a verdict that is another one than before.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

from paceline.events import Event, StepDone, WireJudged
from paceline.plan import AllReduce, Cast, Int8, OneBit, Plan, PowerSGD, Wire
from paceline.sync.compression_advice import StepTimes, WireCost, is_known, judge_wire, link_seconds, median_of, priced
from paceline.worker.membership.join_run import WorkerContext
from paceline.worker.state.prepared_models import PreparedModels

__all__ = ["WireAdvisor"]

NUM_STEPS = 20  # that are looked at
FIRST_AT = 25  # steps of this attempt: the first ones are slow for other reasons
WORTH_PRICING = 0.1  # of a step: where replicas are awaited for less, no other wire is timed
ALTERNATIVES: tuple[Wire, ...] = (Cast(dtype="bf16"), Int8(), OneBit(), PowerSGD(rank=4))  # the gentler ones first


class WireAdvisor:
    """One worker's judge. Only the first worker's reports, and only where all-reduce sums."""

    def __init__(
        self, plan: Plan, *, place: WorkerContext, models: PreparedModels, emit: Callable[[Event], None]
    ) -> None:
        self._plan, self._place, self._models, self._emit = plan, place, models, emit
        self._recent: deque[StepTimes] = deque(maxlen=NUM_STEPS)
        self._replicas = 0
        self._num_steps, self._due = 0, FIRST_AT
        self._before = (0.0, 0.0)  # waited, encoding
        self._reported = "none"  # the kind of the last verdict
        self._last: StepDone | None = None
        self._prices: dict[str, WireCost] = {}

    def note(self, done: StepDone) -> None:
        """A batch is done with; `done` is the last step that was committed."""
        sync, is_new = self._plan.sync, done is not self._last
        self._last = done
        if not is_new or not isinstance(sync, AllReduce) or sync.op != "mean" or self._place.group.index != 0:
            return
        waited_s, encoding_s = self._models.reducers.wire_seconds()
        before, self._before = self._before, (waited_s, encoding_s)
        if self._place.axes.replica_group.size != self._replicas:
            self._replicas = self._place.axes.replica_group.size
            self._recent.clear()
        if self._replicas < 2:  # the table is about the replicas that were here before
            return
        self._recent.append(
            StepTimes(
                step_s=done.seconds["total"],
                waited_s=waited_s - before[0],
                encoding_s=encoding_s - before[1],
                num_sent=float(done.num_wire_bytes),
                num_raw=float(done.num_raw_bytes),
            )
        )
        self._num_steps += 1
        if self._num_steps >= self._due and len(self._recent) == NUM_STEPS:
            self._due = 2 * self._num_steps
            self._judge(sync, done.step)

    def _judge(self, sync: AllReduce, step: int) -> None:
        measured, wire, across = median_of(self._recent), self._plan.wire, self._place.axes.replica_group
        is_exact = wire.exact
        table = self._place.link(self._replicas)
        raw: dict[str, Any] = {
            "num_raw": measured.num_raw,
            "replicas": self._replicas,
            "bucket_bytes": sync.bucket_bytes,
        }
        if is_exact and not across.shares_memory and is_known(table, **raw) and not self._prices:
            raw_s = link_seconds(table, measured.num_raw, **raw)
            if min(raw_s, measured.waited_s) > WORTH_PRICING * measured.step_s:
                self._prices = self._priced()
        verdict = judge_wire(
            measured,
            wire=repr(wire),
            is_exact=is_exact,
            replicas=self._replicas,
            shares_memory=across.shares_memory,
            table=table,
            bucket_bytes=sync.bucket_bytes,
            others=self._prices,
        )
        kind = "none" if verdict is None else verdict.kind
        if kind == self._reported:
            return
        self._reported = kind
        said: dict[str, Any] = {"kind": kind} if verdict is None else dataclasses.asdict(verdict)
        self._emit(WireJudged(step=step, **said))

    def _priced(self) -> dict[str, WireCost]:
        """What other wires would cost, of those that the plan may have."""
        shapes, prices = self._models.reducers.largest_bucket(), dict[str, WireCost]()
        for wire in ALTERNATIVES:
            if shapes and not dataclasses.replace(self._plan, wire=wire).check():
                prices[repr(wire)] = priced(wire, shapes, replicas=self._replicas)
        return prices
