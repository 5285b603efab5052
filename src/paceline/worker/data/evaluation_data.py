"""What `worker.evaluate` reads: a dataset, or that of a torch DataLoader, each sample once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Dataset, Subset, SubsetRandomSampler, default_collate

from paceline.schedule.micro_batches import MicroBatch
from paceline.worker.data import random_state
from paceline.worker.data.data_loading import Collate, fetch_samples, open_loader
from paceline.worker.data.data_request import is_map_style, require_forked

__all__ = ["EvaluationData", "read_evaluation"]

PLAIN = ("SequentialSampler", "RandomSampler", "DistributedSampler", "StatefulDistributedSampler")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationData:
    """What is read, and how."""

    dataset: Any
    collate: Collate = default_collate
    micro: int = 1
    loaders: int = 0
    prefetch: int = 2
    pin: bool = False
    begin_loader: Callable[[int], Any] | None = None

    def read(self, micros: Sequence[MicroBatch], *, seeds: tuple[int, ...], timeout_s: float) -> Iterator[Any]:
        """The collated data of these micro-batches, read ahead where there are loader processes.

        In this process it leaves the global random state as each micro-batch has it: the caller preserves its own.
        """
        reader = _EvaluationReader(self, seeds)
        if not self.loaders or not micros:
            return (reader[one] for one in micros)
        return open_loader(
            reader,
            micros,  # type: ignore[arg-type]  # whatever the reader takes is a request
            loaders=min(self.loaders, len(micros)),
            prefetch=self.prefetch,
            pin=self.pin,
            timeout_s=timeout_s,
            begin=self.begin_loader,
        )


class _EvaluationReader(Dataset[Any]):
    def __init__(self, data: EvaluationData, seeds: tuple[int, ...]) -> None:
        self._data, self._seeds = data, seeds

    @property
    def dataset(self) -> Any:
        """The user's."""
        return self._data.dataset

    def __getitem__(self, micro: MicroBatch) -> Any:
        random_state.seed_all(*self._seeds, micro.index)
        return self._data.collate(fetch_samples(self._data.dataset, list(range(micro.start, micro.stop))))


def read_evaluation(dataset: Any, *, micro: int | None, collate: Collate | None, default_micro: int) -> EvaluationData:
    """Read the arguments of `worker.evaluate`, which count before those of a DataLoader.

    Raises TypeError for data without `len()` and `[]`, and ValueError for an empty dataset and for a loader that does
    not give each sample of its dataset once, with the remedy.
    """
    found = EvaluationData(dataset=dataset, micro=default_micro)
    if isinstance(dataset, DataLoader):
        found = _of_loader(dataset, default_micro)
    if not is_map_style(found.dataset):
        raise TypeError(f"worker.evaluate() needs a dataset with len() and [], not a {type(found.dataset).__name__}")
    if len(found.dataset) == 0:
        raise ValueError(
            f"worker.evaluate() got an empty {type(found.dataset).__name__}, over which there is no mean: pass one "
            "with samples, or leave the evaluation out"
        )
    return dataclasses.replace(found, micro=micro or found.micro, collate=collate or found.collate)


def _of_loader(loader: DataLoader[Any], default_micro: int) -> EvaluationData:
    require_forked(loader)
    dataset, sampler, size = loader.dataset, loader.sampler, loader.batch_size
    batches = loader.batch_sampler
    if size is None and isinstance(batches, BatchSampler) and type(batches).__name__ == "BatchSampler":
        sampler, size = batches.sampler, batches.batch_size
    elif size is None:
        what = "batch_size=None" if batches is None else f"a batch_sampler ({type(batches).__name__})"
        raise ValueError(
            f"worker.evaluate() got a DataLoader with {what}, and takes samples one by one: give it a batch_size, or "
            "pass its dataset with micro="
        )
    name = type(sampler).__name__
    if is_map_style(dataset):
        draws_others = getattr(sampler, "replacement", False) or (
            name == "RandomSampler" and getattr(sampler, "num_samples", len(dataset)) != len(dataset)  # type: ignore[arg-type]  # it has a length
        )
        if isinstance(sampler, SubsetRandomSampler):
            dataset = Subset(dataset, sorted(int(one) for one in sampler.indices))
        elif draws_others or name not in PLAIN:
            raise ValueError(
                f"worker.evaluate() got a DataLoader whose {name} does not take each sample of its dataset once, so "
                "there is no exact mean: pass torch.utils.data.Subset(dataset, indices), or the dataset"
            )
    return EvaluationData(
        dataset=dataset,
        collate=loader.collate_fn,
        micro=size or default_micro,
        loaders=loader.num_workers,
        prefetch=loader.prefetch_factor or 2,
        pin=loader.pin_memory,
        begin_loader=loader.worker_init_fn,
    )
