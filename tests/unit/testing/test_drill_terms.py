"""On what terms a job is drilled: what is set in its plan, which faults are left out, which scripts are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drill_reports import KILL, request, terms, told
from paceline import settings
from paceline.cli.drill import run
from paceline.cli.drill.run import DrillTerms, guard_overrides, programmes_of
from paceline.cli.drill.undisturbed import undisturbed
from paceline.errors import LaunchError, PlanError, WorkerError
from paceline.plan import Guard, Layout, ParameterServer, Plan
from paceline.testing import (
    KINDS,
    Programme,
    Report,
    Start,
)
from paceline.testing.disk import complete
from paceline.testing.faults import EXCHANGE, OF_SERVERS


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
    assert (
        found.last_save is None
        and "no checkpoint comes before the end of a run of 40 steps" in found.left_out["full_disk"]
    )


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
