"""`paceline.testing`: programmes are the same again from a seed, and read back; a report tells what was not kept."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from paceline import settings
from paceline.cli.arguments import Parser
from paceline.cli.drill import run
from paceline.cli.drill.command import add
from paceline.cli.drill.report import ALWAYS, ELASTIC, FIXED, LOCAL, DrillVerdict, drill_text, promise
from paceline.cli.drill.request import DrillRequest, drill_request
from paceline.cli.drill.run import DrillTerms, drill_terms, guard_overrides, programmes_of, waits_for_servers
from paceline.cli.drill.undisturbed import undisturbed
from paceline.errors import LaunchError, PlanError, WorkerError
from paceline.events import Note, Record, Restarted, StepDone, WeightsDiffer
from paceline.monitor.audit.audit import AuditResult
from paceline.plan import Guard, Layout, OneBit, ParameterServer, Plan, Sparse
from paceline.testing import (
    KINDS,
    Came,
    Fault,
    Programme,
    Report,
    Start,
    assert_unharmed,
    injection,
    network_namespaces,
    runs,
)
from paceline.testing.corruption import ModelCalls, flip_a_bit, poisoned
from paceline.testing.disk import complete
from paceline.testing.drill_folder import DrillFolder
from paceline.testing.faults import EXCHANGE, OF_SERVERS
from paceline.testing.report import recovery_s, resumed_from

FROM_SEED_7 = "kill:worker=3,step=19,where=sum; cut:worker=3,step=29,where=sum"
LINES = [
    "kill:worker=2,step=40",
    "kill:worker=0,step=40,where=commit",
    "stop:worker=1,step=10,seconds=1.5",
    "slow:worker=1,step=10,times=2.5,steps=7",
    "full_disk:worker=0,step=3",
    "flip:worker=2,step=4",
    "nan:worker=1,step=1",
    "spike:worker=1,step=6",
]


@pytest.mark.parametrize("line", LINES)
def test_a_fault_reads_back(line: str) -> None:
    assert str(Fault.parse(line)) == line
    assert Fault.parse(str(Fault.parse(line))) == Fault.parse(line)


def test_a_programme_reads_back() -> None:
    programme = Programme.parse(" ;".join(LINES))
    assert len(programme) == len(LINES)
    assert Programme.parse(str(programme)) == programme == Programme.of(list(programme)) == Programme.of(str(programme))


def test_a_fault_of_the_writer_needs_no_worker() -> None:
    assert Fault.parse("torn_checkpoint:step=9") == Fault(kind="torn_checkpoint", worker=0, step=9)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("murder:worker=1,step=2", "no fault 'murder'. Use one of: kill, term"),
        ("kill:worker=1", "say the step too, as in kill:worker=1,step=10"),
        ("kill:step=1", "say the worker too"),
        ("kill:worker=1,step=2,where=here", "no place 'here' in a step. Use any, forward, sum"),
        ("kill:worker=one,step=2", "worker is 'one'; it must be a number"),
        ("kill:worker=1,step=0", "steps from 1"),
        ("kill:worker=1,step=2,rank=3", "a fault has no 'rank'"),
        ("slow:worker=1,step=2,times=1", "times is more than 1"),
        ("full_disk:worker=1,step=2", "worker 0's, which writes the checkpoints"),
        ("flip:worker=1,step=2,where=sum", "where=sum has no meaning for it"),
        ("spike:worker=1,step=5", "at least 6, so that losses are known"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(line: str, says: str) -> None:
    with pytest.raises(PlanError, match=says.replace("(", r"\(")):
        Programme.parse(line)


def test_any_place_follows_from_worker_and_step() -> None:
    places = {Fault(kind="kill", worker=1, step=step).place for step in range(1, 40)}
    assert places == {"forward", "sum", "commit"}
    assert Fault(kind="kill", worker=1, step=7).place == Fault(kind="kill", worker=1, step=7).place


def test_a_random_programme_is_the_same_from_a_seed_and_another_from_another() -> None:
    drawn = [Programme.random(seed, steps=100, workers=4, num=6) for seed in range(20)]
    assert drawn == [Programme.random(seed, steps=100, workers=4, num=6) for seed in range(20)]
    assert len({str(programme) for programme in drawn}) == 20
    # These very ones: another order of draws would make what was reported once impossible to repeat.
    assert str(Programme.random(7, steps=40, workers=4, num=2)) == FROM_SEED_7


def test_a_random_programme_leaves_one_worker_alone_and_fits_the_run() -> None:
    for seed in range(50):
        programme = Programme.random(seed, steps=40, workers=3, num=8)
        lost = {fault.worker for fault in programme if fault.loses_a_worker}
        assert len(lost) < 3
        programme.require(steps=40, workers=3)
        steps = [fault.step for fault in programme]
        assert steps == sorted(steps)
    with pytest.raises(PlanError, match="2 workers for faults that lose one"):
        Programme.random(1, steps=40, workers=1, kinds=["kill"])


def test_one_fault_of_each_kind() -> None:
    assert [fault.kind for fault in Programme.of_each_kind(3, steps=40, workers=4)] == list(KINDS)
    assert [fault.kind for fault in Programme.of_each_kind(3, steps=40, workers=1)] == [
        "slow", "full_disk", "torn_checkpoint", "nan", "spike"
    ]  # fmt: skip
    assert "flip" not in [fault.kind for fault in Programme.of_each_kind(3, steps=40, workers=2)], "no majority"
    served = Programme.of_each_kind(3, steps=40, workers=4, servers=2)
    assert [fault.kind for fault in served] == [*KINDS, *OF_SERVERS]
    served.require(steps=40, workers=4, servers=2)


def test_a_drawn_spike_comes_where_nothing_normalizes_it_before_the_loss() -> None:
    plan = Plan.parse("replicas=1+shard=2+stages=2+tensor=2+batch(size=8,micro=1)")
    request = DrillRequest(script=Path("train.py"), seed=3)
    terms = DrillTerms(is_elastic=False)
    drawn = {one.kind: one for run in programmes_of(request, terms, plan=plan, steps=40, workers=8) for one in run}
    assert drawn["spike"].worker in (2, 3, 6, 7), "the last of two stages"
    for seed in range(10):
        (spike,) = Programme.random(seed, steps=40, workers=8, last_stage=(2, 3, 6, 7), kinds=["spike"])
        assert spike.worker in (2, 3, 6, 7)
        (nan,) = Programme.random(seed, steps=40, workers=8, kinds=["nan"])
        assert nan == Programme.random(seed, steps=40, workers=8, last_stage=(2, 3, 6, 7), kinds=["nan"]).faults[0]


def test_a_fault_beyond_the_run_is_refused() -> None:
    with pytest.raises(PlanError, match="the run has steps 1 to 8 and workers 0 to 1"):
        Programme.parse("kill:worker=2,step=4").require(steps=8, workers=2)
    with pytest.raises(PlanError, match="needs 3 workers, so that a majority"):
        Programme.parse("flip:worker=1,step=4").require(steps=8, workers=2)
    with pytest.raises(PlanError, match="started a parameter server: workers 0 to 1 have"):
        Programme.parse("kill_server:worker=2,step=4").require(steps=8, workers=4, servers=2)
    with pytest.raises(PlanError, match="started a parameter server: the plan has no ParameterServer"):
        Programme.parse("kill_server:worker=0,step=4").require(steps=8, workers=4)


def test_notes_tell_of_a_fault_once_and_of_what_is_asked(tmp_path: Path) -> None:
    notes = DrillFolder.begin(tmp_path, Programme.parse("cut:worker=1,step=4"), outside=["cut"])
    other = DrillFolder(notes.path)
    assert other.programme == notes.programme and other.asks_for("cut") and not other.asks_for("full_disk")
    assert notes.when(0) is None
    assert other.came(0, step=4, place="sum") and not notes.came(0, step=5, place="sum")
    came = notes.when(0)
    assert came is not None and (came.step, came.place) == (4, "sum")
    with pytest.raises(TimeoutError, match="no process did what fault 0 needs"):
        other.ask(0, "cut", limit_s=0.02)
    assert list(notes.asked()) == [(0, "cut")]
    notes.done(0, "cut")
    other.ask(0, "cut", limit_s=5)
    assert list(notes.asked()) == []


def test_every_kind_has_its_promise() -> None:
    assert set(KINDS) == {*ELASTIC, *ALWAYS} == {*FIXED, *ALWAYS} == {*LOCAL, *ALWAYS}
    killed = Fault.parse("kill_server:worker=0,step=4")
    assert "no step is lost" in promise(killed, Plan.parse("parameterserver(mirrored=true)"))
    assert "from the newest checkpoint" in promise(killed, Plan.parse("parameterserver(servers=2)"))
    for kind in KINDS:
        fault = Fault(kind=kind, worker=0, step=6)
        assert promise(fault, Plan(layout=Layout(replicas=(1, 2)))) and promise(fault, Plan())
    assert "wait for it" in promise(Fault.parse("stop:worker=1,step=1,seconds=1"), Plan())
    kill, cut = Fault.parse(KILL), Layout(shard=2)
    assert "ends with an error" in promise(kill, Plan()) + promise(
        kill, Plan(layout=cut, guard=Guard(snapshot_every=0))
    )
    assert "begin again with the newest state in memory" in promise(kill, Plan(layout=cut))


# What a report says.

CLEAN = AuditResult(run_dir="run", num_attempts=1, epochs=(), problems=(), notes=())


def told(programme: str = "", **changes: object) -> Report:
    faults = Programme.parse(programme)
    fields: dict[str, object] = {
        "folder": Path("folder"),
        "run_dir": Path("folder/run"),
        "programme": faults,
        "came": tuple(Came(step=fault.step, place=fault.place, time=1.0, pid=1) for fault in faults),
        "starts": (Start(exit_code=0, output="", resumable_step=0),),
        "resumed_from": (0,),
        "committed": (4,),
        "plan": Plan(layout=Layout(replicas=(1, 3))),
        "workers": 3,
        "losses": {1: 1.0, 2: 0.9, 3: 0.8, 4: 0.7},
        "left_out": frozenset(),
        "late": frozenset(),
        "differing": (),
        "regrouped": (),
        "failed_saves": (),
        "passed_over": (),
        "audit": CLEAN,
        "recovery_s": (None,) * len(faults),
        "notes": (),
    }
    values = fields | changes
    values.setdefault("restarted", (None,) * len(values["resumed_from"]))  # type: ignore[arg-type]  # the values are of many types
    return Report(**values)  # type: ignore[arg-type]  # the values are of many types


def differ(worker: int, *, source: int | None) -> WeightsDiffer:
    about: dict[str, Any] = {"step": 2, "since_step": 1, "first": "model.weight", "num_alike": 2}
    return WeightsDiffer(workers=[worker], who=[f"worker {worker}"], source=source, **about)


NAN = float("nan")
KILL = "kill:worker=1,step=2,where=sum"
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
    assert ahead.is_other_from == 3, "the round ends where the newest of those is who are left"
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


def terms(plan: Plan | str, *words: str, workers: int = 3, steps: int = 40) -> DrillTerms:
    asked = request(__file__, *words)
    whole = Plan.parse(plan) if isinstance(plan, str) else plan
    return drill_terms(asked, whole.resolve(workers), workers=workers, steps=steps)


@pytest.mark.parametrize(
    ("plan", "kept"),
    [
        ("parameterserver(drop=1)", "how many replicas a step may do without is counted from the replicas that began"),
        ("localsgd(every=8,fragments=2)", "at no step do all replicas agree on all weights"),
        ("shard=2+compute(offload=all)", "brings parameters to the device unit by unit"),
    ],
)
def test_where_the_plan_cannot_lose_a_replica_its_number_stays_and_that_is_said(plan: str, kept: str) -> None:
    found = terms(plan, workers=4)
    assert not found.overrides and not found.is_elastic
    assert found.said[0].startswith("replicas stay as they are: ") and kept in found.said[0]
    assert not terms(plan, "--keep-plan", workers=4).kept, "that is what was asked for"


@pytest.mark.parametrize("has_begun", [False, True])
def test_where_the_run_refuses_what_the_rules_allow_the_number_of_replicas_stays_too(
    has_begun: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, ...]] = []

    def fake(faults: Programme, _: Path, *, folder: Path, overrides: tuple[str, ...], **__: Any) -> Report:
        asked.append(overrides)
        said = "it said:\nPlanError: built for the CPU so far, not for cuda.\nsee the logs"
        if overrides and not has_begun:
            raise LaunchError(said)
        folder.mkdir(parents=True)
        if overrides:
            failed = Start(exit_code=1, output=said, resumable_step=0)
            return told(str(faults), losses={}, starts=(failed,), folder=folder)
        changed = {"losses": {1: 1.1, 2: 0.9, 3: 0.8, 4: 0.7}} if EXCHANGE in str(faults) else {}
        return told(str(faults), plan=Plan(layout=Layout(replicas=3)), folder=folder, **changed)

    monkeypatch.setattr(run, "run_with", fake)
    faults = "slow:worker=1,step=2; slow:worker=2,step=3"
    assert run.main_drill(request(__file__, "--faults", faults)) == 0
    assert asked == [(), (), (), ("plan.layout.replicas=1-3",), (), ()], "it is asked once"
    printed = capsys.readouterr()
    for text in (printed.out, printed.err):
        assert "replicas stay as they are: PlanError: built for the CPU so far, not for cuda." in text
    assert printed.out.endswith("all promises held\n")


@pytest.mark.parametrize(
    ("again", "exchanged", "said"),
    [
        ({1: 1.0, 2: 0.9, 3: 0.81, 4: 0.7}, {}, r"not deterministic.* first at step 3, where the loss is 0.8 and 0.81"),
        ({1: 1.0, 2: 0.9}, {}, r"not deterministic.* step 3 is in one of them only \(4 and 2 steps\)"),
        (None, {1: 1.0, 2: 0.9, 3: 0.8, 4: 0.7}, r"does not use its batches: .* the same in steps 1 to 4"),
        (None, {1: 1.0, 2: 0.9, 3: 0.8, 4: 0.7000001}, None),  # where nothing rounds the last digit tells
    ],
)
def test_a_script_that_differs_by_itself_or_ignores_its_batches_is_not_drilled(
    again: dict[int, float] | None, exchanged: dict[int, float], said: str | None, tmp_path: Path
) -> None:
    answers = [told(), told() if again is None else told(losses=again), told(f"{EXCHANGE}:step=1", losses=exchanged)]

    def of(like: Report) -> Report:
        answers[:0] = [like]
        left = iter(answers)
        return undisturbed(lambda *_: next(left), Path("train.py"), tmp_path, steps=4, tolerance=None)

    if said is None:
        assert of(answers.pop(0)) == told()
    else:
        with pytest.raises(WorkerError, match=said):
            of(answers.pop(0))
    asynchronous = told(plan=Plan(layout=Layout(replicas=3), sync=ParameterServer(staleness=None)))
    assert of(asynchronous) is asynchronous, "its losses say nothing, and it is run once"
    with pytest.raises(PlanError, match="is no fault"):
        found = terms("default")
        programmes_of(request(__file__, "--faults", f"{EXCHANGE}:step=1"), found, plan=Plan(), steps=40, workers=3)


def test_all_other_plans_may_lose_a_replica() -> None:
    for plan in ("default", "localsgd(every=4)", "gossip", "allreduce(op=adasum)", "parameterserver(staleness=none)"):
        found = terms(plan)
        assert found.overrides == ("plan.layout.replicas=1-3",) and found.is_elastic and not found.kept
    assert terms("replicas=1-3").overrides == () and terms("replicas=1-3").is_elastic
    assert terms("shard=3").overrides == () and not terms("shard=3").is_elastic, "the only replica"


def test_a_fault_that_does_not_apply_is_left_out_by_name_and_refused_where_it_is_named(tmp_path: Path) -> None:
    assert not terms("default").said
    for plan in ("localsgd(every=4)", "gossip", "parameterserver(staleness=none)", "parameterserver(drop=1)"):
        found = terms(plan)
        assert list(found.left_out) == ["flip"] and found.said[-1].startswith("flip does not apply: ")
        drawn = programmes_of(request(__file__), found, plan=Plan.parse(plan), steps=40, workers=3)
        kinds = [fault.kind for (fault,) in drawn]
        assert kinds == [*(kind for kind in KINDS if kind != "flip"), *(OF_SERVERS if "server" in plan else ())]
        named = request(__file__, "--faults", "flip:worker=1,step=9")
        with pytest.raises(PlanError, match=r"flip:worker=1,step=9 does not apply to this plan: .* different weights"):
            programmes_of(named, found, plan=Plan.parse(plan), steps=40, workers=3)
    two = terms("default", workers=2)
    assert two.said == ("flip does not apply: it needs 3 workers, so that a majority says whose weights are right",)


def test_a_fault_of_a_save_comes_at_one_before_the_end() -> None:
    assert terms("default").last_save == 35
    rounds = terms("localsgd(every=16)")
    assert rounds.last_save == 32, "saves wait for the replicas to agree"
    assert terms("localsgd(every=64,fragments=2)").last_save == terms("gossip").last_save == 35, "here they do not"
    (full,) = Programme.of_each_kind(0, steps=40, workers=3, kinds=["full_disk"], last_save=4)
    assert full.step == 4
    assert terms("default", "--save-every", "20").last_save == 20
    found = terms("localsgd(every=64)")
    assert found.last_save is None and "no checkpoint before that of the run's end" in found.left_out["full_disk"]


def test_a_worker_that_calls_nobody_in_its_step_is_slow_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(injection.time, "sleep", slept.append)
    notes = DrillFolder.begin(tmp_path, Programme.parse("slow:worker=1,step=2,steps=1,times=3"), outside=())
    recorder: Any = SimpleNamespace(**{name: lambda *_, **__: 1 for name in ("begin", "enter", "wait", "join")})
    injection.install_faults(notes.path, worker_rank=1, recorder=recorder)
    for step, calls in ((1, 0), (2, 0), (3, 0), (2, 1)):
        slept.clear()
        recorder.begin(injection.GRADIENT_PASS, step)
        for _ in range(calls):
            recorder.enter("all_reduce", "gradients")
        recorder.begin(injection.BETWEEN, step)
        assert len(slept) == (step == 2), (step, calls)


def test_a_loss_leaps_only_where_its_worker_has_known_some(tmp_path: Path) -> None:
    notes = DrillFolder.begin(tmp_path, Programme.parse("spike:worker=1,step=6"), outside=())
    recorder: Any = SimpleNamespace(**{name: lambda *_, **__: 1 for name in ("begin", "enter", "wait", "join")})
    injection.install_faults(notes.path, worker_rank=1, recorder=recorder)
    model, spoilt = torch.nn.Identity(), []
    for step in range(3, 24, 3):  # every third batch is its own
        recorder.begin(injection.GRADIENT_PASS, step)
        spoilt.append(float(model(torch.ones(1, 2)).abs().max()) > 1000)
        recorder.begin(injection.BETWEEN, step)
    assert spoilt == [False] * 5 + [True, False]


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


def test_the_drill_turns_the_guard_on_for_faults_that_it_is_to_see() -> None:
    plan = Plan()
    assert guard_overrides(Programme.parse(KILL), plan) == ()
    (flips,) = guard_overrides(Programme.parse("flip:worker=1,step=2"), plan)
    assert settings.apply(plan, flips).guard == Guard(check_every=1)
    (both,) = guard_overrides(Programme.parse("flip:worker=1,step=2; nan:worker=0,step=3"), plan)
    found = settings.apply(plan, both).guard
    assert (found.on_spike, found.window, found.check_every) == ("skip", 8, 1)
    (often,) = guard_overrides(Programme.parse(KILL), Plan(layout=Layout(shard=2)), snapshot_every=3)
    assert settings.apply(plan, often).guard == Guard(snapshot_every=3)
    own = Plan(guard=Guard(on_spike="rollback", check_every=1))
    (kept,) = guard_overrides(Programme.parse("nan:worker=0,step=3"), own)
    assert settings.apply(own, kept).guard.on_spike == "rollback"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_bit_of_one_weight_flips_and_it_stays_finite(dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)).to(dtype)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    name = flip_a_bit(model, seed="flip:worker=1,step=2")
    changed = {key: int((value != before[key]).sum()) for key, value in model.named_parameters()}
    assert changed == {key: int(key == name) for key in before}
    assert all(bool(torch.isfinite(value).all()) for value in model.parameters())


def test_what_the_outermost_module_gives_is_spoilt_and_others_are_left_alone() -> None:
    seen: list[str] = []

    def came(module: torch.nn.Module, output: Any) -> Any:
        seen.append(type(module).__name__)
        return poisoned(output, "nan") if len(seen) == 2 else None

    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh())
    calls = ModelCalls(came)
    try:
        outputs = [model(torch.ones(2, 4)) for _ in range(3)]
    finally:
        calls.close()
    assert seen == ["Sequential"] * 3
    assert [bool(torch.isfinite(output).all()) for output in outputs] == [True, False, True]
    assert torch.equal(model(torch.ones(2, 4)), outputs[0]) and len(seen) == 3


def test_in_a_pipeline_what_its_stage_has_made_is_spoilt_and_stays_the_same_tensor() -> None:
    watched: list[str] = []

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            watched.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    class NoOutput(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.empty(2, 3, device="meta")

    here, model = torch.nn.Linear(4, 3), torch.nn.Sequential()
    model.extend([here, NoOutput()])
    made: list[torch.Tensor] = []
    here.register_forward_hook(lambda *given: made.append(given[-1]))
    calls = ModelCalls(lambda _, output: poisoned(output, "nan"))
    try:
        with Watching():
            output = model(torch.ones(2, 4))
    finally:
        calls.close()
    assert output.is_meta and bool(made[0].isnan().all())
    assert "is_floating_point" not in watched, "the pipeline would take that for the model's own"


def test_a_cable_is_whole_again_before_the_command_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    hosts: Any = [
        network_namespaces.NamespaceHost(name=name, address="", namespace="", device="", hosts_file=tmp_path)
        for name in network_namespaces.NAMES
    ]
    monkeypatch.setattr(network_namespaces, "mend", lambda host: done.append(f"mend {host.name}"))
    monkeypatch.setattr(runs.subprocess, "Popen", lambda *_, **__: done.append("start") or Over())
    run = runs._Run(tmp_path, Programme(), [], [])
    run._hosts = hosts
    run._start(deadline=0.0)
    assert done == ["mend far", "start", "start"]


class Over:
    """A process that has ended."""

    returncode = pid = 0

    def poll(self) -> int:
        return 0

    def kill(self) -> None: ...

    wait = poll


def test_a_spike_is_far_off_whatever_the_output_is() -> None:
    logits, loss, mask = torch.tensor([[2.0, -1.0]]), torch.tensor(0.5), torch.tensor([True])
    spoilt = poisoned({"logits": logits, "loss": loss, "mask": mask}, "spike")
    assert float(torch.nn.functional.cross_entropy(spoilt["logits"], torch.tensor([0]))) > 1000
    assert float(spoilt["loss"]) == 5000 and spoilt["mask"] is mask


def committed(step: int, when: float) -> Record:
    done = StepDone(step=step, epoch=0, num_samples=1, loss=1.0, metrics={}, seconds={})
    return Record(when, 0, done)


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


# The command's options.


def request(*words: str) -> DrillRequest:
    parser = Parser(prog="paceline")
    commands = parser.add_subparsers(parser_class=Parser)
    add(commands)
    arguments = parser.parse_args(["drill", *words])
    arguments.script_args = ()
    return drill_request(arguments)


def test_the_options_make_a_request(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    made = request(str(script), "--workers", "4", "--random", "3", "--seed", "5", "--steps", "20", "--together")
    assert (made.workers, made.num_random, made.seed, made.steps, made.together) == (4, 3, 5, 20, True)
    sizes: dict[str, Any] = {"plan": Plan(), "steps": 20, "workers": 4}
    (programme,) = programmes_of(made, DrillTerms(is_elastic=True), **sizes)
    assert programme == Programme.random(5, steps=20, workers=4, num=3)
    assert len(programmes_of(request(str(script)), DrillTerms(is_elastic=True), **sizes)) == len(KINDS)
    with pytest.raises(PlanError, match="--steps is 0; it must be more than 0"):
        request(str(script), "--steps", "0")
    with pytest.raises(PlanError, match="There is no file"):
        request(str(tmp_path / "absent.py"))
    with pytest.raises(PlanError, match="use --together"):
        asked = request(str(script), "--faults", "kill:worker=1,step=2,where=regroup")
        programmes_of(asked, DrillTerms(is_elastic=True), plan=Plan(), steps=9, workers=2)


def test_complete_checkpoints_are_found_by_their_marks(tmp_path: Path) -> None:
    for step in (2, 10):
        folder = tmp_path / f"step_{step:08}"
        folder.mkdir()
        (folder / "data").write_bytes(b"1234")
        fields = {"format": 1, "step": step, "about": {}, "files": {"data": 4}, "file_crc32": {}, "tensor_crc32": {}}
        (folder / "checkpoint.json").write_text(json.dumps(fields))
    (tmp_path / "step_00000012").mkdir()
    assert [path.name for path in complete(tmp_path)] == ["step_00000002", "step_00000010"]
