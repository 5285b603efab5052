"""A DataLoader that is given to `worker.batches`: the same steps on any number of workers, and after a resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler, SubsetRandomSampler, WeightedRandomSampler, get_worker_info

from forked import WorkersFailed, World
from paceline.data.mixture import Mixture
from paceline.events import Note, decode
from paceline.monitor.audit.audit import audit
from paceline.plan import Batch, Plan
from paceline.worker.data.evaluation_data import read_evaluation
from seen_samples import Numbers, merged, seen


class Halves(Sampler[int]):
    """An unknown one: draws some of the samples, others in each epoch."""

    def __iter__(self) -> Any:
        return iter(torch.randperm(29)[:21].tolist())

    def __len__(self) -> int:
        return 21


def notes(world: World) -> list[str]:
    log = world.run_dir / f"attempt_{world.attempt}" / "worker_0" / "events.jsonl"
    return [event.text for line in log.read_text().splitlines() if isinstance(event := decode(line).event, Note)]


@pytest.mark.parametrize("kind", ["shuffled", "sampler"])
def test_a_loaders_samples_are_the_same_on_any_workers_and_across_a_resume(world: World, kind: str) -> None:
    options: dict[str, Any] = {"sampler": Halves()} if kind == "sampler" else {"shuffle": True}
    loader = DataLoader(Numbers(29), 8, num_workers=1, **options)  # type: ignore[arg-type]

    def train(worker: Any) -> Any:
        return seen(worker, loader, epochs=2)

    alone = merged([world.one_process(train)])
    assert {len(values) for values in alone.values()} == {8, 29 % 8 if kind == "shuffled" else 21 % 8}
    before = merged(world(train, 2, max_steps=3))
    assert any("its batch_size of 8 samples over all workers" in text for text in notes(world))
    after = merged(world(train, 3))
    assert {**before, **after} == alone and not set(before) & set(after)
    if kind == "sampler":
        epochs = [sorted(v for (e, _), values in alone.items() if e == epoch for v in values) for epoch in (0, 1)]
        assert epochs[0] != epochs[1] and all(len(set(one)) == 21 for one in epochs)
    else:
        assert audit(world.run_dir).is_clean


class Opened(Numbers):
    scale = 0.0

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x * self.scale, y


def open_file(number: int) -> None:
    info: Any = get_worker_info()
    assert info is not None and info.id == number
    info.dataset.scale = 2.0  # as a worker_init_fn opens a file of the dataset


def test_a_worker_init_fn_is_given_the_users_dataset(world: World) -> None:
    loader = DataLoader(Opened(6), 6, num_workers=1, worker_init_fn=open_file)  # type: ignore[arg-type]
    (found,) = world(lambda worker: seen(worker, loader), 1)
    assert list(found.values()) == [[0.0, 2.0, 4.0, 6.0, 8.0, 10.0]]


def test_loaders_of_other_sizes_need_a_size_in_the_plan(world: World) -> None:
    def train(worker: Any, *sizes: int) -> Any:
        worker.prepare(torch.nn.Linear(1, 1))
        return [
            [batch.num_samples for batch in worker.batches(DataLoader(Numbers(16), size))]  # type: ignore[arg-type]
            for size in sizes
        ]

    assert world(lambda worker: train(worker, 8, 8), 1, save_at_end=False) == [[[8, 8], [8, 8]]]
    both = world(lambda worker: train(worker, 8, 4), 1, Plan(batch=Batch(size=16)), save_at_end=False)
    assert both == [[[16], [16]]]
    with pytest.raises(WorkersFailed, match="name the size of all in the plan"):
        world(lambda worker: train(worker, 8, 4), 1, save_at_end=False)


def test_weights_and_lengths_go_with_a_loader(world: World) -> None:
    loader = DataLoader(Numbers(32), 8, shuffle=True)  # type: ignore[arg-type]
    lengths = [float(index // 2) for index in range(32)]

    def train(worker: Any) -> Any:
        return seen(worker, loader, epochs=2, lengths=lengths)

    alone = merged([world.one_process(train)])
    assert merged(world(train, 2)) == alone
    assert audit(world.run_dir).is_clean
    for epoch in (0, 1):
        steps = [sorted(values) for (e, _), values in alone.items() if e == epoch]
        assert sorted(steps) == [[float(8 * part + one) for one in range(8)] for part in range(4)]


def test_a_mixture_is_the_same_on_any_workers_and_across_a_resume(world: World) -> None:
    plan = Plan(batch=Batch(size=8, micro=2))

    def train(worker: Any) -> Any:
        mixture = Mixture({"a": Numbers(40), "b": Numbers(3)}, weights={"a": 1, "b": 1}, size=30)
        return seen(worker, mixture, epochs=3)

    alone = merged([world.one_process(train, plan)])
    assert {len(values) for values in alone.values()} == {8, 30 % 8}
    before = merged(world(train, 2, plan, max_steps=6))
    assert {**before, **merged(world(train, 3, plan))} == alone
    assert audit(world.run_dir).is_clean


def test_evaluate_takes_a_loader_and_counts_each_sample_once(world: World) -> None:
    def collate(items: list[Any]) -> Any:
        return torch.stack([x for x, _ in items]) * 2, torch.zeros(len(items), 1)

    loader = DataLoader(Numbers(29), 8, collate_fn=collate, num_workers=1, drop_last=True)  # type: ignore[arg-type]
    part = DataLoader(Numbers(29), 4, sampler=SubsetRandomSampler([28, 3, 5]))  # type: ignore[arg-type]
    sizes: list[int] = []

    def run(worker: Any) -> Any:
        model = worker.prepare(torch.nn.Identity())

        def mean(output: torch.Tensor, target: torch.Tensor) -> Any:
            sizes.append(len(output))
            return output.sum(), len(output)

        found = worker.evaluate(model, loader, {"mean": mean})["mean"], max(sizes)
        own = worker.evaluate(model, loader, {"mean": mean}, micro=3, collate=None)["mean"]
        return *found, own, worker.evaluate(model, part, {"mean": mean})["mean"]

    alone = world.one_process(run)
    assert alone == (28.0, 8, 28.0, 12.0)
    assert world(run, 2)[0] == alone


@pytest.mark.parametrize(
    ("loader", "says"),
    [
        (DataLoader(Numbers(8), 2, sampler=WeightedRandomSampler([1.0] * 8, 8)), "pass torch.utils.data.Subset"),  # type: ignore[arg-type]
        (DataLoader(Numbers(8), 2, sampler=Halves()), "whose Halves does not take each sample"),  # type: ignore[arg-type]
        (DataLoader(Numbers(8), None), "batch_size=None, and takes samples one by one"),  # type: ignore[arg-type]
        (DataLoader(Numbers(0), 2), "got an empty Numbers"),  # type: ignore[arg-type]
    ],
)
def test_loaders_that_have_no_exact_mean_are_refused(loader: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_evaluation(loader, micro=None, collate=None, default_micro=4)
