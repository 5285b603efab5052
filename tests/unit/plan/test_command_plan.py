"""The plan of command, job file and script: all text is read once, and the plan travels to the workers as data."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from paceline import config, settings
from paceline.errors import PlanError
from paceline.plan import Batch, Cast, CommandPlan, Layout, LocalSGD, Nesterov, Plan, PowerSGD, Raw, TopK, read_plan
from paceline.plan.command_plan import auto_base, names_in_plan

OVERRIDES = ("plan.batch.size=64", "plan.wire=cast(dtype=bf16)", "plan.layout.replicas=2-4")
LATE = ("plan.wire.dtype=fp16", "plan.batch.micro=none", "plan.compute.offload_path=/fast/disk 2")
WHOLE = [
    Plan(),
    Plan(layout=Layout(replicas=(2, 8), shard=2, zero=2), wire=Cast(dtype="fp16", feedback=True)),
    Plan(sync=LocalSGD(every=4, outer=Nesterov(lr=0.5)), wire=TopK(ratio=1e-3), batch=Batch(size=7, shuffle=False)),
    Plan.parse("stages=2+schedule=interleaved+stages_per_worker=2+guard(on_spike=rollback,factor=3.5)"),
    Plan.parse("compute(offload=all,offload_path=/a b)+gossip(peers=random)"),
]


@pytest.mark.parametrize(
    "plan", [*(CommandPlan(whole=plan, is_chosen=plan == Plan()) for plan in WHOLE), CommandPlan.of(None, OVERRIDES)]
)
def test_a_plan_travels_as_json(plan: CommandPlan) -> None:
    assert CommandPlan.from_table(json.loads(json.dumps(plan.to_table()))) == plan


def test_settings_of_the_script_s_plan_travel_as_json() -> None:
    plan = CommandPlan(settings=settings.settings_of(Plan(), LATE))
    assert [setting.value for setting in plan.settings] == ["fp16", None, "/fast/disk 2"]
    assert CommandPlan.from_table(json.loads(json.dumps(plan.to_table()))) == plan
    assert plan.settings_text == ", ".join(LATE)


def test_a_worker_reads_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_text(*_: Any, **__: Any) -> None:
        raise AssertionError("text was read in a worker")

    whole = CommandPlan.of(Plan.parse("replicas=2+cast(dtype=bf16)"), ["plan.batch.size=64", "plan.wire.dtype=fp16"])
    late = CommandPlan.of(None, ["plan.wire.dtype=fp16", "plan.sync=localsgd(every=2)"])
    texts = [json.dumps(plan.to_table()) for plan in (whole, late)]
    for name in ("read_short", "parse_value"):
        monkeypatch.setattr(config, name, no_text)
    monkeypatch.setattr(Plan, "parse", no_text)
    own, left = (CommandPlan.from_table(json.loads(text)) for text in texts)
    assert own.over(Plan(batch=Batch(size=8))) == Plan(
        layout=Layout(replicas=2), wire=Cast(dtype="fp16"), batch=Batch(size=64)
    )
    script = Plan(wire=Cast(dtype="bf16"), batch=Batch(size=8))
    assert left.over(script) == dataclasses.replace(script, wire=Cast(dtype="fp16"), sync=LocalSGD(every=2))


def test_the_command_s_whole_plan_wins_over_the_script_s() -> None:
    script = Plan(batch=Batch(size=8))
    assert CommandPlan().over(script) == script
    assert CommandPlan().over(None) == Plan()
    assert CommandPlan.of(Plan(wire=PowerSGD()), ["plan.wire.rank=2"]).over(script) == Plan(wire=PowerSGD(rank=2))


def test_a_setting_that_the_script_s_plan_does_not_have_is_refused_where_it_is_set() -> None:
    left = CommandPlan.of(None, ["plan.wire.dtype=fp16"])
    with pytest.raises(
        PlanError, match=r"plan\.wire is Raw, which has no field 'dtype'; Cast has: use plan\.wire=cast"
    ):
        left.over(Plan(wire=Raw()))
    outer = CommandPlan.of(None, ["plan.sync.outer.lr=0.5"])
    assert outer.over(Plan(sync=LocalSGD(every=2, outer=Nesterov()))).sync == LocalSGD(every=2, outer=Nesterov(lr=0.5))
    with pytest.raises(
        PlanError, match=r"plan\.sync\.outer is None, which has no fields: write plan\.sync\.outer=value"
    ):
        outer.over(Plan(sync=LocalSGD(every=2)))


def test_a_field_means_the_same_in_every_kind_of_a_part() -> None:
    """A setting is read before it is known which kind of a part the script's plan has."""
    for annotation in config.annotations_of(Plan).values():
        known: dict[str, Any] = {}
        for kind in config.choices(annotation).values():
            for name, own in config.annotations_of(kind).items():
                assert known.setdefault(name, own) == own, f"{kind.__name__}.{name}"


