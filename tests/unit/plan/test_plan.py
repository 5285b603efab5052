"""A plan reads back from its text and its Python, and refuses by name what is not built."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import pickle
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import config
from paceline.errors import PlanError
from paceline.plan import (
    AllReduce,
    Batch,
    Cast,
    Compute,
    Guard,
    Int8,
    Layout,
    LocalSGD,
    Nesterov,
    OneBit,
    ParameterServer,
    Plan,
    PowerSGD,
    Raw,
    Sparse,
    TopK,
    part,
)

counts = st.integers(min_value=1, max_value=10**9)
plans = st.builds(
    Plan,
    layout=st.builds(Layout, replicas=st.none() | counts | st.tuples(counts, counts).map(sorted).map(tuple))
    | st.builds(Layout, replicas=st.none() | counts, shard=st.integers(2, 64), zero=st.sampled_from([1, 2, 3])),
    sync=st.builds(
        AllReduce,
        algorithm=st.sampled_from(["auto", "ring", "tree", "halving", "hierarchical"]),
        bucket_bytes=counts,
    )
    | st.builds(ParameterServer, servers=counts, staleness=st.none() | st.integers(0, 100), bucket_bytes=counts)
    | st.builds(ParameterServer, servers=counts, drop=st.integers(0, 100))
    | st.builds(ParameterServer, servers=counts, mirrored=st.booleans())
    | st.builds(
        LocalSGD,
        every=counts,
        outer=st.none()
        | st.builds(
            Nesterov, lr=st.floats(min_value=1e-6, max_value=2.0), momentum=st.floats(0.0, 1.0, exclude_max=True)
        ),
    ),
    wire=st.sampled_from([Raw(), OneBit(), Sparse(), Int8(), Int8(feedback=False)])
    | st.builds(Cast, dtype=st.sampled_from(["bf16", "fp16"]), feedback=st.booleans())
    | st.builds(TopK, ratio=st.floats(min_value=1e-6, max_value=1.0))
    | st.builds(PowerSGD, rank=st.integers(1, 512)),
    batch=st.builds(
        Batch,
        size=counts,
        micro=st.none() | counts,
        shuffle=st.booleans(),
        drop_last=st.booleans(),
        seed=st.integers(min_value=0, max_value=2**63 - 1),
    ),
    compute=st.builds(
        Compute,
        precision=st.sampled_from(["fp32", "bf16", "fp64"]),
        recompute=st.sampled_from(["none", "blocks"]),
        compile=st.booleans(),
    )
    | st.builds(Compute, precision=st.just("fp16"), loss_scale=st.floats(min_value=1, max_value=2.0**64))
    | st.builds(
        Compute,
        precision=st.just("fp16"),
        loss_scale_start=st.floats(min_value=1, max_value=2.0**64),
        loss_scale_window=counts,
        loss_scale_hysteresis=counts,
    ),
    guard=st.builds(Guard, check_every=st.integers(0, 10**6))
    | st.builds(
        Guard,
        on_spike=st.just("rollback"),
        factor=st.floats(0, 1e6, exclude_min=True),
        window=st.integers(8, 10**6),
        snapshot_every=counts,
    ),
)


@given(plans)
def test_the_text_reads_back_and_is_a_safe_file_name(plan: Plan) -> None:
    text = str(plan)
    assert Plan.parse(text) == plan
    assert re.fullmatch(r"[A-Za-z0-9.,_=()+-]+", text)


@given(plans)
def test_the_repr_is_python_that_makes_the_plan(plan: Plan) -> None:
    assert eval(repr(plan)) == plan


@given(plans)
def test_the_data_of_a_plan_reads_back(plan: Plan) -> None:
    assert config.read(Plan, json.loads(json.dumps(config.to_table(plan)))) == plan


@given(plans)
def test_copies_and_pickles_are_equal(plan: Plan) -> None:
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert copy.deepcopy(plan) == plan
    assert hash(copy.copy(plan)) == hash(plan)


def test_text_and_repr_leave_defaults_out() -> None:
    plan = Plan(
        layout=Layout(replicas=4),
        wire=Cast(dtype="bf16"),
        batch=Batch(size=512, micro=8),
        compute=Compute(precision="bf16"),
    )
    assert str(plan) == "replicas=4+cast(dtype=bf16)+batch(size=512,micro=8)+compute(precision=bf16)"
    assert repr(Plan(wire=Cast(dtype="fp16"))) == "Plan(wire=Cast(dtype='fp16'))"
    assert (str(Plan()), repr(Plan())) == ("default", "Plan()")


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("default", Plan()),
        ("allreduce", Plan()),
        ("raw + replicas = 2", Plan(layout=Layout(replicas=2))),
        ("Layout(replicas=2)", Plan(layout=Layout(replicas=2))),
        ("replicas=2-8", Plan(layout=Layout(replicas=(2, 8)))),
        ("shard=4", Plan(layout=Layout(shard=4))),
        ("replicas=2+shard=4+zero=1", Plan(layout=Layout(replicas=2, shard=4, zero=1))),
        ("Cast(dtype=fp16)", Plan(wire=Cast(dtype="fp16"))),
        ("wire=cast(dtype=fp16)", Plan(wire=Cast(dtype="fp16"))),
        ("wire=top_k(ratio=0.01)", Plan(wire=TopK(ratio=0.01))),
        ("power_sgd", Plan(wire=PowerSGD(rank=4))),
        ("all_reduce(bucket_bytes=1024)+replicas=none", Plan(sync=AllReduce(bucket_bytes=1024))),
        ("local_sgd(every=64)", Plan(sync=LocalSGD(every=64))),
        (
            "replicas=2+localsgd(outer=nesterov(lr=0.5,momentum=0.8),every=64)+cast(dtype=bf16)",
            Plan(
                layout=Layout(replicas=2),
                sync=LocalSGD(every=64, outer=Nesterov(lr=0.5, momentum=0.8)),
                wire=Cast(dtype="bf16"),
            ),
        ),
        ("batch(shuffle=false, micro=none)", Plan(batch=Batch(shuffle=False))),
    ],
)
def test_text_may_be_written_in_several_ways(text: str, plan: Plan) -> None:
    assert Plan.parse(text) == plan


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "The plan is empty text"),
        (
            "cats(dtype=bf16)",
            "is none of layout, allreduce, parameterserver, localsgd, gossip, raw, cast, int8, onebit, topk, "
            "powersgd, sparse, batch, compute, guard, nor replicas=n. Did you mean 'cast'?",
        ),
        ("cast", "plan.wire.dtype is missing: Cast needs dtype, which must be 'bf16' or 'fp16'."),
        ("cast(dtype=bf32)", "plan.wire.dtype is 'bf32'; it must be 'bf16' or 'fp16'."),
        ("recompute=blocks", "plan.recompute: Plan has no field 'recompute'. Did you mean 'plan.compute.recompute'?"),
        ("batch(siz=4)", "plan.batch.siz: Batch has no field 'siz'. Did you mean 'size'?"),
        ("batch(size=0)", "Batch.size is 0; it must be at least 1 sample."),
        ("batch(size=many)", "plan.batch.size is 'many'; it must be a whole number."),
        ("batch(seed=-1)", "Batch.seed is -1; it must be from 0 to 2**63 - 1."),
        ("allreduce(algorithm=rings)", "plan.sync.algorithm is 'rings'; it must be 'auto', 'ring', 'tree'"),
        ("allreduce(bucket_bytes=0)", "AllReduce.bucket_bytes is 0; it must be at least 1"),
        ("localsgd", "plan.sync.every is missing: LocalSGD needs every"),
        ("localsgd(every=0)", "LocalSGD.every is 0; it must be at least 1"),
        ("localsgd(every=2,fragments=3)", "LocalSGD.fragments is 3; it must be from 1 to every=2"),
        ("localsgd(every=2,overlap=2)", "LocalSGD.overlap is 2; it must be from 0 to below every=2"),
        ("localsgd(every=2,mixing=1)", "LocalSGD.mixing is 1.0; it must be from 0"),
        ("localsgd(every=2,keep_moves=true)", "LocalSGD.keep_moves=True with overlap=0 and mixing=0.0: what a replica"),
        ("localsgd(every=2,outer=adam)", "plan.sync.outer is 'adam'; it must be Nesterov or none."),
        ("localsgd(every=2,outer=nesterov(lr=0))", "Nesterov.lr is 0.0; it must be more than 0"),
        ("localsgd(every=2,outer=nesterov(momentum=1))", "Nesterov.momentum is 1.0; it must be from 0 to below 1"),
        ("localsgd(every=2,outer=nesterov(lrs=1))", "plan.sync.outer.lrs: Nesterov has no field 'lrs'."),
        ("localsgd(every=2,outer=nesterov(lr=1)", "written as name(field=value,...)"),
        ("replicas=0", "Layout.replicas is 0; it must be at least 1"),
        ("replicas=8-2", "a pair is (least, most), such as (2, 8)"),
        ("replicas=2-x", "'x'; it must be a whole number"),
        ("micro=8", "Did you mean 'plan.batch.micro'?"),
        ("replica=8", "Did you mean 'plan.layout.replicas'?"),
        ("replicas=2+replicas=3", "gives replicas twice"),
        ("cast(dtype=bf16)+raw", "gives wire twice"),
        ("replicas=2+layout(replicas=2)", "gives layout twice"),
        ("replicas=2+", "has a term ''"),
    ],
)
def test_a_mistake_in_the_text_is_named(text: str, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.parse(text)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"stages": 0}, "Layout.stages is 0; it must be at least 1"),
        ({"schedule": "gpipe"}, "stages=1 makes no pipeline: use Layout(stages=n"),
        ({"stages": 2, "stages_per_worker": 2}, "schedule='1f1b' has one stage on each worker: use schedule='interlea"),
        ({"stages": 2, "schedule": "dualpipe"}, "'gpipe', '1f1b', 'interleaved'"),
    ],
)
def test_stages_that_cannot_be_are_refused_with_the_remedy(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        Layout(**fields)
    assert says in str(caught.value)


def test_a_pipelines_text_is_read_back() -> None:
    layout = Layout(replicas=2, stages=4, schedule="interleaved", stages_per_worker=2)
    assert Plan.parse(str(Plan(layout=layout))).layout == layout


def test_fields_and_values_that_are_not_built_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(part.NOT_BUILT, "Compute.precision=fp4", ("fp4 arithmetic", "precision='bf16'"))
    says = r"^Compute\(precision='?fp4'?\): fp4 arithmetic is not built yet\. Use precision='bf16'"
    fields: dict[str, Any] = {"precision": "fp4"}
    with pytest.raises(PlanError, match=says):
        Compute(**fields)
    with pytest.raises(PlanError, match=says):
        Plan.parse("compute(precision=fp4)")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"fp8_recipe": "rowwise"}, "Compute(precision='fp8', fp8_recipe='rowwise')"),
        ({"precision": "bf16", "fp8_emulate": True}, "precision='bf16' computes nothing in FP8"),
        ({"precision": "fp8", "fp8_recipe": "delayed"}, "'tensorwise', 'rowwise' or 'rowwise_with_gw_hp'"),
    ],
)
def test_options_of_fp8_need_it(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        Compute(**fields)
    assert says in str(caught.value)


def test_a_text_with_fp8_is_read_back() -> None:
    plan = Plan(compute=Compute(precision="fp8", fp8_recipe="rowwise", fp8_skip="head|*.gate", fp8_emulate=True))
    assert Plan.parse(str(plan)) == plan
    assert Plan.parse("compute(precision=fp8,fp8_skip=head|*.gate)").compute.fp8_skip == "head|*.gate"


def test_the_planner_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"plan='auto': .* is not built yet"):
        Plan.parse("auto")


@pytest.mark.parametrize(
    ("python", "says"),
    [
        ("Batch(siz=3)", "Batch.siz: Batch has no field 'siz'. Did you mean 'size'?"),
        ("Batch(64)", "Batch takes its settings by name: write Batch(size=64)."),
        ("Batch(size='64')", "Batch.size is '64'; it must be a whole number."),
        ("Cast()", "Cast.dtype is missing: Cast needs dtype, which must be 'bf16' or 'fp16'."),
        ("Plan(wire='cast')", "Plan.wire is 'cast'; it must be Raw, Cast, Int8, OneBit, TopK, PowerSGD or Sparse."),
        ("Plan(wire=Cast)", "Did you mean Cast(...)?"),
        ("Plan(wires=1)", "Plan.wires: Plan has no field 'wires'. Did you mean 'wire'?"),
        ("Compute(precision='bf17')", "Did you mean 'bf16'?"),
        ("Compute(loss_scale=64)", "precision='fp32' scales no losses: use Compute(precision='fp16', loss_scale=64)"),
        ("Compute(precision='bf16', loss_scale_window=9)", "Compute.loss_scale_window is 9, but precision='bf16'"),
        ("Compute(precision='fp16', loss_scale=0)", "Compute.loss_scale is 0; it must be from 1 to "),
        ("Compute(precision='fp16', loss_scale_start=float('inf'))", "Compute.loss_scale_start is inf; it must be"),
        ("Compute(precision='fp16', loss_scale_window=0)", "Compute.loss_scale_window is 0; it must be at least 1"),
        ("Compute(precision='fp16', loss_scale='static')", "it must be 'dynamic' or a number"),
        ("Compute(precision='fp16', loss_scale=8, loss_scale_start=4.0)", "loss_scale=8 stays as it is: use"),
    ],
)
def test_a_mistake_in_python_is_named(python: str, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        eval(python)
    assert says in str(caught.value)


def test_an_unknown_name_in_the_module_is_an_ordinary_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NoSuchThing"):
        importlib.import_module("paceline.plan").NoSuchThing  # noqa: B018  # the look-up is what raises


def test_a_loss_scale_is_short_in_a_plans_text() -> None:
    assert str(Plan.parse("compute(precision=fp16,loss_scale=dynamic)")) == "compute(precision=fp16)"
    assert Plan.parse("compute(precision=fp16,loss_scale=1024)").compute == Compute(precision="fp16", loss_scale=1024)


def test_plans_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan().batch.size = 3  # pyright: ignore[reportAttributeAccessIssue]  # that is refused


@pytest.mark.parametrize(
    ("batch", "micro", "num_micro"),
    [
        (Batch(), 4, 8),
        (Batch(size=1), 1, 1),
        (Batch(size=10), 2, 5),
        (Batch(size=64), 8, 8),
        (Batch(size=10, micro=4), 4, 3),
        (Batch(size=10, micro=10), 10, 1),
    ],
)
def test_a_batch_is_cut_into_micro_batches(batch: Batch, micro: int, num_micro: int) -> None:
    assert (batch.resolved_micro, batch.num_micro) == (micro, num_micro)


@given(plans, st.integers(min_value=1, max_value=64), st.integers(min_value=1, max_value=64))
def test_resolving_leaves_nothing_open_and_the_micro_batch_ignores_the_workers(plan: Plan, few: int, many: int) -> None:
    resolved = plan.resolve(few)
    assert resolved.layout.replicas == (plan.layout.replicas or max(1, few // plan.layout.workers_each))
    assert resolved.batch == plan.resolve(many).batch
    assert resolved.batch.micro == plan.batch.resolved_micro
    assert resolved.resolve(many) == resolved


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shard": 0}, "Layout.shard is 0; it must be at least 1"),
        ({"zero": 1}, "Layout.zero is 1, but shard=1 splits nothing: use Layout\\(shard=n, zero=1\\)"),
        ({"shard": 2, "zero": 4}, "Layout.zero is 4; it must be 1, 2 or 3"),
    ],
)
def test_a_wrong_shard_is_named(fields: dict[str, int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Layout(**fields)  # type: ignore[arg-type]  # wrong ones on purpose


def test_a_sharded_layout_counts_its_workers_and_reads_back_from_one_line() -> None:
    layout = Layout(replicas=2, shard=4, zero=2)
    assert (layout.workers, layout.workers_each, layout.takes(8), layout.takes(4)) == (8, 4, True, False)
    assert str(Plan(layout=layout)) == "replicas=2+shard=4+zero=2"
    assert Plan.parse(str(Plan(layout=layout))) == Plan(layout=layout)
    assert Plan(layout=Layout(shard=2)).resolve(6).layout == Layout(replicas=3, shard=2)


@pytest.mark.parametrize(
    ("fields", "says"),
    [({"precision": "fp64"}, "keeps everything in fp64"), ({"offload": "all"}, "use one of the two")],
)
def test_state_in_bf16_is_refused_beside_what_keeps_it_otherwise(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Compute(state="bf16", **fields)
    assert Plan.parse("compute(state=bf16)").compute.state == "bf16"
