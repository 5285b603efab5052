"""Snapshots in memory of a job on several hosts: what a lost host's workers had is in a neighbor host's memory."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_hosts import LIMIT_S, Spread, spread, until
from memory_restart_runs import BATCHES, FP64, REPLICAS, fault, restarts, undisturbed
from network_hosts import NamespaceHost, needs_network, two_hosts

pytestmark = pytest.mark.timeout(2 * LIMIT_S)

JOB: dict[str, Any] = {"max_steps": 12, "save_every": None, "save_at_end": False, "tensorboard": False}
JOB["silence_s"] = 5.0  # a worker's lost peer is waited out for so long: its host may be lost
GATE = 10  # snapshots are of steps 3, 6 and 9; that of step 9 is left out where that of step 6 has not arrived by then


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NamespaceHost]]:
    with two_hosts(tmp_path_factory.mktemp("network"), names=("east", "west"), subnet="10.83.0") as made:
        yield made


def plan(layout: str) -> str:
    return f"{layout}+{BATCHES[REPLICAS]}+{FP64}+guard(snapshot_every=3)"


def wait_for_snapshot(job: Spread, step: int, *, attempt: int) -> None:
    """Return when a snapshot of this step, or a later one, counts on its own hosts."""
    events = job.run_dir / f"attempt_{attempt}" / "worker_0" / "events.jsonl"

    def is_kept() -> bool:
        told = map(json.loads, events.read_text().splitlines()) if events.exists() else ()
        return any(one["event"] == "StateKept" and one["step"] >= step for one in told)

    until(is_kept, job.head, f"there was no snapshot of step {step} or later")


def assert_unharmed(job: Spread) -> list[dict[str, Any]]:
    """Returns how the attempts after the first began."""
    run, like = job.end(), undisturbed(REPLICAS)
    assert run.code == 0, job.outputs()
    assert [row["step"] for row in run.metrics()] == [row["step"] for row in like.metrics()], job.outputs()
    assert run.losses() == pytest.approx(like.losses(), rel=1e-9)
    return restarts(run)


@needs_network
def test_a_worker_lost_on_one_host_and_then_the_whole_host_cost_the_steps_since_the_snapshot(
    hosts: list[NamespaceHost], tmp_path: Path
) -> None:
    faults = [fault(1, 5, "backward")]
    job_fields = {**JOB, "workers": 2}
    with spread(
        tmp_path, hosts[0], program=REPLICAS, plan=plan("shard=2"), job=job_fields, gate=GATE, faults=faults, pause_s=0
    ) as job:
        job.start(hosts[0])
        west = job.start(hosts[1])
        wait_for_snapshot(job, 6, attempt=2)
        marks = [tmp_path / f"arrived_{rank}" for rank in range(2)]
        until(
            lambda: all(mark.exists() for mark in marks),
            job.head,
            "a snapshot did not arrive on the other host",
        )
        west.process.kill()
        job.head.says("the hosts that are left have room for 1 of the 2 workers: waiting up to 60 s for another host")
        again = job.start(hosts[1])
        job.open_gate()
        first, second = assert_unharmed(job)
        assert again.end() == 0, again.output
    assert (first["source"], first["step"], first["at_step"], first["lent"]) == ("memory", 3, 4, [])
    assert "both workers start again at step 3 from each host's own memory, 1 step is done again, no disk read" in (
        job.head.output.replace("\n", " ")
    )
    assert (second["source"], second["lent"]) == ("memory", [1])
    assert second["step"] in (6, 9) and second["step"] <= second["at_step"] < GATE
    assert "from each host's own memory, worker 1 from a neighbor's" in job.head.output.replace("\n", " ")
    assert not (job.run_dir / "checkpoints").exists()


@pytest.mark.further
@needs_network
def test_an_elastic_run_whose_only_replica_loses_a_host_begins_again_on_those_that_are_left(
    hosts: list[NamespaceHost], tmp_path: Path
) -> None:
    east, west = hosts
    north = dataclasses.replace(east, name="north")  # a second supervisor on one machine is another host
    fields = {**JOB, "workers": 2}
    with spread(tmp_path, east, program=REPLICAS, plan=plan("replicas=1-1+shard=2"), job=fields, gate=7) as job:
        job.start(east)
        lost = job.start(west)
        wait_for_snapshot(job, 6, attempt=1)
        spare = job.start(north)
        job.head.says(f"host north ({east.address}) has joined: its slots are spare")
        lost.process.kill()
        job.head.says(f"host west ({west.address}) was lost: ")
        job.open_gate()
        (only,) = assert_unharmed(job)
        assert spare.end() == 0, spare.output
    assert (only["source"], only["workers"], only["hosts"], only["lent"]) == ("memory", 2, 2, [1]), job.outputs()
    assert only["step"] in (3, 6) and only["at_step"] in (6, 7)  # its gate is behind the commit of step 7
    assert "waiting up to" not in job.head.output
    steps = [json.loads(line) for line in (tmp_path / "north/run/attempt_2/worker_1/ledger.jsonl").open()]
    assert [line["step"] for line in steps if "step" in line] == list(range(only["step"] + 1, 13))