def test_hosts_see_in_the_text_of_a_plan_whether_theirs_is_another() -> None:
    assert str(CommandPlan()) == "(the script's)"
    assert str(CommandPlan.of(None, ["plan.batch.size=64"])) == "(the script's), with plan.batch.size=64"
    assert str(CommandPlan.of(Plan(), ["plan.batch.size=64"])) == "batch(size=64)"


def test_a_plan_may_be_given_as_itself_as_text_or_as_a_table() -> None:
    plan = Plan(wire=Cast(dtype="bf16"), batch=Batch(size=64))
    for value in (plan, "cast(dtype=bf16)+batch(size=64)", {"wire": "cast(dtype=bf16)", "batch": {"size": 64}}):
        assert read_plan(value) == plan
    with pytest.raises(PlanError, match="plan is 3; it must be a table, or one line of text"):
        read_plan(3)


@pytest.mark.parametrize(
    ("value", "base"),
    [
        ("auto", Plan()),
        (" auto ", Plan()),
        ("auto+batch(size=64)", Plan(batch=Batch(size=64))),
        ("allreduce(algorithm=auto)", None),
        ("replicas=2", None),
        (Plan(), None),
        (None, None),
    ],
)
def test_what_is_beneath_auto(value: object, base: Plan | None) -> None:
    assert auto_base(value) == base
    if base is not None:
        assert read_plan(value) == base


def test_auto_is_the_first_term_only() -> None:
    with pytest.raises(PlanError):
        read_plan("batch(size=64)+auto")
    with pytest.raises(PlanError):
        read_plan("auto+batch(size=0)")


def test_a_chosen_plan_replaces_the_scripts_without_a_remark() -> None:
    script, chosen = Plan(batch=Batch(size=64)), Plan(layout=Layout(shard=2), batch=Batch(size=64))
    assert "layout is" in CommandPlan(whole=chosen).replaced(script)
    assert CommandPlan(whole=chosen, is_chosen=True).replaced(script) == ""


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("default", ()),
        ("batch(size=32, shuffle=true)", ("batch.size", "batch.shuffle")),
        (
            "replicas=2 + shard=2+localsgd(every=4,outer=nesterov(lr=0.7))",
            ("layout.replicas", "layout.shard", "sync.every", "sync.outer"),
        ),
        ("batch=batch(size=8)+allreduce", ("batch.size",)),
        ("auto+batch(size=32)", ("batch.size",)),
        ("auto", ()),
        ({"batch": {"size": 32}, "wire": "cast(dtype=bf16)"}, ("batch.size", "wire.dtype")),
        (Plan(batch=Batch(size=32)), None),
    ],
)
def test_what_was_written_of_a_plan_is_known_defaults_too(value: Any, names: tuple[str, ...] | None) -> None:
    assert names_in_plan(value) == names


def test_a_written_default_is_given_and_travels_to_other_hosts() -> None:
    text = "batch(size=32,micro=4)"
    plan = CommandPlan.of(
        Plan.parse(text), ["plan.batch.seed=0", "plan.guard.on_out_of_memory=stop"], given=Plan.names_in(text)
    )
    assert CommandPlan.from_table(json.loads(json.dumps(plan.to_table()))) == plan
    assert [plan.gives("batch", name) for name in ("size", "micro", "seed", "shuffle")] == [True, True, True, False]
    assert set(plan.given_defaults) >= {"plan.batch.size=32", "plan.batch.seed=0"}
    assert "plan.batch.micro=4" not in plan.given_defaults  # which the plan's text has
    again = CommandPlan.of(Plan.parse(str(plan.whole)), plan.given_defaults, given=Plan.names_in(str(plan.whole)))
    assert again.whole == plan.whole and set(again.given or ()) == set(plan.given or ())


def test_of_a_plan_made_in_python_what_is_no_default_is_given() -> None:
    plan = CommandPlan(whole=Plan(batch=Batch(size=32, micro=4)))
    assert not plan.gives("batch", "size") and plan.gives("batch", "micro")
    assert not CommandPlan().gives("batch", "size") and plan.given_defaults == ()
