"""A worker's micro-batches of a dataset, in DeepSpeed's order: each epoch the same, over a number of workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

__all__ = ["MicroBatchLoader", "RepeatingLoader"]


class MicroBatchLoader:
    """Iterating over it gives one epoch's micro-batches of one worker."""

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        workers: int,
        index: int,
        sampler: Iterable[int] | None,
        shuffle: bool,
        collate: Callable[[list[Any]], Any] | None,
        loaders: int,
        drop_last: bool,
    ) -> None:
        """`index`: of this worker among those that get micro-batches of their own. `loaders`: processes that read."""
        self.dataset, self.batch_size, self.data_sampler = dataset, batch_size, sampler
        if sampler is None and not isinstance(dataset, IterableDataset):
            self.data_sampler = DistributedSampler(dataset, num_replicas=workers, rank=index, shuffle=shuffle)
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=self.data_sampler,
            collate_fn=collate,
            num_workers=loaders,
            drop_last=drop_last,
        )

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


class RepeatingLoader:
    """Begins a loader again where it ends, without end."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # of loaders that have a length

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)
