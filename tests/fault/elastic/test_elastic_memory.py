"""The last replica of an elastic run breaks: all begin again from memory, by themselves, as if nothing had been."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic_runs import LIMIT_S, PROGRAM, Run, trained
from memory_restart_runs import BATCHES, FP64, JOB, REPLICAS, fault, restarts, undisturbed
from paceline.monitor.audit.audit import audit

pytestmark = pytest.mark.timeout(2 * LIMIT_S)


def broken(
    folder: Path, *faults: dict[str, Any], program: Path, layout: str, every: int, workers: int, **options: Any
) -> Run:
    plan = f"{layout}+{BATCHES[program]}+{FP64}+guard(snapshot_every={every})"
    return trained(folder, *faults, program=program, plan=plan, job={**JOB, "workers": workers}, **options)


def assert_unharmed(run: Run, program: Path) -> None:
    like = undisturbed(program)
    assert run.code == 0, run.output
    assert [row["step"] for row in run.metrics()] == [row["step"] for row in like.metrics()], run.output
    assert run.losses() == pytest.approx(like.losses(), rel=1e-9)
    assert run.held_out() == pytest.approx(like.held_out(), rel=1e-9)
    assert audit(run.run_dir).verdict == "clean"
    assert not (run.run_dir / "checkpoints").exists()


def test_a_worker_of_each_replica_lost_at_once_costs_the_steps_since_the_snapshot(tmp_path: Path) -> None:
    """And once more in the attempt after it, where one replica was lost before, and its successor is on its way."""
    faults = [fault(1, 7, "backward"), fault(2, 7, "backward"), fault(0, 10, "forward"), fault(3, 10, "regroup")]
    run = broken(tmp_path / "a", *faults, program=REPLICAS, layout="replicas=1-2+shard=2", every=4, workers=4)
    assert_unharmed(run, REPLICAS)
    first, second = restarts(run)
    assert (first["source"], first["step"], first["at_step"], first["workers"]) == ("memory", 4, 6, 4), run.output
    assert (second["source"], second["step"], second["at_step"]) == ("memory", 8, 9), run.output
    # The slower replica may have formed alone, and told of the other one, before it lost its own worker.
    assert {*first["lost"]} in ({1, 2}, {1}, {2}) and sorted(second["lost"]) == [0, 3]
    assert [cause.split(" (pid")[0] for cause in second["causes"]] == ["worker 0", "worker 3"]
    said = "after step 6: all 4 workers start again at step 4 from this host's memory, 2 steps are done again, no disk"
    assert said in run.output
    assert "and with it replica 0 (workers 0, 1)" in run.output
    digests = dict(json.loads((tmp_path / "a" / "weights.json").read_text()))
    assert digests[0] == digests[2] and digests[1] == digests[3], "replicas are equal"


def test_a_loss_that_comes_back_ends_the_run_after_three_restarts_as_it_would_have_the_first_time(
    tmp_path: Path,
) -> None:
    faults = [fault(0, 2, "forward")] * 4
    run = broken(tmp_path / "a", *faults, program=PROGRAM, layout="replicas=1-1", every=50, workers=1)
    assert run.code == 76, run.output
    assert len(restarts(run)) == 3
    first = "after step 1: the worker starts again at the beginning, nothing was kept or saved: 1 step is done again"
    assert run.output.count(first) == 3, run.output
    assert "the workers have begun again 3 times in a row, and none came beyond step 1: the run ends" in run.output
    assert "nothing was saved, so it begins at step 1 again" in run.output


def test_single_workers_that_are_all_lost_go_on_from_what_the_first_of_them_has_kept_for_all(tmp_path: Path) -> None:
    """Worker 0 keeps step 3, and is not replaced; worker 1, the first after it, keeps step 6."""
    faults = [fault(0, 4, "forward"), fault(1, 8, "forward"), fault(2, 8, "forward")]
    layout, options = "replicas=1-3", {"every": 3, "workers": 3, "no_joins": True}
    run = broken(tmp_path / "a", *faults, program=PROGRAM, layout=layout, **options)
    assert_unharmed(run, PROGRAM)
    (only,) = restarts(run)
    assert (only["source"], only["step"], only["at_step"]) == ("memory", 6, 7), run.output
    assert (
        "all 3 workers start again at step 6 from this host's memory, 1 step is done again, no disk read" in run.output
    )
    assert run.weights() == pytest.approx(undisturbed(PROGRAM).weights(), rel=1e-9)
