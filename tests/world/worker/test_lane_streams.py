"""Streams that are read in lanes: the same samples in each step on any workers, and after any resume."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import quick
from forked import WorkersFailed, World
from paceline import ShardedStream
from paceline.monitor.audit.audit import audit
from paceline.plan import Batch, Layout, LocalSGD, Plan
from seen_samples import Numbers, joined, merged, seen
from stream_shards import COUNTS, ShardStream

LENGTHS = [23, 17, 0, 30, 15]  # 85
PLAN = Plan(batch=Batch(size=10, micro=2))


def everything(epochs: int = 1) -> list[float]:
    return sorted(
        shard * 1000.0 + number + epoch / 2
        for epoch in range(epochs)
        for shard, length in enumerate(LENGTHS)
        for number in range(length)
    )


def stream(worker: Any, **options: Any) -> Any:
    return seen(worker, ShardStream(LENGTHS), epochs=2, **options)


def read_of(worker: Any, **options: Any) -> tuple[Any, int]:
    """What was seen, and how many items this worker's process has read for it."""
    COUNTS["read"] = 0
    return seen(worker, ShardStream([200] * 8), **options), COUNTS["read"]


@pytest.mark.parametrize(
    ("workers", "loaders"), [(2, 0), (3, 2), quick.further(3, 0), quick.further(2, 1), quick.further(1, 3)]
)
def test_each_item_once_and_the_same_steps_on_any_workers(world: World, workers: int, loaders: int) -> None:
    alone = merged([world.one_process(stream, PLAN)])
    assert sorted(joined(alone.values())) == everything(2)
    assert [len(values) for values in alone.values()] == ([10] * 8 + [5]) * 2
    assert merged(world(lambda worker: stream(worker, loaders=loaders), workers, PLAN)) == alone
    assert audit(world.run_dir).is_clean


def test_what_a_stream_draws_is_the_same_wherever_it_is_read(world: World) -> None:
    def noisy(worker: Any, loaders: int = 0) -> Any:
        return seen(worker, ShardStream(LENGTHS, noisy=True), loaders=loaders)

    alone = merged([world.one_process(noisy, PLAN)])
    assert merged(world(lambda worker: noisy(worker, 2), 3, PLAN, max_steps=5)) == {
        key: values for key, values in alone.items() if key[1] <= 5
    }
    assert merged(world(noisy, 2, PLAN)) == {key: values for key, values in alone.items() if key[1] > 5}


@pytest.mark.parametrize(
    ("first", "second", "steps"), [(3, 2, 12), *[quick.further(*one) for one in ((1, 3, 4), (2, 2, 11), (2, 1, 9))]]
)
def test_a_resume_goes_on_with_the_same_samples_on_other_workers(
    world: World, first: int, second: int, steps: int
) -> None:
    alone = merged([world.one_process(stream, PLAN)])
    before = merged(world(stream, first, PLAN, max_steps=steps))
    after = merged(world(lambda worker: stream(worker, loaders=2), second, PLAN))
    assert {**before, **after} == alone and not set(before) & set(after)
    assert audit(world.run_dir).is_clean


def test_a_worker_reads_its_part_and_a_resume_nearly_nothing_again(world: World) -> None:
    plan = Plan(batch=Batch(size=16, micro=2))
    before = world(read_of, 2, plan, max_steps=79)
    assert all(79 * 8 <= count <= 81 * 8 for _, count in before), "each reads half of the items"
    after = world(read_of, 1, plan, max_steps=81)
    assert after[0][1] <= (8 + 3) * 16, "the states are of the last eight steps"


def test_another_batch_size_goes_on_where_the_first_one_stood(world: World) -> None:
    before = merged(world(stream, 2, PLAN, max_steps=4))
    after = merged(world(stream, 2, Plan(batch=Batch(size=7, micro=2))))
    assert sorted(joined({**before, **after}.values())) == everything(2)
    assert audit(world.run_dir).is_clean


