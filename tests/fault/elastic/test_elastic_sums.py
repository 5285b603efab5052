"""A worker is lost during Adasum, gossip or a compressed sum: the others repeat the step, and all stay equal."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import quick
from elastic_runs import LIMIT_S, trained
from paceline.checkpoint.reader import open_checkpoint
from paceline.monitor.audit.audit import audit

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


def test_a_step_that_lost_a_worker_is_combined_anew_by_those_who_are_left(tmp_path: Path) -> None:
    plan = "replicas=2-4+allreduce(op=adasum,bucket_bytes=600)+batch(size=20,micro=2)"
    job = {"max_steps": 10, "save_every": None, "workers": 3}
    run = trained(tmp_path / "a", {"worker": 1, "step": 4, "where": "backward"}, plan=plan, job=job)
    assert run.code == 0, run.output
    assert [event["rank"] for event in run.events("WorkerLost")] == [1]
    assert [row["step"] for row in run.metrics()] == list(range(1, 11))
    assert run.weights() != 0, "all have the same"
    assert run.losses()[-1] < run.losses()[0]
    assert audit(run.run_dir).is_clean


def test_those_who_are_left_mix_go_on_and_end_with_the_same_weights(tmp_path: Path) -> None:
    plan = "replicas=2-4+gossip(average_every=5)+batch(size=20,micro=2)"
    job = {"max_steps": 13, "save_every": None, "workers": 4}
    run = trained(tmp_path / "a", {"worker": 1, "step": 8, "where": "vote"}, plan=plan, job=job)
    assert run.code == 0, run.output
    assert [event["rank"] for event in run.events("WorkerLost")] == [1]
    assert [row["step"] for row in run.metrics()] == list(range(1, 14))
    assert audit(run.run_dir).is_clean
    assert math.isfinite(run.weights()), "all have the same"
    assert run.losses()[-1] < run.losses()[0]


@pytest.mark.parametrize(("wire", "where"), [("powersgd(rank=2)", "sum"), quick.further("int8", "backward")])
def test_codecs_forget_the_step_that_was_dropped_and_newcomers_learn_what_all_know(
    tmp_path: Path, wire: str, where: str
) -> None:
    plan = f"replicas=2-4+{wire}+allreduce(bucket_bytes=600)+batch(size=20,micro=2)"
    job = {"max_steps": 14, "save_every": None}
    run = trained(tmp_path / "a", {"worker": 2, "step": 4, "where": where}, whole=[6, 4], plan=plan, job=job)
    assert run.code == 0, run.output
    assert [event["rank"] for event in run.events("WorkerLost")] == [2]
    assert [event["rank"] for event in run.events("WorkerJoined")] == [2]
    assert run.workers() == [0, 1, 2, 3]
    assert run.weights() != 0, "all have the same"
    assert run.losses()[-1] < run.losses()[0]
    assert audit(run.run_dir).is_clean
    kept = open_checkpoint(run.run_dir / "checkpoints" / "step_00000014")
    held = kept.load([f"wire:model:own:{replica}:model.layers.0.weight" for replica in range(4)])
    assert all(bool(tensor.any()) for tensor in held.values()), "the newcomer's too, by now"


def test_a_loss_that_a_sum_shows_while_backward_runs_costs_no_step(tmp_path: Path) -> None:
    """Buckets of more than fits into the memory on the way: the next one waits for those before it to be read."""
    plan = "replicas=2-4+int8+batch(size=20,micro=2)"
    job = {"max_steps": 3, "save_every": None, "save_at_end": False}
    fault = {"worker": 2, "step": 2, "where": "forward"}
    run = trained(tmp_path / "a", fault, width=300_000, no_joins=True, plan=plan, job=job)
    assert run.code == 0, run.output
    (regrouped,) = run.events("Regrouped")
    assert regrouped["members"] == [0, 1, 3] and regrouped["steps_lost"] == 0
    assert run.workers() == [0, 1, 3]
    assert run.weights() != 0, "all have the same"
    assert [row["step"] for row in run.metrics()] == [1, 2, 3]
    assert audit(run.run_dir).is_clean
