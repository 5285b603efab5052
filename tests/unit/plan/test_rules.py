"""The rules between the parts of a plan: each breaks on its own mistake, all are told at once, and the fixes work."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import PlanError
from paceline.plan import (
    AllReduce,
    Batch,
    Cast,
    Compute,
    Gossip,
    Guard,
    Int8,
    Layout,
    LocalSGD,
    ParameterServer,
    Plan,
    PowerSGD,
)
from paceline.plan.plan import RULES

BREAKS: dict[str, tuple[Plan, dict[str, Any]]] = {
    "layout-fits-workers": (Plan(layout=Layout(replicas=4)), {"workers": 6}),
    "tokens-are-split-once": (Plan(layout=Layout(context=2, tensor=2, sequence=True)), {}),
    "context-parallel-runs-as-written": (Plan(layout=Layout(context=2), compute=Compute(offload="all")), {}),
    "expert-parallel-runs-as-written": (Plan(layout=Layout(experts=2), compute=Compute(offload="all")), {}),
    "slices-are-not-compiled": (Plan(layout=Layout(tensor=2), compute=Compute(compile=True)), {}),
    "fp8-scales-are-those-of-one-process": (Plan(layout=Layout(context=2), compute=Compute(precision="fp8")), {}),
    "micro-fits-size": (Plan(batch=Batch(size=4, micro=8)), {}),
    "work-for-every-worker": (Plan(batch=Batch(size=8, micro=4)), {"workers": 3}),
    "sharded-rows-need-elementwise-wire": (Plan(layout=Layout(shard=2), wire=PowerSGD()), {}),
    "gossip-sends-plain-weights": (Plan(sync=Gossip(), wire=Cast(dtype="bf16")), {}),
    "adasum-is-not-coded": (Plan(sync=AllReduce(op="adasum"), wire=Int8()), {}),
    "adasum-needs-whole-replicas": (Plan(sync=AllReduce(op="adasum"), layout=Layout(context=2)), {}),
    "reference-travels-whole": (Plan(compute=Compute(precision="fp64"), wire=Cast(dtype="bf16")), {}),
    "streaming-needs-fixed-replicas": (Plan(layout=Layout(replicas=(1, 2)), compute=Compute(offload="all")), {}),
    "streaming-keeps-nothing-gathered": (Plan(layout=Layout(shard=2, zero=1), compute=Compute(offload="all")), {}),
    "streaming-needs-whole-layers": (Plan(layout=Layout(tensor=2), compute=Compute(offload="all")), {}),
    "parameter-server-needs-whole-replicas": (Plan(layout=Layout(shard=2), sync=ParameterServer()), {}),
    "async-replicas-have-no-common-weights": (Plan(sync=ParameterServer(staleness=3), guard=Guard(check_every=5)), {}),
    "staleness-bound-leaves-work-for-all": (Plan(layout=Layout(replicas=4), sync=ParameterServer(staleness=2)), {}),
    "backup-workers-need-fixed-replicas": (Plan(layout=Layout(replicas=(2, 4)), sync=ParameterServer(drop=1)), {}),
    "not-all-are-backup-workers": (Plan(sync=ParameterServer(drop=2)), {"workers": 2}),
    "parameter-server-sums-plain-gradients": (Plan(sync=ParameterServer(), wire=Int8()), {}),
    "parameter-server-holds-optimizer-state": (Plan(sync=ParameterServer(), compute=Compute(offload="optimizer")), {}),
    "parameter-server-rounds-no-state": (Plan(sync=ParameterServer(), compute=Compute(state="bf16")), {}),
    "parameter-server-does-not-roll-back": (Plan(sync=ParameterServer(), guard=Guard(snapshot_every=2)), {}),
    "compiled-backward-is-one-call": (
        Plan(layout=Layout(stages=2, schedule="zero-bubble"), compute=Compute(compile=True)),
        {},
    ),
    "fragments-need-fixed-replicas": (
        Plan(sync=LocalSGD(every=4, fragments=2), layout=Layout(replicas=(1, 2))),
        {},
    ),
    "fragments-need-whole-layers": (Plan(sync=LocalSGD(every=4, overlap=1), layout=Layout(tensor=2)), {}),
    "replicas-roll-back-together": (Plan(sync=LocalSGD(every=4), guard=Guard(on_spike="rollback")), {}),
    "streaming-needs-synchronous-steps": (Plan(sync=LocalSGD(every=4), compute=Compute(offload="all")), {}),
    "stages-stay-on-the-device": (Plan(layout=Layout(stages=2), compute=Compute(offload="all")), {}),
}


def test_every_rule_has_a_plan_that_breaks_it_alone() -> None:
    assert set(BREAKS) == {rule.name for rule in RULES}
    for name, (plan, facts) in BREAKS.items():
        assert [broken.rule for broken in plan.check(**facts)] == [name]


def test_a_sound_plan_breaks_nothing() -> None:
    plan = Plan(layout=Layout(replicas=3), batch=Batch(size=10), wire=Cast(dtype="bf16"))
    assert plan.check(workers=3) == ()
    plan.require(workers=3)


def test_rules_about_what_is_not_given_hold() -> None:
    assert Plan(layout=Layout(replicas=64), batch=Batch(size=2)).check() == ()


def test_the_layout_rule_says_both_numbers_and_both_remedies() -> None:
    with pytest.raises(PlanError) as caught:
        Plan(layout=Layout(replicas=4)).require(workers=6)
    assert str(caught.value) == (
        "Layout needs 4 workers (4 replicas) but the job has 6. Use workers=4, or Layout(replicas=6)."
    )


@pytest.mark.parametrize(
    ("layout", "workers", "says", "fix"),
    [
        (Layout(replicas=2, shard=4), 6, "needs 8 workers (2 replicas x shard 4)", "Layout(replicas=2, shard=3)"),
        (Layout(shard=4), 7, "needs 4 workers (1 replica x shard 4)", "Use workers=4, or Layout(replicas=7)"),
        (
            Layout(tensor=4),
            6,
            "needs 4 workers (1 replica x tensor 4)",
            "Use workers=4, or Layout(replicas=2, tensor=3)",
        ),
        (
            Layout(shard=2, tensor=2),
            6,
            "needs 4 workers (1 replica x shard 2 x tensor 2)",
            "Use workers=4, or other sizes whose product is 6",
        ),
        (
            Layout(stages=4),
            6,
            "needs 4 workers (1 replica x stages 4)",
            "Use workers=4, or Layout(replicas=2, stages=3)",
        ),
        (Layout(shard=2), 5, "needs 4 workers (2 replicas x shard 2)", "Use workers=4, or Layout(replicas=5)"),
        (Layout(shard=4), 2, "needs 4 workers (1 replica x shard 4)", "Use workers=4, or Layout(replicas=1, shard=2)"),
    ],
)
def test_a_sharded_layout_says_what_would_fit(layout: Layout, workers: int, says: str, fix: str) -> None:
    plan = Plan(layout=layout).resolve(workers)
    with pytest.raises(PlanError) as caught:
        plan.require(workers=workers)
    assert says in str(caught.value) and fix in str(caught.value)
    assert Plan(layout=layout).resolve(8).check(workers=8) == ()


def test_all_broken_rules_are_told_at_once() -> None:
    plan = Plan(
        layout=Layout(replicas=2),
        batch=Batch(size=4, micro=8),
        compute=Compute(precision="fp64"),
        wire=Cast(dtype="fp16"),
    )
    with pytest.raises(PlanError) as caught:
        plan.require(workers=3)
    message = str(caught.value)
    assert message.startswith("The plan breaks 3 rules:\n  - Layout needs 2 workers")
    assert "micro-batches larger than the whole batch" in message
    assert "wire=Cast(dtype='fp16') rounds or leaves out" in message


@given(st.integers(1, 200), st.none() | st.integers(1, 200), st.integers(1, 100))
def test_the_fix_for_idle_workers_works(size: int, micro: int | None, workers: int) -> None:
    plan = Plan(batch=Batch(size=size, micro=micro))
    broken = [rule for rule in plan.check(workers=workers) if rule.rule == "work-for-every-worker"]
    if not broken:
        return
    (rule,) = broken
    fixes = {name: int(value) for name, value in re.findall(r"(micro|size|workers)=(\d+)", rule.fix)}
    assert not plan.check(workers=fixes["workers"])
    fixed = Batch(size=fixes.get("size", size), micro=fixes["micro"])
    assert not Plan(batch=fixed).check(workers=workers)
    if "size" not in fixes:  # the largest micro-batch that serves everyone is proposed
        assert Plan(batch=Batch(size=size, micro=fixes["micro"] + 1)).check(workers=workers)


def test_workers_that_run_the_same_micro_batches_count_as_one() -> None:
    plan = Plan(layout=Layout(tensor=4), batch=Batch(size=8, micro=4))
    assert plan.check(workers=8) == ()
    (broken,) = plan.check(workers=16)
    assert "has 4 groups of 4 workers (tensor): 2 of them" in broken.says
    assert broken.fix == "Use micro=2, or workers=8 or fewer."