def test_replicas_that_take_steps_by_themselves_have_the_same_samples(world: World) -> None:
    plan = Plan(batch=PLAN.batch, sync=LocalSGD(every=3))
    alone = merged([world.one_process(stream, PLAN)])
    before = merged(world(stream, 2, plan, max_steps=6))
    after = merged(world(stream, 3, plan))
    assert {**before, **after} == alone


@pytest.mark.parametrize("layout", [Layout(replicas=2, shard=2)], ids=str)
def test_split_replicas_share_the_lanes(world: World, layout: Layout) -> None:
    def steps(worker: Any) -> list[float]:
        torch.manual_seed(0)
        model = worker.prepare(torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Linear(4, 2)))
        optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
        step = worker.stepper(model, optim, forward=lambda model, micro: (model(micro[0]) ** 2).mean())
        return [float(step(batch)) for batch in worker.batches(ShardStream(LENGTHS))]

    whole = world.one_process(steps, PLAN)
    assert world(steps, 4, Plan(batch=PLAN.batch, layout=layout))[0] == pytest.approx(whole, rel=1e-4)


class Plain:
    """A shard without a state: it is read again."""

    def __init__(self, shard: int, num_shards: int) -> None:
        self.shard, self.num_shards = shard, num_shards

    def __iter__(self) -> Iterator[Any]:
        numbers = Numbers(31)
        return (numbers[index] for index in range(self.shard, 31, self.num_shards))


