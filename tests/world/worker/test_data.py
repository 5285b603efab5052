"""Samples: each once per epoch, on any number of workers, after any resume; iterables; evaluation."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

import quick
from forked import WorkersFailed, World
from paceline.errors import SyncError
from paceline.events import Warned, decode
from paceline.monitor.audit.audit import audit
from paceline.plan import Batch, Layout, Plan
from seen_samples import Lines, Numbers, joined, merged, seen


class Augmented(Numbers):
    """Draws from all three generators for each sample."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = float(torch.rand(())) + random.random() + float(np.random.rand())
        return torch.tensor([index + noise / 10]), torch.tensor([0.0])


SPREAD = [(2, True), (3, False), *[quick.further(*case) for case in ((1, True), (2, False), (3, True))]]


@pytest.mark.parametrize(("workers", "has_loaders"), SPREAD)
def test_every_sample_once_in_an_order_that_does_not_depend_on_workers(
    world: World, workers: int, has_loaders: bool
) -> None:
    plan, loaders = Plan(batch=Batch(size=8, micro=3)), 2 if has_loaders else 0
    results = merged(world(lambda worker: seen(worker, Numbers(29), epochs=2, loaders=loaders), workers, plan))
    for epoch in range(2):
        samples = joined(values for (e, _), values in results.items() if e == epoch)
        assert sorted(samples) == list(range(29))
    assert results == world.one_process(lambda worker: seen(worker, Numbers(29), epochs=2), plan)
    assert audit(world.run_dir).is_clean


@pytest.mark.parametrize("loaders", [0, 2])
def test_augmentation_is_the_same_wherever_a_sample_is_read(world: World, loaders: int) -> None:
    plan = Plan(batch=Batch(size=8, micro=2))
    results = merged(world(lambda worker: seen(worker, Augmented(21), epochs=2, loaders=loaders), 3, plan))
    assert results == world.one_process(lambda worker: seen(worker, Augmented(21), epochs=2), plan)
    first, second = (sorted(joined(v for (e, _), v in results.items() if e == epoch)) for epoch in range(2))
    assert first != second  # another draw in each epoch


def test_without_shuffle_samples_come_in_order_and_drop_last_leaves_the_rest(world: World) -> None:
    plan = Plan(batch=Batch(size=8, micro=4, shuffle=False, drop_last=True))
    results = merged(world(lambda worker: seen(worker, Numbers(21)), 2, plan))
    assert joined(results.values()) == list(range(16))
    assert audit(world.run_dir).is_clean


def test_any_collate_function_and_dictionaries(world: World) -> None:
    class Rows(Numbers):
        def __getitem__(self, index: int) -> Any:
            return {"x": [float(index)] * (1 + index % 3)}

    def pad(rows: list[dict[str, list[float]]]) -> dict[str, Any]:
        width = max(len(row["x"]) for row in rows)
        return {
            "x": torch.tensor([row["x"] + [0.0] * (width - len(row["x"])) for row in rows]),
            "names": [str(row) for row in rows],
        }

    def train(worker: Any) -> list[float]:
        model = worker.prepare(nn.Linear(1, 1))
        optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=1e-4))
        step = worker.stepper(model, optim, forward=lambda m, micro: m(micro["x"].mean(1, keepdim=True)).pow(2).mean())
        return [float(step(batch)) for batch in worker.batches(Rows(20), collate=pad)]

    plan = Plan(batch=Batch(size=8, micro=2))
    assert world(train, 2, plan)[0] == pytest.approx(world.one_process(train, plan), rel=1e-5)


@pytest.mark.parametrize(("workers", "has_loaders"), SPREAD)
def test_iterable_datasets_give_each_item_once(world: World, workers: int, has_loaders: bool) -> None:
    plan, loaders = Plan(batch=Batch(size=8, micro=3)), int(has_loaders)
    results = merged(world(lambda worker: seen(worker, Lines(21), epochs=2, loaders=loaders), workers, plan))
    assert joined(results.values()) == list(range(21)) * 2
    assert results == world.one_process(lambda worker: seen(worker, Lines(21), epochs=2), plan)


def test_an_iterable_that_differs_between_workers_is_an_error_on_all_and_no_hang(world: World) -> None:
    with pytest.raises(WorkersFailed) as failed:
        world(lambda worker: seen(worker, Lines(21 + 2 * worker.rank)), 2, Plan(batch=Batch(size=8, micro=3)))
    assert sorted(failed.value.errors) == [0, 1]
    assert all("the same items in the same order on every worker" in text for text in failed.value.errors.values())


