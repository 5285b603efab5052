"""Mixtures of streams: the same samples in each step on any workers, after any resume, and what was drawn is told."""

from __future__ import annotations

import collections
from typing import Any

import pytest

import quick
from forked import WorkersFailed, World
from paceline import Mixture, ShardedStream, StreamMixture
from paceline.events import Note, decode
from paceline.monitor.audit.audit import audit
from paceline.plan import Batch, LocalSGD, Plan
from paceline.worker.bare.bare_batches import bare_batches
from seen_samples import Numbers, joined, merged, seen
from stream_shards import COUNTS, ShardStream

PLAN = Plan(batch=Batch(size=10, micro=2))
Steps = dict[Any, list[float]]


class Shifted(Numbers):
    """Numbers from 50,000 on."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + 50_000, y


def mixture(exhausted: Any = "repeat", **options: Any) -> StreamMixture:
    """Of 85 samples in lanes (below 5,000), 9 of a stream without a state (below 40,000), and 30 by number."""
    plain = ShardedStream.of_files([range(4), range(4, 9)], lambda part: [_far(one) for one in part])
    return StreamMixture(
        {"lanes": ShardStream([23, 17, 0, 30, 15]), "plain": plain, "map": Shifted(30)},
        weights={"lanes": 5, "plain": 1, "map": 2},
        exhausted=exhausted,
        **options,
    )


def _far(index: int) -> Any:
    x, y = Numbers(9)[index]
    return x + 30_000, y


def source_of(value: float) -> str:
    return "lanes" if value < 10_000 else "plain" if value < 40_000 else "map"


def notes(world: World) -> list[str]:
    log = world.run_dir / f"attempt_{world.attempt}" / "worker_0" / "events.jsonl"
    return [event.text for line in log.read_text().splitlines() if isinstance(event := decode(line).event, Note)]


@pytest.mark.parametrize(
    ("exhausted", "workers", "loaders"),
    [quick.further(*one) for one in (("drop", 2, 1), ("repeat", 2, 0), ("drop", 3, 2), ("stop", 2, 1))],
)
def test_the_same_steps_on_any_workers(world: World, exhausted: str, workers: int, loaders: int) -> None:
    def run(worker: Any, **options: Any) -> Steps:
        return seen(worker, mixture(exhausted), epochs=2, **options)

    alone = merged([world.one_process(run, PLAN)])
    assert merged(world(lambda worker: run(worker, loaders=loaders), workers, PLAN)) == alone
    assert audit(world.run_dir).is_clean
    values = joined(alone.values())
    counts = collections.Counter(map(source_of, values))
    if exhausted == "drop":
        assert counts == {"lanes": 170, "plain": 18, "map": 60}
        assert [len(one) for one in alone.values()] == ([10] * 12 + [4]) * 2
    told = audit(world.run_dir).drawn["train"]
    assert told.counts == dict(counts) and told.until_step == len(alone)


@pytest.mark.parametrize(
    ("first", "second", "steps", "loaders"),
    [(3, 2, 13, 0), *[quick.further(*one) for one in ((1, 3, 4, 0), (2, 1, 9, 1), (3, 2, 13, 2))]],
)
def test_a_resume_goes_on_with_the_same_samples_and_counts(
    world: World, first: int, second: int, steps: int, loaders: int
) -> None:
    def run(worker: Any, **options: Any) -> Steps:
        return seen(worker, mixture(size=95), epochs=3, **options)

    alone = merged([world.one_process(run, PLAN)])
    assert [len(one) for one in alone.values()] == ([10] * 9 + [5]) * 3
    before = merged(world(run, first, PLAN, max_steps=steps))
    after = merged(world(lambda worker: run(worker, loaders=loaders), second, PLAN))
    assert {**before, **after} == alone and not set(before) & set(after)
    told = audit(world.run_dir).drawn["train"]
    assert told.counts == dict(collections.Counter(map(source_of, joined(alone.values()))))
    assert told.shares == {"lanes": 0.625, "plain": 0.125, "map": 0.25}


def test_a_resume_reads_nearly_nothing_again(world: World) -> None:
    def run(worker: Any) -> tuple[Any, int]:
        COUNTS["read"] = 0
        streams = {"a": ShardStream([400] * 4), "b": ShardStream([400] * 4)}
        return seen(worker, StreamMixture(streams, weights={"a": 3, "b": 1})), COUNTS["read"]

    plan = Plan(batch=Batch(size=16, micro=2))
    world(run, 2, plan, max_steps=79)
    after = world(run, 1, plan, max_steps=81)
    assert after[0][1] <= (8 + 3) * 16, "the states are of the last eight steps"


def test_weights_may_change_at_a_resume_and_no_sample_is_lost(world: World) -> None:
    def run(worker: Any, weight: float) -> Steps:
        streams = {"a": ShardStream([60, 60]), "b": Shifted(120)}
        return seen(worker, StreamMixture(streams, weights={"a": weight, "b": 1}, exhausted="drop"))

    before = merged(world(lambda worker: run(worker, 1), 2, PLAN, max_steps=8))
    after = merged(world(lambda worker: run(worker, 9), 2, PLAN))
    values = joined({**before, **after}.values())
    assert len(values) == len(set(values)) == 240
    assert sum(value < 10_000 for value in joined(list(after.values())[:8])) > 64
    assert any("goes on with other weights: a 90.00% (before: 50.00%)" in text for text in notes(world))


@pytest.mark.further
def test_replicas_that_take_steps_by_themselves_have_the_same_samples(world: World) -> None:
    plan = Plan(batch=PLAN.batch, sync=LocalSGD(every=3))

    def run(worker: Any) -> Steps:
        return seen(worker, mixture(size=95), epochs=2)

    alone = merged([world.one_process(run, PLAN)])
    before = merged(world(run, 2, plan, max_steps=6))
    assert {**before, **merged(world(run, 3, plan))} == alone


def test_what_a_mixture_by_number_has_drawn_is_told_too(world: World) -> None:
    def run(worker: Any) -> Steps:
        return seen(worker, Mixture({"a": Numbers(40), "b": Shifted(3)}, weights={"a": 3, "b": 1}, size=30), epochs=3)

    steps = merged(world(run, 2, PLAN, max_steps=5))
    rest = merged(world(run, 1, PLAN))
    counts = collections.Counter("b" if value > 10_000 else "a" for value in joined({**steps, **rest}.values()))
    assert audit(world.run_dir).drawn["train"].counts == dict(counts)


def test_an_empty_dataset_of_a_mixture_is_named_on_all_workers(world: World) -> None:
    def run(worker: Any) -> Steps:
        return seen(worker, StreamMixture({"a": ShardStream([60]), "none": ShardStream([0, 0])}))

    with pytest.raises(WorkersFailed) as failed:
        world(run, 2, PLAN)
    assert sorted(failed.value.errors) == [0, 1]
    assert all("dataset 'none' of the mixture is empty" in text for text in failed.value.errors.values())


def test_the_plain_torch_loop_reads_the_same_steps(world: World) -> None:
    """As `paceline parity` compares them."""
    alone = merged([world.one_process(lambda worker: seen(worker, mixture("repeat"), epochs=2), PLAN)])
    bare: Any = bare_batches(
        mixture("repeat"),
        PLAN.batch,
        stream="train",
        epochs=2,
        collate=None,
        weights=None,
        run_pass=lambda batch: (batch.read(micro) for micro in batch.micros),
    )
    steps = [(batch.epoch, [float(value) for x, _ in batch for value in x[:, 0]]) for batch in bare]
    assert steps == [(epoch, values) for (epoch, _), values in alone.items()]
