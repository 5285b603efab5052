"""When the wire is said to cost more than it saves, when another one to pay, and when nothing is said."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.events import Event, StepDone, WireJudged
from paceline.monitor.console.event_lines import event_line
from paceline.plan import AllReduce, Cast, Int8, OneBit, ParameterServer, Plan, PowerSGD, Raw, Wire
from paceline.sync.compression_advice import StepTimes, WireCost, judge_wire, link_seconds, priced
from paceline.worker.loop.wire_advisor import FIRST_AT, WireAdvisor

MIB = 2**20
# 1 ms, and a second for each 100 MB: the tree is the better one of the small sizes.
TABLE = {
    4096: {"backend": 0.002, "tree": 0.001},
    MIB: {"backend": 0.001 + MIB / 1e8, "tree": 0.1},
    8 * MIB: {"backend": 0.001 + 8 * MIB / 1e8},
}
STEP = StepTimes(step_s=0.4, waited_s=0.0, encoding_s=0.0, num_sent=8.0 * MIB, num_raw=8.0 * MIB)


def judged(measured: StepTimes = STEP, **others: Any) -> Any:
    given: dict[str, Any] = {
        "wire": "Int8()",
        "is_exact": False,
        "replicas": 2,
        "shares_memory": False,
        "table": TABLE,
        "bucket_bytes": 8 * MIB,
        "others": {},
    }
    return judge_wire(measured, **{**given, **others})


def test_the_link_s_time_is_that_of_the_fastest_way_for_each_bucket() -> None:
    def seconds(num_bytes: float, **given: Any) -> float:
        return link_seconds(TABLE, num_bytes, **{"replicas": 2, "num_raw": num_bytes, "bucket_bytes": 8 * MIB, **given})

    assert seconds(4096) == 0.001 and seconds(100) == 0.001
    assert seconds(4 * MIB) == pytest.approx(0.001 + 4 * MIB / 1e8)
    assert seconds(32 * MIB) == pytest.approx(4 * (0.001 + 8 * MIB / 1e8))
    assert seconds(8 * MIB, num_raw=32 * MIB) == pytest.approx(4 * (0.001 + 2 * MIB / 1e8))  # four buckets, coded
    # Four replicas send 3/2 of the tensor each, which is what was timed.
    assert seconds(6 * MIB, replicas=4) == pytest.approx(0.001 + 4 * MIB / 1e8)


def test_a_wire_that_takes_longer_than_it_saves_is_named_with_what_it_costs() -> None:
    raw_s, sent_s = 0.001 + 8 * MIB / 1e8, 0.001 + 2 * MIB / 1e8
    slow = dataclasses.replace(STEP, num_sent=2.0 * MIB, encoding_s=raw_s - sent_s + 0.005)
    found = judged(slow)
    assert (found.kind, found.wire, found.link_s) == ("costs", "Int8()", pytest.approx(raw_s))
    assert found.saved_s == pytest.approx(-0.005)
    assert judged(dataclasses.replace(slow, encoding_s=raw_s - sent_s - 0.005)) is None
    assert judged(slow, is_exact=True) is None
    assert judged(slow, table={}) is None  # nothing is known of the network
    small = {4096: {"backend": 0.001}, 8192: {"backend": 0.001}}
    assert judged(slow, table=small) is None  # nor of sums that are much larger than what was timed
    assert judged(dataclasses.replace(slow, num_raw=16384.0, num_sent=4096.0), table=small).kind == "costs"
    assert judged(slow, replicas=1) is None


def test_in_shared_memory_every_codec_costs_and_nothing_else_is_said() -> None:
    found = judged(dataclasses.replace(STEP, encoding_s=0.01), shares_memory=True, table={})
    assert (found.kind, found.saved_s) == ("memory", -0.01)
    waits = dataclasses.replace(STEP, waited_s=0.3)
    assert (
        judged(waits, shares_memory=True, is_exact=True, others={"Cast()": WireCost(ratio=0.5, seconds_per_byte=0)})
        is None
    )


def test_another_wire_pays_where_replicas_are_awaited_and_the_link_is_why() -> None:
    others = {
        "Cast()": WireCost(ratio=0.5, seconds_per_byte=0.0),
        "Int8()": WireCost(ratio=0.25, seconds_per_byte=1e-10),
    }
    waits = dataclasses.replace(STEP, step_s=0.2, waited_s=0.08)
    found = judged(waits, is_exact=True, others=others)
    assert (found.kind, found.wire) == ("pays", "Int8()")
    assert found.saved_s == pytest.approx(6 * MIB / 1e8 - 8 * MIB * 1e-10)
    assert judged(dataclasses.replace(waits, waited_s=0.03), is_exact=True, others=others).wire == "Cast()"  # as good
    assert judged(dataclasses.replace(waits, waited_s=0.01), is_exact=True, others=others) is None  # hidden already
    lags = dataclasses.replace(waits, waited_s=0.15, num_raw=4096.0)  # the awaited worker is slow, not the link
    assert judged(lags, is_exact=True, others=others) is None
    dear = {"PowerSGD(rank=4)": WireCost(ratio=0.01, seconds_per_byte=1e-8)}
    assert judged(waits, is_exact=True, others=dear) is None


@pytest.mark.parametrize(
    ("wire", "ratio"), [(Cast(dtype="bf16"), 0.5), (Int8(), 0.2539), (OneBit(), 0.0322), (PowerSGD(rank=4), 0.0105)]
)
def test_a_wire_s_price_is_what_it_sends_and_takes(wire: Wire, ratio: float) -> None:
    found = priced(wire, [(512, 128), (256, 256)], replicas=2)
    assert found.ratio == pytest.approx(ratio, rel=0.2)
    assert 0 < found.seconds_per_byte < 1e-6


class Run:
    """An Advising among stand-ins, whose steps all take as long."""

    def __init__(self, plan: Plan, *, shares_memory: bool = False, table: Any = TABLE, index: int = 0) -> None:
        self.replica_group = SimpleNamespace(size=2, shares_memory=shares_memory)
        self.waited_s = self.encoding_s = 0.0
        self.told: list[Event] = []
        self.step = 0
        place: Any = SimpleNamespace(
            group=SimpleNamespace(index=index),
            axes=SimpleNamespace(replica_group=self.replica_group),
            link=lambda _: table,
        )
        reducers = SimpleNamespace(
            wire_seconds=lambda: (self.waited_s, self.encoding_s), largest_bucket=lambda: [(256, 256)]
        )
        models: Any = SimpleNamespace(reducers=reducers)
        self._advising = WireAdvisor(plan, place=place, models=models, emit=self.told.append)

    def take(self, num_steps: int, *, step_s: float, waited_s: float, encoding_s: float, sent: int) -> list[str]:
        """The kinds of what was said so far."""
        for _ in range(num_steps):
            self.step += 1
            self.waited_s += waited_s
            self.encoding_s += encoding_s
            seconds = {"total": step_s, "communication": waited_s}
            done = StepDone(
                step=self.step,
                epoch=0,
                num_samples=8,
                loss=1.0,
                metrics={},
                seconds=seconds,
                num_wire_bytes=sent,
                num_raw_bytes=8 * MIB,
            )
            self._advising.note(done)
            self._advising.note(done)  # a batch that was not committed comes between
        return [event.kind for event in self.told if isinstance(event, WireJudged)]


def test_it_is_said_once_after_warm_steps_and_taken_back_where_it_holds_no_more() -> None:
    run = Run(Plan(wire=PowerSGD(rank=8)))
    dear = {"step_s": 0.4, "waited_s": 0.0, "encoding_s": 0.2, "sent": 2 * MIB}
    assert run.take(FIRST_AT - 1, **dear) == []
    assert run.take(1, **dear) == ["costs"]
    assert run.take(100, **dear) == ["costs"]
    text = event_line(run.told[0]) or ""
    assert text == (
        "after step 25: the link needs 84.9 ms of a 400 ms step: PowerSGD(rank=8) takes 200 ms for encoding, and costs "
        "137 ms more than it saves. Raw() is faster here"
    )
    assert run.take(200, **{**dear, "encoding_s": 0.001}) == ["costs", "none"]
    assert event_line(run.told[1]) is None


def test_raw_on_a_slow_link_hears_of_a_wire_that_would_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_an_idle_machine(wire: Wire, shapes: Any, *, replicas: int) -> WireCost:
        return dataclasses.replace(priced(wire, shapes, replicas=replicas), seconds_per_byte=1e-9)

    monkeypatch.setattr("paceline.worker.loop.wire_advisor.priced", on_an_idle_machine)
    run = Run(Plan(wire=Raw()))
    assert run.take(30, step_s=0.12, waited_s=0.08, encoding_s=0.0, sent=8 * MIB) == ["pays"]
    text = event_line(run.told[0]) or ""
    assert "the link needs 84.9 ms of a 120 ms step: " in text and "would save about" in text
    sharded: Any = Run(Plan.parse("shard=2"))
    sharded.take(30, step_s=0.12, waited_s=0.08, encoding_s=0.0, sent=8 * MIB)
    assert "PowerSGD" not in sharded.told[0].wire  # which a sharded plan cannot have


@pytest.mark.parametrize(
    ("plan", "others"),
    [
        (Plan(wire=Int8()), {"index": 1}),
        (Plan(wire=Int8(), sync=AllReduce(op="adasum")), {}),
        (Plan(sync=ParameterServer()), {}),
        (Plan(wire=Int8()), {"table": {}}),
    ],
)
def test_nothing_is_said_by_others_or_of_what_was_not_measured(plan: Plan, others: dict[str, Any]) -> None:
    assert Run(plan, **others).take(60, step_s=0.4, waited_s=0.3, encoding_s=0.3, sent=8 * MIB) == []


def test_the_last_replica_that_is_left_is_told_nothing_of_a_link_that_it_does_not_use() -> None:
    run = Run(Plan(wire=Raw()))
    run.replica_group.size = 1
    assert run.take(3 * FIRST_AT, step_s=0.12, waited_s=0.0, encoding_s=0.0, sent=0) == []