@pytest.mark.parametrize(
    ("dataset", "options", "says"),
    [
        (iter([1]), {}, "got an iterator, which can be read only once"),
        (7, {}, "got a int: a dataset needs"),
        (Numbers(0), {}, "the dataset of stream 'train' is empty"),
        (Lines(3), {"loaders": 2}, "loaders=2: an iterable dataset"),
        (Numbers(3), {"epochs": 0}, "epochs is 0"),
        (Numbers(3), {"loaders": -1}, "loaders=-1"),
    ],
)
def test_unusable_data_is_refused_with_the_remedy(
    world: World, dataset: Any, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(WorkersFailed, match=says):
        world(lambda worker: next(worker.batches(dataset, **options)), 1, Plan(batch=Batch(size=2)))


def test_an_error_in_a_loader_process_carries_the_datasets_traceback(world: World) -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            raise KeyError(f"no file for sample {index}")

    with pytest.raises(WorkersFailed, match=r"no file for sample \d+"):
        world(lambda worker: seen(worker, Broken(5), loaders=1), 1, Plan(batch=Batch(size=2)))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *[(1, 3), (2, 1), (3, 2)],
        *[quick.further(*case) for case in ((1, 1), (1, 2), (2, 2), (2, 3), (3, 1), (3, 3))],
    ],
)
def test_a_run_continues_on_any_number_of_workers_with_every_sample_once(world: World, first: int, second: int) -> None:
    plan = Plan(batch=Batch(size=8, micro=3))
    before = merged(world(lambda worker: seen(worker, Numbers(29), epochs=2), first, plan, max_steps=5))
    after = merged(world(lambda worker: seen(worker, Numbers(29), epochs=2), second, plan))
    whole = world.one_process(lambda worker: seen(worker, Numbers(29), epochs=2), plan)
    assert {**before, **after} == whole
    assert not set(before) & set(after)
    assert audit(world.run_dir).is_clean


def test_an_iterable_continues_after_a_resume(world: World) -> None:
    plan = Plan(batch=Batch(size=8, micro=3))
    before = merged(world(lambda worker: seen(worker, Lines(29), epochs=2), 2, plan, max_steps=5))
    after = merged(world(lambda worker: seen(worker, Lines(29), epochs=2), 3, plan))
    assert joined({**before, **after}.values()) == list(range(29)) * 2


def test_two_streams_in_turn_and_their_positions(world: World) -> None:
    def train(worker: Any) -> list[tuple[str, int, float]]:
        model = worker.prepare(nn.Linear(1, 1))
        optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=1e-5))
        step = worker.stepper(model, optim, F.mse_loss)
        found = []
        for name, count in (("warm-up", 10), ("main", 20)):
            for batch in worker.batches(Numbers(count), name=name):
                found.append((name, batch.step, float(step(batch))))
        return found

    plan = Plan(batch=Batch(size=4, micro=2))
    whole = world.one_process(train, plan)
    before, after = world(train, 2, plan, max_steps=5)[0], world(train, 1, plan)[0]
    assert [(n, s) for n, s, _ in before + after] == [(n, s) for n, s, _ in whole]
    assert [loss for *_, loss in before + after] == pytest.approx([loss for *_, loss in whole], rel=1e-4)
    assert audit(world.run_dir).is_clean


def test_evaluation_counts_every_sample_once_on_any_number_of_workers(world: World) -> None:
    def measure(worker: Any) -> dict[str, float]:
        model = worker.prepare(nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1)))
        model[0].eval()
        result = worker.evaluate(
            model,
            Numbers(10),
            {
                "loss": F.mse_loss,
                "above": lambda output, target: ((output > 0).sum(), len(output)),
                "count": lambda output, target: (float(len(output)), 1.0 / 10 * len(output)),
            },
            micro=4,
        )
        assert model.training and not model[0].training  # modes are as before
        return result

    oracle = world.one_process(measure)
    for result in world(measure, 3):
        assert result == pytest.approx(oracle, rel=1e-6)
        assert result["count"] == pytest.approx(10.0)


@pytest.mark.parametrize("layout", [Layout(replicas=2), Layout(replicas=1, stages=2)], ids=str)
def test_a_measure_that_fills_a_list_is_warned_of(world: World, layout: Layout) -> None:
    def measure(worker: Any) -> int:
        model = worker.prepare(nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1)))
        scores: list[float] = []

        def kept(output: Tensor, target: Tensor) -> Tensor:
            scores.extend(output.flatten().tolist())
            return F.mse_loss(output, target)

        worker.evaluate(model, Numbers(10), F.mse_loss, micro=4)
        worker.evaluate(model, Numbers(10), {"kept": kept}, micro=4)
        return len(scores)

    assert sum(world(measure, 2, Plan(layout=layout), save_at_end=False)) == 10
    told = [
        [event.text for line in log.read_text().splitlines() if isinstance(event := decode(line).event, Warned)]
        for log in sorted(world.run_dir.glob("attempt_1/worker_*/events.jsonl"))
    ]
    (text,) = told[-1]
    assert "keeps something of its own (kept: scores)" in text
    assert "worker.gather(...)" in text