class Whole:
    """An iterable with a state that cannot be cut: one lane."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[Any]:
        numbers = Numbers(31)
        while self.given < 31:
            self.given += 1
            yield numbers[self.given - 1]
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: ShardedStream(Plain, shards=3),
        Whole,
        lambda: ShardedStream.of_files(
            [range(0, 9), range(9, 9), range(9, 31)], lambda part: [Numbers(31)[i] for i in part]
        ),
    ],
    ids=["no state", "one lane", "files"],
)
def test_other_streams_resume_exactly_too(world: World, make: Any) -> None:
    def run(worker: Any) -> Any:
        return seen(worker, make(), epochs=2)

    alone = merged([world.one_process(run, PLAN)])
    assert sorted(joined(alone.values())) == sorted([*range(31)] * 2)
    before = merged(world(run, 2, PLAN, max_steps=2))
    assert {**before, **merged(world(run, 3, PLAN))} == alone


def noisy_numbers(part: range) -> Iterator[Any]:
    for number in part:
        yield torch.tensor([number + float(torch.rand(())) / 2]), torch.tensor([0.0])


def test_random_numbers_of_reading_files_are_drawn_again_after_a_resume(world: World) -> None:
    """The first state is tried at the ninth step."""

    def run(worker: Any) -> Any:
        return seen(worker, ShardedStream.of_files([range(70), range(70, 140)], noisy_numbers))

    alone = merged([world.one_process(run, PLAN)])
    assert sorted(map(int, joined(alone.values()))) == list(range(140))
    before = merged(world(run, 2, PLAN, max_steps=11))
    assert {**before, **merged(world(run, 1, PLAN))} == alone


def files_of(folder: Path, number: int) -> list[Path]:
    """Files 0, 2, 4, ...: each has ten samples."""
    folder.mkdir(exist_ok=True)
    for file in range(0, 2 * number, 2):
        (folder / f"{file:02}.txt").write_text("\n".join(str(file * 100 + sample) for sample in range(10)))
    return sorted(folder.glob("*.txt"))


def lines_of(path: Path) -> Iterator[Any]:
    for line in path.read_text().splitlines():
        yield torch.tensor([float(line)]), torch.tensor([0.0])


def of_paths(worker: Any, files: list[Path], *, shards: int | None = 2, epochs: int = 1) -> Any:
    return seen(worker, ShardedStream.of_files(files, lines_of, shards=shards), epochs=epochs)


def test_a_file_that_was_added_is_refused_in_an_epoch_that_has_begun(world: World, tmp_path: Path) -> None:
    files = files_of(tmp_path / "data", 4)
    before = merged(world(lambda worker: of_paths(worker, files), 2, PLAN, max_steps=2))
    added = tmp_path / "data" / "01.txt"
    added.write_text("1")
    with pytest.raises(
        WorkersFailed, match=r"lanes 2 of 4 files \w+; now it has .*lanes 2 of 5 files \w+.*dataset and f"
    ):
        world(lambda worker: of_paths(worker, sorted([*files, added])), 1, PLAN)
    moved = files_of(tmp_path / "elsewhere", 4)
    after = merged(world(lambda worker: of_paths(worker, moved), 1, PLAN))
    assert sorted(joined({**before, **after}.values())) == [
        file * 100.0 + n for file in (0, 2, 4, 6) for n in range(10)
    ]


def test_the_next_epoch_may_have_other_files(world: World, tmp_path: Path) -> None:
    files = files_of(tmp_path / "data", 5)
    world(lambda worker: of_paths(worker, files[:3], shards=None), 2, PLAN)
    after = merged(world(lambda worker: of_paths(worker, files, shards=None, epochs=2), 2, PLAN))
    assert {epoch for epoch, _ in after} == {1}
    assert sorted(joined(after.values())) == [file * 100.0 + n for file in range(0, 10, 2) for n in range(10)]


def test_workers_that_list_other_files_are_stopped_before_the_first_step(world: World, tmp_path: Path) -> None:
    files = files_of(tmp_path / "data", 4)
    with pytest.raises(WorkersFailed) as failed:
        world(lambda worker: of_paths(worker, files[worker.rank :][:3]), 2, PLAN)
    assert sorted(failed.value.errors) == [0, 1]
    assert all("files = worker.gather(files)[0]" in text for text in failed.value.errors.values())


def test_an_empty_stream_is_an_error_on_all_workers(world: World) -> None:
    with pytest.raises(WorkersFailed) as failed:
        world(lambda worker: seen(worker, ShardStream([0, 0, 0])), 2, PLAN)
    assert sorted(failed.value.errors) == [0, 1]
    assert all("is empty: it gave no item" in text for text in failed.value.errors.values())


def test_shards_that_differ_between_workers_are_an_error_on_all(world: World) -> None:
    def odd(worker: Any) -> Any:
        def make(shard: int, num_shards: int) -> Iterable[Any]:
            return [Numbers(40)[0]] * (20 + worker.rank)

        return seen(worker, ShardedStream(make, shards=1))

    with pytest.raises(WorkersFailed) as failed:
        world(odd, 2, PLAN)
    assert sorted(failed.value.errors) == [0, 1]
    assert all("a shard must give the same items wherever it is read" in text for text in failed.value.errors.values())


class Buffered:
    """Its state lacks what it has read ahead."""

    def __init__(self, shard: int, num_shards: int) -> None:
        self.given, self.numbers = 0, Numbers(400)

    def __iter__(self) -> Iterator[Any]:
        ahead = [self.numbers[self.given + one] for one in range(4)]
        self.given += 4
        while self.given < 400:
            ahead.append(self.numbers[self.given])
            self.given += 1
            yield ahead.pop(0)
        yield from ahead

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


def test_a_state_that_does_not_bring_back_the_samples_is_refused(world: World) -> None:
    def run(worker: Any, **options: Any) -> Any:
        return seen(worker, ShardedStream(Buffered, shards=1, **options))

    with pytest.raises(WorkersFailed, match=r"does not bring back the samples behind it.*uses_state=False"):
        world(run, 1, PLAN, save_at_end=False)
    plain = merged(world(lambda worker: run(worker, uses_state=False), 1, PLAN, max_steps=12, fresh=True))
    rest = merged(world(lambda worker: run(worker, uses_state=False), 2, PLAN))
    assert joined({**plain, **rest}.values()) == list(range(400))


def test_drop_last_drops_the_short_step_of_each_epoch(world: World) -> None:
    plan = Plan(batch=Batch(size=10, micro=2, drop_last=True))
    found = merged(world(stream, 2, plan))
    assert [len(values) for values in found.values()] == [10] * 16
