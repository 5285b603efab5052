"""Every way to agree does the same over several hosts, where no memory is common, as on one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import quick
from forked import Apart, World
from layout_runs import EXACT, in_one_epoch
from paceline.plan import AllReduce, Batch, Gossip, LocalSGD, Nesterov, ParameterServer, Plan

HOSTS = (0, 0, 1)
PLANS = [
    Plan(sync=AllReduce(op="adasum")),
    quick.further(Plan(sync=LocalSGD(every=2))),
    Plan(sync=LocalSGD(every=2, outer=Nesterov(lr=0.7, momentum=0.9))),
    quick.further(Plan(sync=LocalSGD(every=2, overlap=1))),
    Plan(sync=LocalSGD(every=2, fragments=2, overlap=1)),
    Plan(sync=Gossip(peers="ring")),
    Plan(sync=Gossip(peers="random", average_every=2)),
    quick.further(Plan(sync=ParameterServer(servers=2))),
    Plan(sync=ParameterServer(servers=2, mirrored=True)),
]


def where_servers_are(worker: Any) -> list[str]:
    in_one_epoch(worker)
    return [str(about["host"]) for _, about in sorted(worker._servers._addresses.items())]


def test_servers_are_on_both_hosts(tmp_path: Path) -> None:
    plan = Plan(sync=ParameterServer(servers=2), batch=Batch(size=16, micro=3))
    assert Apart(tmp_path, HOSTS)(where_servers_are, len(HOSTS), plan) == [["host0", "host1"]] * len(HOSTS)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_over_two_hosts_it_is_the_same_as_on_one(tmp_path: Path, plan: Plan) -> None:
    """Two workers on one host and one on another, uneven shares and a last partial batch."""
    plan = dataclasses.replace(plan, batch=Batch(size=16, micro=3), compute=EXACT)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one = World(tmp_path / "one")(in_one_epoch, len(HOSTS), plan)
    two = Apart(tmp_path / "two", HOSTS)(in_one_epoch, len(HOSTS), plan)
    for here, there in zip(two, one, strict=True):
        for key, values in there.items():  # where a replica had no share of the last batch, its loss is no number
            assert here[key] == pytest.approx(values, rel=1e-9, nan_ok=True), key
