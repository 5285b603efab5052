"""Parameter servers while workers are lost and come: the same losses, no sample lost or used twice, no server left."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

import quick
from elastic_runs import LIMIT_S, assert_unharmed, finish, reached, servers_of, start, trained
from paceline.monitor.audit.audit import audit

pytestmark = pytest.mark.timeout(LIMIT_S + 20)

PLAN = "replicas=2-4+parameterserver(servers=2,bucket_bytes=400)+batch(size=20,micro=2)+compute(precision=fp64)"


@pytest.mark.parametrize(("worker", "where"), [(0, "backward"), quick.further(1, "vote"), (3, "committed")])
def test_a_worker_killed_in_a_step_costs_no_step(tmp_path: Path, worker: int, where: str) -> None:
    run = trained(tmp_path / "a", {"worker": worker, "step": 6, "where": where}, plan=PLAN, pause_s=0.05)
    assert_unharmed(run)
    (lost,) = run.events("WorkerLost")
    assert lost["rank"] == worker
    assert (run.run_dir / "checkpoints" / "step_00000012").is_dir()


def test_replicas_that_take_turns_leave_together_and_any_sync_goes_on(tmp_path: Path) -> None:
    turns = "replicas=3+parameterserver(servers=2,staleness=none)+batch(size=20,micro=2)+compute(precision=fp64)"
    options = {"turns": True, "pause_s": 0.05, "plan": turns}
    process = start(tmp_path / "a", **options, job={"workers": 3, "max_steps": 10_000})
    reached(tmp_path / "a" / "run", 12, process)
    process.send_signal(signal.SIGTERM)
    first = finish(tmp_path / "a", process)
    assert first.code == 75, first.output
    stands = max(row["step"] for row in first.metrics())
    assert (first.run_dir / "checkpoints" / f"step_{stands:08}").is_dir(), first.output
    whole = "replicas=2+batch(size=20,micro=2)+compute(precision=fp64)"
    then = trained(tmp_path / "a", turns=True, plan=whole, job={"workers": 2, "max_steps": stands + 20})
    assert then.code == 0, then.output
    judged = audit(then.run_dir)
    assert judged.verdict == "clean", judged


def test_a_killed_server_has_all_begin_again_from_the_newest_checkpoint(tmp_path: Path) -> None:
    killed = {"worker": 1, "step": 8, "where": "backward", "target": "server"}
    run = trained(tmp_path / "a", killed, plan=PLAN, pause_s=0.05)
    assert_unharmed(run)
    said = re.search(
        r"parameter server 1 \(pid \d+ on \S+\) killed by signal 9 after step 7: "
        r"all 4 workers start again from the checkpoint of step (\d) on disk: (\d) steps? (is|are) done again",
        run.output,
    )
    assert said is not None and int(said[1]) + int(said[2]) == 7, run.output


def test_a_server_that_is_lost_each_time_ends_the_run_as_lost_workers_do_and_that_is_told_once(tmp_path: Path) -> None:
    killed = {"worker": 0, "step": 8, "where": "backward", "target": "server"}
    run = trained(tmp_path / "a", *[killed] * 4, plan=PLAN.replace("2-4", "2"), job={"workers": 2})
    assert run.code == 76, run.output
    assert "the workers have begun again 3 times in a row, and none came beyond step 7: the run ends" in run.output
    assert len(re.findall(r"start again from the checkpoint of step [36] on disk", run.output)) == 3, run.output
    last = run.output.partition("the run ends")[2]
    said = r"server 0 \(pid \d+ on \S+\) killed by signal 9: it can go on from the newest checkpoint, of step [36]"
    assert len(re.findall(said, last)) == 1 and last.count("killed by signal 9") == 1, last
    assert "paceline: go on with:" in last, last


def test_a_mirror_takes_over_while_a_worker_is_lost_too(tmp_path: Path) -> None:
    server = {"worker": 1, "step": 6, "where": "backward", "target": "server"}
    worker = {"worker": 3, "step": 6, "where": "vote"}
    run = trained(
        tmp_path / "a", server, worker, plan=PLAN.replace("servers=2", "servers=2,mirrored=true"), pause_s=0.05
    )
    assert_unharmed(run)
    said = r"parameter server 1 .* (killed by signal 9|was lost) in step 6: its mirror .* took its place .* lost 0"
    assert re.search(said, run.output), run.output
    assert "start again" not in run.output, run.output


@pytest.mark.further
def test_a_server_that_is_lost_with_its_mirror_has_all_begin_again(tmp_path: Path) -> None:
    plan = "replicas=2+parameterserver(mirrored=true)+batch(size=20,micro=2)+compute(precision=fp64)"
    both = [{"worker": worker, "step": 8, "where": "backward", "target": "server"} for worker in (0, 1)]
    run = trained(tmp_path / "a", *both, plan=plan, pause_s=0.05, job={"workers": 2})
    assert_unharmed(run)
    assert re.search(r"parameter server 0 .* after step 7: both workers start again from the", run.output), run.output


@pytest.mark.further
def test_replicas_that_take_turns_begin_again_too(tmp_path: Path) -> None:
    turns = "replicas=2-3+parameterserver(servers=2,staleness=none)+batch(size=20,micro=2)+compute(precision=fp64)"
    killed = {"worker": 0, "step": 8, "where": "backward", "target": "server"}
    run = trained(tmp_path / "a", killed, turns=True, plan=turns, pause_s=0.05, job={"workers": 3})
    assert run.code == 0, run.output
    assert re.search(r"parameter server 0 .* after step \d+: all 3 workers start again", run.output), run.output
    assert sorted(row["step"] for row in run.metrics()) == list(range(1, 13))
    judged = audit(run.run_dir)
    assert judged.verdict == "clean", judged


@pytest.mark.further
def test_a_stopped_server_is_named_while_it_is_awaited_and_given_up_in_the_end(tmp_path: Path) -> None:
    stopped = {"worker": 0, "step": 6, "where": "backward", "target": "server", "signal": signal.SIGSTOP}
    run = trained(tmp_path / "a", stopped, plan=PLAN.replace("2-4", "2"), job={"workers": 2, "timeout_s": 16})
    assert_unharmed(run)
    name = r"parameter server 0 \(pid (\d+) on \S+\)"
    said = re.search(rf"{name} is stopped .* has waited \d+ s for it; `kill -CONT \d+` .* after 16 s", run.output)
    assert said is not None, run.output
    assert re.search(rf"{name} stood still .* for 16 s .* after step 5: both workers start again", run.output), (
        run.output
    )
    assert not Path("/proc", said[1]).exists()


def test_no_server_outlives_a_run_whose_supervisor_is_killed(tmp_path: Path) -> None:
    plan = "replicas=2+parameterserver(servers=2)+batch(size=20,micro=2)"
    process = start(tmp_path / "a", plan=plan, job={"workers": 2, "max_steps": 10_000}, pause_s=0.02)
    reached(tmp_path / "a" / "run", 2, process)
    there = servers_of(tmp_path / "a" / "run")
    assert len(there) == 2
    process.send_signal(signal.SIGKILL)
    finish(tmp_path / "a", process)
    deadline = time.monotonic() + LIMIT_S
    while (left := servers_of(tmp_path / "a" / "run")) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def test_a_replacement_meets_the_servers_and_works(tmp_path: Path) -> None:
    run = trained(
        tmp_path / "a", {"worker": 2, "step": 4, "where": "forward"}, plan=PLAN, whole=[6, 4], job={"max_steps": 16}
    )
    assert run.code == 0, run.output
    (joined,) = run.events("WorkerJoined")
    assert joined["rank"] == 2 and run.workers() == [0, 1, 2, 3]
    assert run.weights() > 0, "all have the same"
