"""Replicas of several workers are lost at every point of a step, come back, and leave: the losses of one process."""

from __future__ import annotations

import functools
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

import elastic_runs
import lasting
import programs
import quick
from elastic_runs import LIMIT_S, Run, finish, reached, start, trained
from paceline.monitor.audit.audit import audit
from programs import PACELINE

PROGRAM = elastic_runs.PROGRAM.with_name("replica_program.py")
BATCH = "batch(size=12,micro=2)+compute(precision=fp64)"
EACH = 2  # workers of a replica

pytestmark = pytest.mark.timeout(2 * LIMIT_S)


def fault(worker: int, step: int, where: str, signum: int = signal.SIGKILL) -> dict[str, Any]:
    return {"worker": worker, "step": step, "where": where, "signal": int(signum)}


@functools.cache
def undisturbed(steps: int, routed: bool = False) -> Run:
    """One process, which holds the whole model."""
    folder = lasting.folder("undisturbed")
    job = {"workers": 1, "max_steps": steps}
    run = trained(folder, program=PROGRAM, plan=f"replicas=1+{BATCH}", job=job, routed=routed)
    assert run.code == 0, run.output
    return run


def assert_unharmed(run: Run, *, routed: bool = False) -> None:
    """Each step is there once, with the loss of one process; every sample was used once; replicas are equal."""
    assert run.code == 0, run.output
    like = undisturbed(len(run.metrics()), routed)
    assert [row["step"] for row in run.metrics()] == [row["step"] for row in like.metrics()], run.output
    assert run.losses() == pytest.approx(like.losses(), rel=1e-9)
    assert run.held_out() == pytest.approx(like.held_out(), rel=1e-9)
    assert audit(run.run_dir).verdict == "clean"
    by_place: dict[int, set[str]] = {}
    for rank, digest in json.loads((run.folder / "weights.json").read_text()):
        by_place.setdefault(rank % EACH, set()).add(digest)
    assert {place: len(digests) for place, digests in by_place.items()} == {0: 1, 1: 1}, "replicas are equal"


EVERYWHERE = [
    fault(3, 2, "forward"),
    fault(0, 3, "backward"),  # of the first replica, which writes the checkpoints
    fault(2, 5, "sum"),
    fault(1, 7, "vote"),
    fault(2, 8, "evaluate"),
    fault(3, 10, "committed"),
    fault(1, 15, "save"),
]


BRIEFLY = [EVERYWHERE[0], EVERYWHERE[1], EVERYWHERE[3], EVERYWHERE[6]]
LAYOUTS = {
    "shard=2": EVERYWHERE,
    "tensor=2+sequence=true": BRIEFLY,
    "stages=2": BRIEFLY,
    "experts=2": BRIEFLY,
    "context=2": [*BRIEFLY[:3], fault(2, 9, "sum")],  # one worker alone writes its checkpoints
}


