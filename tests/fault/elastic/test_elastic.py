"""Workers are lost at every point of a step, and the others go on: the same losses, no sample lost or used twice."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import pytest

import programs
import quick
import warm
from elastic_runs import LIMIT_S, PROGRAM, assert_unharmed, finish, reached, resized, start, trained, undisturbed
from paceline.monitor.audit.audit import audit
from programs import child_environment

NEXT_S = 5.0  # from a kill to the next committed step; a bound that only something broken exceeds

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


PLACES = ["data", "forward", "backward", "sum", "vote", "committed", "evaluate"]


@pytest.mark.parametrize(
    ("worker", "where"),  # each place once, with the first worker and with another one in turn
    [
        *[(2 * (number % 2), where) for number, where in enumerate(PLACES)],
        *[quick.further(2 - 2 * (number % 2), where) for number, where in enumerate(PLACES)],
    ],
)
def test_a_worker_killed_anywhere_in_a_step_costs_no_step(tmp_path: Path, worker: int, where: str) -> None:
    run = trained(tmp_path / "a", {"worker": worker, "step": 6, "where": where}, pause_s=0.05)
    assert_unharmed(run)
    (lost,) = run.events("WorkerLost")
    (regrouped,) = run.events("Regrouped")
    assert lost["rank"] == worker
    assert "killed by signal 9" in lost["reason"]
    assert regrouped["members"] == [one for one in range(4) if one != worker]
    assert regrouped["steps_lost"] == 0
    assert regrouped["step"] in (5, 6, 8)


def test_a_worker_killed_in_a_sum_that_follows_a_schedule_costs_no_step(tmp_path: Path) -> None:
    plan = "replicas=2-4+allreduce(algorithm=ring)+batch(size=20,micro=2)+compute(precision=fp64)"
    run = trained(tmp_path / "a", {"worker": 2, "step": 6, "where": "sum"}, plan=plan)
    assert_unharmed(run)
    (regrouped,) = run.events("Regrouped")
    assert regrouped["members"] == [0, 1, 3] and regrouped["steps_lost"] == 0
    assert "over the loopback network" in run.output  # who names an algorithm is told what the memory would give


def test_the_plain_loop_survives_as_the_stepper_does(tmp_path: Path) -> None:
    faults = [{"worker": 1, "step": 4, "where": "backward"}, {"worker": 3, "step": 8, "where": "sum"}]
    options = {"plain": True}
    like = undisturbed(json.dumps(options))
    assert_unharmed(trained(tmp_path / "a", *faults, **options), like)


@pytest.mark.parametrize("where", [quick.further("backward"), "sum", quick.further("committed")])
def test_hooks_of_gradients_and_an_average_of_weights_go_on_and_a_newcomer_has_both(tmp_path: Path, where: str) -> None:
    options = {"hooked": True}
    like = undisturbed(json.dumps(options))
    assert like.weights() != pytest.approx(undisturbed().weights(), rel=1e-3)
    run = trained(tmp_path / "a", {"worker": 1, "step": 5, "where": where}, whole=[8, 4], **options)
    assert_unharmed(run, like)
    assert [event["rank"] for event in run.events("WorkerJoined")] == [1]
    assert run.workers() == [0, 1, 2, 3]


def test_two_at_once_leave_the_minimum_which_goes_on(tmp_path: Path) -> None:
    faults = [{"worker": worker, "step": 5, "where": "forward"} for worker in (1, 2)]
    run = trained(tmp_path / "a", *faults)
    assert_unharmed(run)
    assert {event["rank"] for event in run.events("WorkerLost")} == {1, 2}


def test_a_worker_lost_during_the_recovery_from_another_is_survived(tmp_path: Path) -> None:
    faults = [{"worker": 1, "step": 5, "where": "forward"}, {"worker": 3, "step": 5, "where": "regroup"}]
    assert_unharmed(trained(tmp_path / "a", *faults))


def test_the_writer_of_a_checkpoint_may_be_killed_in_the_middle_of_it(tmp_path: Path) -> None:
    run = trained(tmp_path / "a", {"worker": 0, "step": 6, "where": "save"}, pause_s=0.05)
    assert_unharmed(run)
    assert (run.run_dir / "checkpoints" / "step_00000012").is_dir()


def test_a_replacement_takes_over_a_members_state_and_works(tmp_path: Path) -> None:
    run = trained(tmp_path / "a", {"worker": 2, "step": 4, "where": "forward"}, whole=[6, 4], job={"max_steps": 16})
    assert run.code == 0, run.output
    (joined,) = run.events("WorkerJoined")
    assert joined["rank"] == 2
    assert joined["step"] > 4
    assert run.workers() == [0, 1, 2, 3]
    assert run.weights() > 0, "all have the same"
    assert run.losses()[:12] == pytest.approx(undisturbed().losses(), rel=1e-9)
    told = " ".join(run.output.split())
    assert re.search(
        r"worker 2 \(pid \d+\) killed by signal 9 after step 3: detected in \d+\.\d\d s, regrouped in \d+\.\d\d s; "
        r"3 workers go on, steps lost 0, samples repeated 0",
        told,
    ), run.output
    assert re.search(rf"worker 2 \(pid \d+\) joined at step {joined['step']}, \d+\.\d\d s after the loss", told), (
        run.output
    )


def test_ten_random_kills_in_one_run_leave_the_losses_of_an_undisturbed_one(tmp_path: Path) -> None:
    """And within `NEXT_S` of each the next step is committed."""
    chance, job = random.Random(7), {"max_steps": 34, "save_every": None}
    places = ["data", "forward", "backward", "sum", "vote", "committed"]
    faults = [
        {"worker": chance.randrange(4), "step": 3 * number, "where": chance.choice(places)} for number in range(1, 11)
    ]
    run = trained(tmp_path / "a", *faults, whole=[0, 4], job=job)
    assert_unharmed(run, undisturbed(json.dumps({"job": job})))
    killed = [float((tmp_path / "a" / f"fault_{number}").read_text().split()[1]) for number in range(10)]
    assert len(run.events("WorkerLost")) == 10
    commits = [row["time"] for row in run.metrics()]
    assert all(min(time for time in commits if time > when) - when < NEXT_S for when in killed)
    assert sum(event["steps_lost"] for event in run.events("Regrouped")) == 0


@pytest.mark.further
def test_a_large_state_is_handed_over_as_well(tmp_path: Path) -> None:
    """It takes longer than any slice of a wait."""
    options = {"width": 300_000, "job": {"save_at_end": False, "save_every": None, "max_steps": 9}, "whole": [6, 4]}
    plan = "replicas=2-4+batch(size=20,micro=2)"
    run = trained(tmp_path / "a", {"worker": 2, "step": 4, "where": "forward"}, plan=plan, **options)
    assert run.code == 0, run.output
    assert [event["rank"] for event in run.events("WorkerJoined")] == [2]
    assert len(run.events("WorkerLost")) == 1
    assert run.workers() == [0, 1, 2, 3]
    assert run.weights() > 0, "all have the same"


def test_killed_at_the_minimum_the_others_wait_for_a_replacement_and_go_on(tmp_path: Path) -> None:
    options = {"plan": "replicas=4-4+batch(size=20,micro=2)+compute(precision=fp64)"}
    run = trained(tmp_path / "a", {"worker": 2, "step": 6, "where": "backward"}, **options)
    assert_unharmed(run)
    (regrouped,) = run.events("Regrouped")
    assert regrouped["holds"] is True
    assert run.workers() == [0, 1, 2, 3]


def test_below_the_minimum_for_too_long_the_run_saves_and_says_run_me_again(tmp_path: Path) -> None:
    faults = [{"worker": worker, "step": 6, "where": "forward"} for worker in (1, 2)]
    options = {"plan": "replicas=3-4+batch(size=20,micro=2)+compute(precision=fp64)", "pause_s": 0.02}
    first = trained(tmp_path / "a", *faults, no_joins=True, job={"patience_s": 1.0}, **options)
    assert first.code == 76, first.output
    assert "go on with: " in first.output
    assert (first.run_dir / "checkpoints" / "step_00000005").is_dir()
    assert_unharmed(trained(tmp_path / "a", *faults, **options))


def test_a_stopped_worker_is_given_up_after_the_stated_time_and_never_commits_again(tmp_path: Path) -> None:
    fault = {"worker": 1, "step": 5, "where": "forward", "signal": int(signal.SIGSTOP)}
    run = trained(tmp_path / "a", fault, job={"silence_s": 2.0})
    assert_unharmed(run)
    assert "worker 1 said nothing for 2 s" in run.events("WorkerLost")[0]["reason"]
    (regrouped,) = run.events("Regrouped")
    began = float((tmp_path / "a" / "fault_0").read_text().split()[1])
    assert (
        regrouped["time"] - began < 10.0
    )  # the silence of a job that does not say; the benchmark has the exact figure
    assert regrouped["detected_s"] >= run.events("WorkerLost")[0]["silent_s"] >= 2.0
    rows = [row["seconds"] for row in run.metrics()]
    disturbed = max(rows, key=lambda seconds: seconds.get("recovery", 0.0))
    rest_s = disturbed["total"] - sum(seconds for name, seconds in disturbed.items() if name != "total")
    assert rest_s < disturbed["recovery"], "what was waited for in vain is not counted for the loop's own code"
    assert disturbed["recovery"] >= 1.5
    assert "recovery" not in rows[0]


def test_sigterm_to_the_job_finishes_the_step_saves_and_exits_with_75_and_the_next_start_goes_on(
    tmp_path: Path,
) -> None:
    fault = {"worker": 0, "step": 6, "where": "forward", "signal": int(signal.SIGTERM)}
    options = {
        "plan": "replicas=2+batch(size=20,micro=2)+compute(precision=fp64)",
        "job": {"workers": 2},
        "pause_s": 0.02,
    }
    first = trained(tmp_path / "a", fault, **options)
    assert first.code == 75, first.output
    assert "everything is saved" in first.output
    steps = [row["step"] for row in first.metrics()]
    assert 6 <= steps[-1] < 12
    assert (first.run_dir / "checkpoints" / f"step_{steps[-1]:08}").is_dir()
    second = trained(tmp_path / "a", fault, **options)
    assert_unharmed(second)


def test_one_of_an_elastic_run_may_leave_on_sigterm_and_the_others_go_on(tmp_path: Path) -> None:
    fault = {"worker": 3, "step": 4, "where": "forward", "signal": int(signal.SIGTERM)}
    run = trained(tmp_path / "a", fault, pause_s=0.15)
    assert_unharmed(run)
    assert not run.events("WorkerLost")
    assert run.workers() == [0, 1, 2]
    (leaving,) = run.events("WorkerLeft")
    last = json.loads((run.run_dir / "attempt_1/worker_3/ledger.jsonl").read_text().splitlines()[-1])["step"]
    told = {name: leaving[name] for name in ("rank", "step", "reason", "members", "resized")}
    assert told == {"rank": 3, "step": last, "reason": "SIGTERM", "members": [0, 1, 2], "resized": False}
    assert f"worker 3 has left (SIGTERM) after step {last}: 3 workers go on\n" in run.output


def test_a_run_is_resized_on_purpose_down_and_up_again(tmp_path: Path) -> None:
    # Its last steps wait until four are there: they may come as late as they like.
    process = start(tmp_path / "a", pause_s=0.1, whole=[50, 4], job={"max_steps": 52})
    run_dir = tmp_path / "a" / "run"
    reached(run_dir, 5, process)
    assert resized(run_dir, 2) == (0, "it will have 2 replicas")
    wait_for_members(run_dir, 2, process)
    code, said = resized(run_dir, 7)
    assert (code, "allows 2 to 4 replicas" in said) == (1, True), said
    assert resized(run_dir, 4) == (0, "it will have 4 replicas")
    run = finish(tmp_path / "a", process)
    assert_unharmed(run, undisturbed(json.dumps({"job": {"max_steps": 52}})))
    joined = [one["rank"] for one in run.events("WorkerJoined")]  # a rank comes back once its process has ended
    assert len(joined) == 2 and run.workers() == sorted([0, 1, *joined])
    assert not run.events("WorkerLost")
    told = [(one["rank"], one["reason"], one["members"], one["resized"]) for one in run.events("WorkerLeft")]
    assert sorted(told) == [(rank, "resized to 2 replicas", [0, 1], True) for rank in (2, 3)]
    assert all(f"worker {rank} has left (resized to 2 replicas) after step" in run.output for rank in (2, 3))


def wait_for_members(run_dir: Path, count: int, process: warm.Process) -> None:
    """Return when so many workers are left."""
    deadline = time.monotonic() + LIMIT_S
    while len([path for path in run_dir.glob("attempt_1/worker_*/events.jsonl") if not ended(path)]) != count:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)


def ended(events: Path) -> bool:
    """Whether a worker has said that it is done."""
    return "WorkerFinished" in events.read_text()


def test_an_error_of_the_program_is_no_loss_and_ends_the_run(tmp_path: Path) -> None:
    run = trained(tmp_path / "a", {"worker": 1, "step": 3, "where": "forward", "signal": 0}, job={"max_steps": 4})
    assert run.code == 0  # signal 0 is nothing: the program works
    broken = PROGRAM.read_text().replace('words != "from 0"', "worker.rank == 1")
    (tmp_path / "broken.py").write_text(broken)
    environment = child_environment() | {"OPTIONS": json.dumps({"job": {"run_dir": str(tmp_path / "b")}})}
    environment["PYTHONPATH"] = os.pathsep.join([str(PROGRAM.parent), environment.get("PYTHONPATH", "")])
    code, output = programs.run(sys.executable, tmp_path / "broken.py", environment=environment, cwd=tmp_path)
    assert code == 1, output
    assert "ValueError: the first worker gave" in output


@pytest.mark.parametrize("step", [11, 12])
def test_a_worker_lost_near_the_end_harms_nothing_whether_its_successor_comes_in_time_or_not(
    tmp_path: Path, step: int
) -> None:
    assert_unharmed(trained(tmp_path / "a", {"worker": 2, "step": step, "where": "forward"}, pause_s=0.06))


def test_where_all_are_lost_the_run_says_run_me_again_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    faults = [{"worker": worker, "step": 6, "where": "forward"} for worker in range(4)]
    first = trained(tmp_path / "a", *faults)
    assert first.code == 76, first.output
    assert "no replica is left" in first.output
    lost = [event["reason"] for event in first.events("WorkerLost")]
    assert len(lost) == 4 and all(reason in first.output for reason in lost), first.output
    second = trained(tmp_path / "a", *faults)
    assert second.code == 0, second.output
    assert {row["step"]: row["loss"] for row in second.metrics()} == pytest.approx(
        {row["step"]: row["loss"] for row in undisturbed().metrics()}, rel=1e-9
    )
    assert audit(second.run_dir).verdict == "clean"
