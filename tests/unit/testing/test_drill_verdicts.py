"""By what a run under faults is judged: a broken promise is named, and what was kept is not complained of."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from drill_reports import CLEAN, KILL, committed, told
from paceline.cli.drill.report import DrillVerdict, drill_text, promise
from paceline.cli.drill.run import waits_for_servers
from paceline.events import Note, Record, Restarted, WeightsDiffer
from paceline.plan import Layout, OneBit, ParameterServer, Plan, Sparse
from paceline.testing import (
    Came,
    Fault,
    Programme,
    Report,
    Start,
    assert_unharmed,
)
from paceline.testing.report import recovery_s, resumed_from


def differ(worker: int, *, source: int | None) -> WeightsDiffer:
    about: dict[str, Any] = {"step": 2, "since_step": 1, "first": "model.weight", "num_alike": 2}
    return WeightsDiffer(workers=[worker], who=[f"worker {worker}"], source=source, **about)


NAN = float("nan")


AGAIN = (
    Start(exit_code=-9, output="", resumable_step=0),
    Start(exit_code=0, output="", resumable_step=2),
)


@pytest.mark.parametrize(
    ("report", "says"),
    [
        (told(KILL, came=(None,)), "did not come: nothing is proved"),
        (told(KILL, losses={1: 1.0, 2: 0.9, 3: 0.8}), "steps are missing: 4"),
        (told(KILL, losses={1: 1.0, 2: 0.9, 3: 0.8, 4: 0.7, 5: 0.6}), "steps are too many: 5"),
        (told(KILL, losses={1: 1.0, 2: 0.9, 3: 0.8001, 4: 0.7}), r"differs by 1.2e-04 .* at step 3"),
        (told(KILL, losses={1: 1.0, 2: 0.9, 3: float("nan"), 4: 0.7}), r"differs by inf"),
        (told(KILL, audit=dataclasses.replace(CLEAN, problems=("two of them",))), "audit is not clean: two of them"),
        (told(KILL, starts=(Start(exit_code=1, output="a\nbad\n", resumable_step=0),)), "ended with exit code 1: bad"),
        (
            told(KILL, starts=(Start(exit_code=-9, output="", resumable_step=0, is_late=True),)),
            "did not come to its end in time",
        ),
        (told(KILL, starts=AGAIN, committed=(3, 4), resumed_from=(0, 2)), "1 committed steps were lost"),
        (told(KILL, starts=AGAIN, committed=(3, 4), resumed_from=(0, 2)), "had to be started 2 times"),
        (told("full_disk:step=2"), "did not fail, though the disk was full"),
        (told("flip:worker=1,step=2"), r"no worker named worker 1 and healed it. .* Guard\(check_every=1\)"),
        (told("flip:worker=1,step=2", differing=(differ(0, source=2),)), "no worker named worker 1"),
        (told("flip:worker=1,step=2", differing=(differ(1, source=None),)), "no worker named worker 1"),
        (told("nan:worker=1,step=2"), r"step 2 was taken all the same. .* Guard\(on_spike='skip'\)"),
        (
            told("nan:worker=1,step=2", left_out=frozenset({2}), losses={1: 1.0, 2: NAN, 3: NAN, 4: 0.7}),
            "not finite any more: 3",
        ),
        (
            told("nan:worker=1,step=2", left_out=frozenset({2}), losses={1: 1.1, 2: NAN, 3: 0.8, 4: 0.7}),
            "differs by 9.1e-02 .* at step 1",
        ),
        (
            told("torn_checkpoint:step=2", starts=AGAIN, committed=(3, 4), resumed_from=(0, 1), passed_over=("x",)),
            "went on from step 1; the newest whole checkpoint is of 2",
        ),
        (
            told("torn_checkpoint:step=2", starts=AGAIN, committed=(3, 4), resumed_from=(0, 2)),
            "did not name the checkpoints that it passed over",
        ),
    ],
)
def test_a_promise_that_was_not_kept_is_told(report: Report, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        assert_unharmed(report, told())


def test_where_replicas_do_not_wait_no_losses_are_compared_and_nothing_else_is_forgiven() -> None:
    plan = Plan(layout=Layout(replicas=(1, 3)), sync=ParameterServer(staleness=None))
    assert_unharmed(told(KILL, plan=plan, losses={1: 2.0, 2: 0.1, 3: 0.5}), told())  # who was killed has not told
    assert math.isnan(told(plan=plan).loss_difference(told()))
    for broken, says in (
        (told(plan=plan, losses={1: 1.0, 2: 0.9, 3: 0.8}), "steps are missing: 4"),
        (told(KILL, plan=plan, audit=dataclasses.replace(CLEAN, problems=("two",))), "audit is not clean: two"),
        (told(KILL, plan=plan, starts=AGAIN, committed=(3, 4), resumed_from=(0, 2)), "1 committed steps were lost"),
    ):
        with pytest.raises(AssertionError, match=says):
            assert_unharmed(broken, told())
    assert "its batch is handed out again" in promise(Fault.parse(KILL), plan)


def test_losses_may_differ_more_where_a_replica_is_lost_that_had_still_to_send() -> None:
    elastic, losses = Layout(replicas=(1, 3)), {1: 1.0, 2: 0.9, 3: 0.81, 4: 0.7}  # one of 1.2 %
    assert_unharmed(told(KILL, plan=Plan(layout=elastic, wire=OneBit()), losses=losses), told())
    for other in (
        told(KILL, plan=Plan(layout=elastic, wire=Sparse()), losses=losses),
        told(KILL, plan=Plan(layout=Layout(replicas=3), wire=OneBit()), losses=losses),
        told("slow:worker=1,step=2", plan=Plan(layout=elastic, wire=OneBit()), losses=losses),
        told(KILL, plan=Plan(layout=elastic, wire=OneBit()), losses=losses | {3: 0.9}),
    ):
        with pytest.raises(AssertionError, match="the loss differs by"):
            assert_unharmed(other, told())
    said = promise(Fault.parse(KILL), Plan(layout=elastic, wire=OneBit()))
    assert "no step is lost" in said and said.endswith(
        "; the loss is within 5%, as the wire rounds, and what it had to send is lost"
    )


LOCAL_PLAN, FIXED_LOCAL = Plan.parse("replicas=1-3+localsgd(every=2)"), Plan.parse("replicas=3+localsgd(every=2)")


GOSSIP, ADASUM = Plan.parse("replicas=1-3+gossip"), Plan.parse("replicas=1-3+allreduce(op=adasum)")


DROP = Plan.parse("replicas=3+parameterserver(drop=1)")


LATER = "kill:worker=1,step=3,where=sum"


@pytest.mark.parametrize("plan", [LOCAL_PLAN, GOSSIP, ADASUM], ids=["local", "gossip", "adasum"])
def test_where_a_loss_makes_another_curve_its_mean_is_held_and_the_steps_before_to_rounding(plan: Plan) -> None:
    other = {1: 1.0, 2: 0.9, 3: 0.9, 4: 0.85}  # the mean of the last two is 0.125 more; that of all is 0.85
    kept = told(LATER, plan=plan, losses=other)
    assert_unharmed(kept, told())
    assert kept.is_other_from == 3 and kept.loss_difference(told()) == pytest.approx(0.125 / 0.85)
    assert "the curve is another one from there on, and its mean is near, to 25% of the mean loss" in promise(
        Fault.parse(LATER), plan
    )
    for broken, says in (
        (
            told(LATER, plan=plan, losses=other | {3: 1.5, 4: 1.5}),
            "mean of the losses from step 3 on differs by 8.8e-01",
        ),
        (told(LATER, plan=plan, losses=other | {4: NAN}), "mean of the losses from step 3 on differs by inf"),
        (
            told(LATER, plan=plan, losses=other | {1: 1.001}),
            r"the loss differs by 1.0e-03 \(tolerance 1e-05\), first at step 1: 1.001, and",
        ),
        (told("slow:worker=1,step=3", plan=plan, losses=other), "the loss differs by"),
        (told(LATER, plan=plan, losses={1: 1.0, 2: 0.9, 3: 0.9}), "steps are missing: 4"),
    ):
        with pytest.raises(AssertionError, match=says):
            assert_unharmed(broken, told())
    with pytest.raises(AssertionError, match=r"mean of the losses .* \(tolerance 1e-02\)"):
        assert_unharmed(kept, told(), tolerance=0.01)


def test_who_takes_steps_by_itself_may_be_ahead_of_the_others_when_it_is_lost() -> None:
    ahead = told("kill:worker=1,step=4,where=sum", plan=LOCAL_PLAN, losses={1: 1.0, 2: 0.9, 3: 0.85, 4: 0.7})
    assert ahead.is_other_from == 3, "the round ends at the newest step of the replicas that are left"
    assert_unharmed(ahead, told())


def test_a_checkpoint_has_one_replicas_optimizer_state_where_replicas_take_steps_by_themselves() -> None:
    again: dict[str, Any] = {"starts": AGAIN, "committed": (3, 4), "resumed_from": (0, 2)}
    losses = {1: 1.0, 2: 0.9, 3: 0.85, 4: 0.7}
    assert_unharmed(told(KILL, plan=FIXED_LOCAL, losses=losses, **again), told())
    torn = told("torn_checkpoint:step=2", plan=LOCAL_PLAN, losses=losses, passed_over=("x",), **again)
    assert_unharmed(torn, told())
    assert all("another one" in promise(fault, FIXED_LOCAL) for fault in (Fault.parse(KILL), *torn.programme))
    for plan in (Plan(layout=Layout(replicas=3)), Plan.parse("replicas=3+allreduce(op=adasum)")):
        with pytest.raises(AssertionError, match=r"the loss differs by 5.9e-02"):
            assert_unharmed(told(KILL, plan=plan, losses=losses, **again), told())
        assert "another one" not in promise(Fault.parse(KILL), plan)


def test_a_cut_may_take_a_server_that_has_no_mirror() -> None:
    again: dict[str, Any] = {"starts": AGAIN, "committed": (3, 4), "resumed_from": (0, 2)}
    cut = "cut:worker=1,step=2,where=sum"
    bare, mirrored = (Plan.parse(f"replicas=1-3+parameterserver{end}") for end in ("", "(mirrored=true)"))
    assert_unharmed(told(cut, plan=bare, **again), told())
    for programme, plan in ((cut, mirrored), (cut, Plan(layout=Layout(replicas=(1, 3)))), (KILL, bare)):
        with pytest.raises(AssertionError, match="1 committed steps were lost"):
            assert_unharmed(told(programme, plan=plan, **again), told())
    assert "begin again from the newest checkpoint" in promise(Fault.parse(cut), bare)
    assert "goes on after the job's timeout_s" in promise(Fault.parse(cut), mirrored)
    assert waits_for_servers(Programme.parse(cut), bare) and not waits_for_servers(Programme.parse(KILL), bare)


def test_a_poisoned_share_that_came_too_late_did_not_count() -> None:
    late = told("nan:worker=1,step=2", plan=DROP, late=frozenset({(1, 2)}))
    assert_unharmed(late, told())
    for other in (DROP, Plan()):
        with pytest.raises(AssertionError, match="step 2 was taken all the same"):
            assert_unharmed(told("nan:worker=1,step=2", plan=other, late=frozenset({(0, 2), (1, 3)})), told())
    assert "unless its share came too late" in promise(Fault.parse("nan:worker=1,step=2"), DROP)
    assert "the replica alone leaves out its step" in promise(Fault.parse("nan:worker=1,step=2"), GOSSIP)


def test_all_may_leave_by_a_notice_that_comes_while_others_are_replaced() -> None:
    left = {
        "starts": (Start(exit_code=75, output="", resumable_step=0), Start(exit_code=0, output="", resumable_step=3)),
        "resumed_from": (0, 3),
        "committed": (3, 4),
    }
    assert_unharmed(told(f"{KILL}; term:worker=2,step=3", **left), told())
    for programme in ("term:worker=2,step=3", f"{KILL}; stop:worker=2,step=3"):
        with pytest.raises(AssertionError, match="had to be started 2 times"):
            assert_unharmed(told(programme, **left), told())


def test_what_was_kept_is_not_complained_of() -> None:
    assert_unharmed(told(), told())
    assert_unharmed(told(KILL), told())
    torn = told("torn_checkpoint:step=2", starts=AGAIN, committed=(3, 4), resumed_from=(0, 2), passed_over=("step_3",))
    assert torn.steps_lost == 1
    assert_unharmed(torn, told())
    assert_unharmed(told("flip:worker=1,step=2", differing=(differ(1, source=0),)), told())
    poisoned = told("nan:worker=1,step=2", left_out=frozenset({2}), losses={1: 1.0, 2: NAN, 3: 0.85, 4: 0.72})
    assert poisoned.loss_difference(told()) == 0.0, "later steps are others, because one was left out"
    assert_unharmed(poisoned, told())
    fixed = dataclasses.replace(torn, programme=Programme.parse(KILL), plan=Plan(layout=Layout(replicas=3)))
    assert_unharmed(fixed, told())


def test_the_table_has_a_line_for_each_fault_and_says_what_did_not_hold() -> None:
    good, bad = told(KILL, recovery_s=(0.25,)), told("term:worker=2,step=3,where=sum", came=(None,))
    rows = [DrillVerdict(report=one, like=told(), broken=tuple(one.broken(told()))) for one in (good, bad)]
    text = drill_text(rows, like=told())
    assert "kill:worker=1,step=2,where=sum  step 2, sum  0           0                 0 " in text
    assert "0.25        holds" in text and "BROKEN" in text
    assert "1 of 2 runs did not keep what is promised" in text
    assert "kill: the others take the same step again without it" in text
    assert drill_text(rows[:1], like=told()).endswith("all promises held")


def test_recovery_is_until_the_step_in_hand_is_committed() -> None:
    kill, came = Fault.parse(KILL), Came(step=5, place="sum", time=10.0, pid=1)
    late = committed(4, 10.1)  # told later than it was done
    assert recovery_s(kill, came, [[committed(3, 9.0), late, committed(5, 10.5)]]) == pytest.approx(0.5)
    assert recovery_s(kill, came, [[committed(3, 9.0), late]]) is None
    restarted = [[committed(3, 9.0), committed(5, 10.01)], [committed(4, 12.0)]]
    assert recovery_s(kill, came, restarted) == pytest.approx(2.0)
    all_done = Record(20.0, None, Note(text="nothing is left"))
    assert recovery_s(kill, came, [[committed(3, 9.0), committed(5, 10.2)], [all_done]]) == pytest.approx(0.2)
    assert recovery_s(Fault.parse("slow:worker=0,step=1"), came, restarted) is None


def test_an_attempt_that_nobody_has_begun_was_to_begin_where_it_was_told() -> None:
    about: dict[str, Any] = {"causes": ["host far was lost"], "lost": [2], "workers": 4, "source": "memory"}
    again = Record(1.0, None, Restarted(at_step=26, step=26, lost_at=0.5, **about))
    assert resumed_from([again]) == 26 and resumed_from([]) == 0
