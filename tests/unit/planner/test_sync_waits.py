"""Waits of workers that share processors grow with the square root of the work between them."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.plan import LocalSGD
from paceline.planner.axes import Axes
from paceline.planner.case import Case
from paceline.planner.cluster import Cluster, catalogue
from paceline.planner.constants import Constants
from paceline.planner.model_costs import transformer
from paceline.planner.predict import COMPUTED, Workload
from paceline.planner.software import EAGER
from paceline.planner.sync_waits import sync_waits_s, synchronisations

MODEL = transformer(layers=4, hidden=256, heads=4, sequence=64, vocabulary=1000)
DEVICE = dataclasses.replace(catalogue().device("h100"), is_synchronous=True, sync_wait=0.01)


def case(axes: Axes, **changes: object) -> Case:
    cluster = Cluster(device=DEVICE, hosts=1, devices_per_host=4, network=1e9)
    usual = Case(model=MODEL, cluster=cluster, axes=axes, micro_batch=4, micro_batches=3, software=EAGER)
    return dataclasses.replace(usual, **changes)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("axes", "count"),
    [
        (Axes(replicas=4, zero=0), 1),
        (Axes(shard=4, zero=1), 1),
        (Axes(shard=4, zero=3), 1 + 2 * 4 * 3),
        (Axes(tensor=4, zero=0), 4 * 4 * 3),
        (Axes(stages=4, zero=0), 2 * 3),
        (Axes(replicas=2, stages=2, zero=0), 1 + 2 * 3),
        (Axes(tensor=2, stages=2, zero=0), 4 * 2 * 3 + 2 * 3),
    ],
    ids=str,
)
def test_layouts_synchronise_as_often_as_their_collectives_follow_compute(axes: Axes, count: int) -> None:
    assert synchronisations(case(axes)) == count
    assert sync_waits_s(case(axes), 4.0) == pytest.approx(0.01 * (count * 4.0) ** 0.5)


def test_local_sgd_waits_once_in_so_many_steps() -> None:
    assert synchronisations(case(Axes(replicas=4, zero=0), sync=LocalSGD(every=8))) == 1 / 8


def test_waits_are_part_of_the_step_where_they_were_measured() -> None:
    waiting = Workload(case(Axes(replicas=2, tensor=2, zero=0))).predict(Constants())
    compute_s = sum(waiting.parts[name] for name in COMPUTED)
    assert waiting.parts["straggle"] == pytest.approx(0.01 * ((1 + 4 * 4 * 3) * compute_s) ** 0.5)
    alone = Workload(case(Axes())).predict(Constants())
    assert alone.parts["straggle"] == 0.0
    device = dataclasses.replace(DEVICE, sync_wait=None)
    other = Cluster(device=device, hosts=1, devices_per_host=4, network=1e9)
    assert Workload(case(Axes(replicas=4, zero=0), cluster=other)).predict(Constants()).parts["straggle"] == 0.0
