"""Graphs of torchdata's nodes: each epoch has its own order, wherever the graph begins anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler

import quick
from forked import World
from paceline.data.lane_sources import as_sharded_stream
from paceline.plan import Batch, Plan
from seen_samples import joined, merged, seen

PLAN = Plan(batch=Batch(size=10, micro=2))
SIZE = 35  # samples: an epoch has fewer steps than lie between two states
nodes: Any = pytest.importorskip("torchdata.nodes", reason="a package of the dev extra")


def sampler() -> Any:
    return DistributedSampler(range(SIZE), num_replicas=1, rank=0, seed=3)  # type: ignore[arg-type]  # it has a length


def in_order(*epochs: int) -> list[float]:
    found: list[float] = []
    for epoch in epochs:
        own = sampler()
        own.set_epoch(epoch)
        found.extend(map(float, own))
    return found


def plain() -> Any:
    return nodes.Loader(nodes.SamplerWrapper(sampler()))


def behind_threads() -> Any:
    wrapped = nodes.ParallelMapper(nodes.SamplerWrapper(sampler()), int, num_workers=2, method="thread")
    return nodes.Loader(nodes.Prefetcher(wrapped, prefetch_factor=4))


def collate(samples: list[Any]) -> Any:
    return torch.tensor([float(one) for one in samples]).unsqueeze(1), torch.zeros(len(samples), 1)


def run(worker: Any, make: Callable[[], Any], **options: Any) -> Any:
    return seen(worker, make(), collate=collate, epochs=3, **options)


@pytest.mark.parametrize(("make", "loaders"), [(plain, 0), (behind_threads, 1), quick.further(behind_threads, 0)])
def test_each_epoch_has_its_own_order_on_any_workers_and_after_a_resume(world: World, make: Any, loaders: int) -> None:
    alone = merged([world.one_process(lambda worker: run(worker, make), PLAN)])
    assert joined(alone.values()) == in_order(0, 1, 2)
    before = merged(world(lambda worker: run(worker, make, loaders=loaders), 2, PLAN, max_steps=6))
    after = merged(world(lambda worker: run(worker, make, loaders=loaders), 1, PLAN))
    assert {**before, **after} == alone and min(after) == (1, 7)


def first(root: Any, epoch: int, count: int) -> Any:
    """The first samples of an epoch, and the state behind them."""
    lane: Any = as_sharded_stream(root)
    lane = lane.open(0, epoch, 0, None)
    return [float(next(lane)) for _ in range(count)], lane.state()


def test_an_epoch_begins_anew_as_often_as_is_wanted() -> None:
    root = behind_threads().root
    for epoch in (1, 1, 0, 2):
        found, state = first(root, epoch, 20)
        assert found == in_order(epoch)[:20]
        rest = as_sharded_stream(root)
        assert rest is not None
        lane = rest.open(0, epoch, 20, state)
        assert [float(next(lane)) for _ in range(15)] == in_order(epoch)[20:]


def test_epochs_that_a_graph_counts_in_another_way_stay_its_own() -> None:
    root = nodes.SamplerWrapper(sampler(), initial_epoch=4, epoch_updater=lambda epoch: epoch + 5)
    for epoch, own in ((0, 4), (2, 14), (1, 9)):
        assert first(root, epoch, SIZE)[0] == in_order(own)


def mixed() -> Any:
    """As torchdata has it: which source has the turn is drawn by epoch, and the sources count their own."""
    sources = {"a": nodes.SamplerWrapper(sampler()), "b": nodes.IterableWrapper(range(100, 120))}
    return nodes.MultiNodeWeightedSampler(
        sources, {"a": 2.0, "b": 1.0}, "FIRST_DATASET_EXHAUSTED", rank=0, world_size=1
    )


def test_nodes_below_a_mixture_of_nodes_begin_their_epoch_too() -> None:
    one = nodes.Loader(mixed(), restart_on_stop_iteration=False)
    natural = [[float(value) for value in one] for _ in range(3)]
    assert natural[0] != natural[1]
    again = mixed()
    for epoch in (1, 0, 2, 2):
        assert first(again, epoch, len(natural[epoch]))[0] == natural[epoch]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: nodes.SamplerWrapper(DistributedSampler(range(8), num_replicas=2, rank=1)),  # type: ignore[arg-type]
            "DistributedSampler of the nodes has num_replicas=2.*num_replicas=1, rank=0",
        ),
        (lambda: nodes.MapStyleWrapper(list(range(8)), RandomSampler(range(8))), "a RandomSampler of the nodes draws"),
        (
            lambda: nodes.MultiNodeWeightedSampler(
                {"a": nodes.IterableWrapper(range(8))}, {"a": 1.0}, rank=0, world_size=2
            ),
            "MultiNodeWeightedSampler of the nodes has world_size=2",
        ),
    ],
)
def test_what_differs_between_workers_or_after_a_resume_is_refused(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        as_sharded_stream(nodes.Loader(make()))
