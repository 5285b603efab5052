"""Workers whose tensors take a device's way are lost inside a collective: the others go on, with the same losses.

A stand-in behaves as NCCL's documentation says (`tests/support/fake_nccl.py`): without an abort from outside each of
these runs would stand still for ever.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import quick
from elastic_runs import LIMIT_S, PROGRAM, assert_unharmed, trained

REPLICAS = PROGRAM.with_name("replica_program.py")

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


INSIDE_S = 2.0  # before the worker is lost: meanwhile the others come into the collective, also on a busy machine


@pytest.mark.parametrize(
    ("way", "where"),
    [
        ("device", "backward"),  # the others are in the sum, which never ends
        ("device", "average"),  # nothing but the vote keeps its numbers from the script
        quick.further("device", "weights"),  # the others receive the first one's weights
        quick.further("device", "sum"),
        quick.further("device", "vote"),
        quick.further("device", "committed"),
        quick.further("device", "regroup"),
        quick.further("staged", "sum"),
    ],
)
def test_a_worker_killed_in_a_collective_of_devices_costs_no_step(tmp_path: Path, way: str, where: str) -> None:
    step = 1 if where == "weights" else 6
    faults: list[dict[str, Any]] = [{"worker": 2, "step": step, "where": "backward" if where == "regroup" else where}]
    if where in ("backward", "average", "weights"):
        faults[0]["pause_s"] = INSIDE_S
    if where == "regroup":
        faults.append({"worker": 3, "step": 6, "where": where})
    joins = {"whole": [9, 4]} if len(faults) == 1 else {}
    run = trained(tmp_path / "a", *faults, way=way, averages=where == "average", **joins)
    assert_unharmed(run)
    regrouped = run.events("Regrouped")
    assert regrouped and all(event["steps_lost"] == 0 for event in regrouped)
    if joins:
        assert run.workers() == [0, 1, 2, 3], "in the end one is there that took the place of the lost one"
    connected, aborted = (len(list(run.folder.glob(f"{word}_*"))) for word in ("connected", "aborted"))
    if way == "staged":
        assert connected == 0
    else:  # four members, then three or two, and mostly four again
        assert connected >= 4 + (3 + 4 if joins else 2)
    if way == "device" and where in ("backward", "average", "weights"):
        assert aborted == 3, "each of the others had to abort its own communicator, inside the collective"


@pytest.mark.further
def test_a_worker_whose_device_cannot_be_stopped_ends_and_the_others_go_on(tmp_path: Path) -> None:
    run = trained(tmp_path / "a", {"worker": 2, "step": 6, "where": "backward"}, way="device", refuses=1, whole=[9, 4])
    assert_unharmed(run)
    lost = {event["rank"]: event["reason"] for event in run.events("WorkerLost")}
    assert lost.keys() == {1, 2} and "this worker's device did not end its collectives" in lost[1]


@pytest.mark.further
@pytest.mark.parametrize("where", ["backward", "average", "weights"])
def test_replicas_of_several_workers_exchange_on_devices_between_each_other(tmp_path: Path, where: str) -> None:
    rest = "+batch(size=12,micro=2)+compute(precision=fp64)"
    alone = trained(tmp_path / "one", program=REPLICAS, plan=f"replicas=1{rest}", job={"workers": 1})
    fault = {"worker": 3, "step": 1 if where == "weights" else 6, "where": where}
    run = trained(
        tmp_path / "a", fault, program=REPLICAS, plan=f"replicas=1-2,shard=2{rest}", way="device", averages=True
    )
    assert run.code == 0, run.output
    assert run.losses() == pytest.approx(alone.losses(), rel=1e-9)
    assert run.events("WorkerLost")[0]["rank"] == 3 and list(run.folder.glob("connected_*"))