@pytest.mark.parametrize("cut", quick.without(("tensor=2+sequence=true", "context=2"), LAYOUTS))
def test_a_replica_lost_anywhere_in_a_step_costs_no_step_and_comes_back_with_the_state(
    tmp_path: Path, cut: str
) -> None:
    """The least is all of them, so the others wait each time until the new replica is there, and then go on with it."""
    faults = LAYOUTS[cut]
    plan = f"replicas=2-2+{cut}+{BATCH}"
    routed = "experts" in cut
    run = trained(tmp_path / "a", *faults, program=PROGRAM, plan=plan, job={"max_steps": 17}, routed=routed)
    assert_unharmed(run, routed=routed)
    assert len(list((tmp_path / "a").glob("fault_*"))) == len(faults)
    regrouped = run.events("Regrouped")
    assert len(regrouped) == len(faults)
    for one, told in zip(faults, regrouped, strict=True):
        replica = one["worker"] // EACH
        first = replica * EACH
        (cause,) = told["causes"]
        assert cause.startswith(f"worker {one['worker']} (pid ")
        assert cause.endswith(f"killed by signal 9, and with it replica {replica} (workers {first}, {first + 1})")
        assert told["members"] == [worker for worker in range(4) if worker // EACH != replica]
        assert told["steps_lost"] == 0
        assert told["holds"] is True
    assert "1 replica waits for others, steps lost 0, samples repeated 0; state from a living replica" in run.output
    assert (run.run_dir / "checkpoints" / "step_00000017").is_dir()


def test_two_replicas_lost_at_once_leave_the_least_which_goes_on_at_once(tmp_path: Path) -> None:
    """In an epoch's short last step: of its three micro-batches the two workers who are left run two each, one void."""
    faults = [fault(1, 5, "backward"), fault(4, 5, "sum")]
    plan = f"replicas=1-3+shard=2+{BATCH}"
    run = trained(tmp_path / "a", *faults, program=PROGRAM, plan=plan, job={"workers": 6, "max_steps": 10})
    assert_unharmed(run)
    assert {event["rank"] for event in run.events("WorkerLost")} == {0, 1, 4, 5}
    assert not any(event["holds"] for event in run.events("Regrouped"))


def test_sigterm_to_one_worker_has_its_replica_leave_and_a_silent_one_is_lost_with_its_replica(tmp_path: Path) -> None:
    faults = [fault(1, 3, "forward", signal.SIGTERM), fault(4, 6, "backward", signal.SIGSTOP)]
    plan = f"replicas=1-3+shard=2+zero=1+{BATCH}"
    job = {"workers": 6, "max_steps": 9, "silence_s": 3.0}
    run = trained(tmp_path / "a", *faults, program=PROGRAM, plan=plan, job=job, pause_s=0.1)
    assert_unharmed(run)
    assert sorted(event["rank"] for event in run.events("WorkerLeft")) == [0, 1]
    causes = [cause for event in run.events("Regrouped") for cause in event["causes"]]
    assert "worker 4 said nothing for 3 s, and with it replica 2 (workers 4, 5)" in causes


@pytest.mark.further
def test_where_all_replicas_break_without_snapshots_the_next_start_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    faults = [fault(0, 8, "backward"), fault(3, 8, "backward")]
    plan = f"replicas=1-2+shard=2+{BATCH}+guard(snapshot_every=0)"
    first = trained(tmp_path / "a", *faults, program=PROGRAM, plan=plan)
    assert first.code == 76, first.output
    assert "no replica is left that has the run's state" in first.output
    assert re.search("it can go on from the newest checkpoint, of step [36]", first.output)
    assert_unharmed(trained(tmp_path / "a", *faults, program=PROGRAM, plan=plan))


@pytest.mark.further
def test_a_resize_counts_in_replicas_and_below_the_least_all_wait_save_and_leave(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    options = {"plan": f"replicas=2-3+shard=2+{BATCH}", "no_joins": True, "gate": 2}
    job = {"workers": 6, "max_steps": 60, "patience_s": 1.0, "save_every": None}
    process = start(folder, fault(1, 10, "forward"), program=PROGRAM, job=job, **options)
    reached(folder / "run", 1, process)  # the second step is told when the third one is asked for
    assert programs.run(*PACELINE, "resize", "run", "2", cwd=folder)[0] == 0
    (folder / "open").touch()
    run = finish(folder, process)
    assert run.code == 76, run.output
    left = {(event["rank"], event["reason"], event["resized"]) for event in run.events("WorkerLeft")}
    assert left == {(4, "resized to 2 replicas", True), (5, "resized to 2 replicas", True)}
    assert run.events("Regrouped")[-1]["holds"] is True
    assert "1 of at least 2 replicas were left for 1 s" in run.output
    assert (run.run_dir / "checkpoints" / "step_00000009").is_dir()
    assert run.losses() == pytest.approx(undisturbed(12).losses()[:9], rel=1e-9)