def test_collective_conveniences(world: World) -> None:
    def talk(worker: Any) -> Any:
        worker.wait()
        average = float(worker.average(float(worker.rank)))
        return average, worker.gather({"rank": worker.rank})

    assert world(talk, 3) == [(1.0, [{"rank": 0}, {"rank": 1}, {"rank": 2}])] * 3


@pytest.mark.parametrize(
    ("count", "drop_last", "says"),
    [
        (0, False, "the iterable dataset of stream 'train' is empty: it gave no item in its first epoch"),
        (5, True, "gave fewer than 8 items in its first epoch, and Batch(size=8, drop_last=True) drops them all"),
    ],
    ids=["empty", "dropped"],
)
def test_an_iterable_that_makes_no_step_is_an_error_on_all_workers(
    world: World, count: int, drop_last: bool, says: str
) -> None:
    with pytest.raises(WorkersFailed) as failed:
        world(lambda worker: seen(worker, Lines(count)), 2, Plan(batch=Batch(size=8, micro=2, drop_last=drop_last)))
    assert sorted(failed.value.errors) == [0, 1]
    assert all(says in text for text in failed.value.errors.values())


def test_names_of_torchs_loader_work_and_two_names_of_one_option_are_refused(world: World) -> None:
    def doubled(items: list[Any]) -> Any:
        x, y = default_collate(items)
        return 2 * x, y

    def run(worker: Any) -> tuple[list[float], list[str]]:
        data = TensorDataset(torch.ones(8, 3), torch.zeros(8))
        worker.prepare(nn.Linear(3, 1))
        said = list[str]()
        for both in ({"collate": doubled, "collate_fn": doubled}, {"loaders": 1, "num_workers": 2}):
            with pytest.raises(ValueError, match="two names of one option") as refused:
                worker.batches(data, **both)
            said.append(str(refused.value))
        sums = [float(x.sum()) for batch in worker.batches(data, collate_fn=doubled, num_workers=1) for x, _ in batch]
        return sums, said

    for sums, said in world(run, 1, Plan(batch=Batch(size=4, micro=4))):
        assert sums == [24.0, 24.0]
        assert "give collate" in said[0] and "loaders=1 and num_workers=2" in said[1]


def test_a_step_that_is_unpacked_like_one_pair_is_refused_with_what_to_write(world: World) -> None:
    def run(worker: Any) -> None:
        worker.prepare(nn.Linear(3, 1))
        for batch in worker.batches(TensorDataset(torch.ones(8, 3), torch.zeros(8))):
            with pytest.raises(TypeError, match=r"`x, y = batch` write `loss = step\(batch\)`"):
                _, _ = batch
            with pytest.raises(TypeError, match="is one step"):
                _, *_ = batch
            assert len(list(batch)) == len(batch)

    world(run, 1, Plan(batch=Batch(size=4, micro=2)))


WEIGHTS = [float(1 + index % 5) for index in range(29)] + [0.0]


def by_weights(worker: Any, *, as_tensor: bool = False) -> dict[tuple[int, int], list[float]]:
    return seen(worker, Numbers(30), epochs=2, weights=torch.tensor(WEIGHTS) if as_tensor else WEIGHTS)


def test_weighted_draws_are_the_same_on_any_workers_and_across_a_resume(world: World) -> None:
    plan = Plan(batch=Batch(size=8, micro=2, seed=3))
    alone = world.one_process(by_weights, plan)
    world(lambda worker: by_weights(worker, as_tensor=True), 2, plan, max_steps=3)
    rest = merged(world(by_weights, 3, plan))
    assert {step for _, step in rest} == set(range(4, 9))
    assert rest == {key: value for key, value in merged([alone]).items() if key in rest}
    drawn = joined(alone.values())
    assert len(drawn) == 60 and 29.0 not in drawn and len(set(drawn)) < 29
    found = audit(world.run_dir)
    assert found.verdict == "clean" and all(epoch.is_permutation is None for epoch in found.epochs)
    assert {epoch.state for epoch in found.epochs} == {"exact"} and all(epoch.weights for epoch in found.epochs)


def test_weights_that_do_not_fit_are_refused(world: World) -> None:
    def run(worker: Any) -> None:
        for weights, dataset, text in (
            ([1.0], Numbers(4), "1 numbers, and the dataset of stream 'train' has 4"),
            ([1.0], Lines(4), "no samples by number"),
        ):
            with pytest.raises(ValueError, match=text):
                worker.batches(dataset, weights=weights)
        with pytest.raises(SyncError, match=r"other weights on some workers.*worker.gather"):
            worker.batches(Numbers(4), weights=[1.0, 2.0, 3.0, 4.0 + worker.rank])

    world(run, 2, Plan(batch=Batch(size=4)))
