"""What `fit` is given as data, as datasets of samples: arrays, torch datasets and loaders, and `PyDataset`.

Paceline decides the order of samples, the batch and the micro-batches, so it reads single samples, or several at once
by their numbers. A `PyDataset` gives whole batches: each worker reads all of them, in an order that depends on the
plan's seed and the epoch alone, and keeps its own rows.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler, default_collate

from paceline.compat.keras.the_keras import keras
from paceline.errors import PlanError
from paceline.schedule.sample_order import sample_indices

__all__ = [
    "BatchItems",
    "InputRows",
    "SampleSource",
    "have_same_samples",
    "ordered",
    "read_arrays",
    "sample_source",
    "split_arrays",
]

ROWS_COMPARED = 64  # of each array, between the workers
ROUNDING = 1e-9  # by which their sums may differ, relative to these
ARRAYS_ONLY = "only arrays and tensors can be split, or weighted by class: give the dataset itself"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SampleSource:
    """Samples of `fit`, `evaluate` or `predict`."""

    samples: Any  # with len() and []
    collate: Callable[[list[Any]], Any]  # makes (x, y, sample_weight) of them
    batch_size: int | None = None  # that the dataset itself says
    drop_last: bool = False
    loaders: int = 0
    batches: Any = None  # a PyDataset, which gives whole batches

    def __len__(self) -> int:
        return len(self.samples)

    def limited(self, count: int) -> SampleSource:
        """The first so many samples."""
        return self if count >= len(self) else dataclasses.replace(self, samples=FirstSamples(self.samples, count))

    def fingerprint(self) -> tuple[float, ...]:
        """Numbers that differ where other arrays do: their length, and sums over some of the rows. For a dataset, which
        may read its samples from anywhere, only the length."""
        if not isinstance(self.samples, InputRows):
            return (float(len(self)),)
        last, gaps = len(self) - 1, max(1, min(len(self), ROWS_COMPARED) - 1)
        rows = torch.tensor([number * last // gaps for number in range(min(len(self), ROWS_COMPARED))])
        arrays = [one for one in keras.tree.flatten(self.samples.arrays) if one is not None]
        return (float(len(self)), *(_size_of(one[rows]) for one in arrays))

    def first(self, count: int) -> Any:
        """The first samples as a batch."""
        numbers = list(range(min(count, len(self))))
        if hasattr(self.samples, "__getitems__"):
            return self.collate(list(self.samples.__getitems__(numbers)))
        return self.collate([self.samples[number] for number in numbers])


def have_same_samples(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two fingerprints are of the same samples. Sums may differ by how a host rounds."""
    return (
        len(one) == len(other)
        and one[0] == other[0]
        and all(math.isclose(a, b, rel_tol=ROUNDING) for a, b in zip(one, other, strict=True))
    )


def _size_of(values: Tensor) -> float:
    """The sum of absolute values, as a finite number."""
    sizes = values.abs() if values.is_complex() else values.double().abs()
    return float(sizes.double().sum().nan_to_num())


def sample_source(x: Any, y: Any = None, sample_weight: Any = None, class_weight: Any = None) -> SampleSource:
    """Return what these arguments of `fit` hold. Raises PlanError for what has no length or no random access, and
    ValueError for what does not fit together, as Keras does."""
    if isinstance(x, (DataLoader, Dataset, keras.utils.PyDataset)) or _is_foreign_dataset(x):
        for name, value in (("y", y), ("sample_weight", sample_weight)):
            if value is not None:
                raise ValueError(
                    f"fit(x={type(x).__name__}, {name}=...): a dataset gives inputs, targets and weights by itself"
                )
        if class_weight is not None:
            raise ValueError(f"fit(x={type(x).__name__}, class_weight=...): {ARRAYS_ONLY}")
    if isinstance(x, DataLoader):
        return _of_loader(x)
    if isinstance(x, keras.utils.PyDataset):
        return _of_batches(x)
    if isinstance(x, IterableDataset) or not (hasattr(x, "__len__") or hasattr(x, "shape")):
        raise PlanError(_no_access(x))
    if isinstance(x, Dataset):
        return SampleSource(samples=x, collate=Collated(default_collate))
    if _is_foreign_dataset(x):
        raise PlanError(_no_access(x))
    arrays = read_arrays(x, y, sample_weight, class_weight)
    return SampleSource(samples=InputRows(arrays), collate=whole)


def _is_foreign_dataset(x: Any) -> bool:
    """Whether it is of tf.data, grain or datasets: these have no rows of arrays."""
    return any(type(x).__module__.partition(".")[0] == name for name in ("tensorflow", "grain"))


def _no_access(x: Any) -> str:
    return (
        f"fit() got a {type(x).__name__}, which gives its batches one after another: Paceline spreads single samples "
        "over the workers, in an order of its own, and goes on in the middle of an epoch after a stop. Give arrays, a "
        "torch Dataset with len() and [], a DataLoader over one, or a keras.utils.PyDataset. An endless one trains "
        "in a loop of your own: worker.batches(iterable), docs/how-to/bring-your-keras-program.md."
    )


# Arrays.


class FirstSamples(Dataset[Any]):
    """The first samples of others."""

    def __init__(self, samples: Any, count: int) -> None:
        self._samples, self._count = samples, count
        if hasattr(samples, "__getitems__"):
            self.__getitems__ = samples.__getitems__

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Any:
        return self._samples[number]


class InputRows(Dataset[Any]):
    """The rows of a tree of tensors, (x, y, sample_weight); several are read at once."""

    def __init__(self, arrays: Any) -> None:
        self.arrays = arrays
        self._length = len(next(one for one in keras.tree.flatten(arrays) if one is not None))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> Any:
        return keras.tree.map_structure(lambda one: None if one is None else one[number], self.arrays)

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        """One item: the rows of these numbers, as `whole` expects it."""
        rows = torch.as_tensor(numbers)
        return [keras.tree.map_structure(lambda one: None if one is None else one[rows], self.arrays)]


def whole(items: list[Any]) -> Any:
    """Collate what `__getitems__` of `InputRows` gives, and single rows."""
    return items[0] if len(items) == 1 and _is_batched(items[0]) else stacked(items)


def _is_batched(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == 3


def stacked(items: list[Any]) -> Any:
    """Stack rows."""
    return keras.tree.map_structure(lambda *rows: None if rows[0] is None else torch.stack(rows), *items)


def read_arrays(x: Any, y: Any, sample_weight: Any, class_weight: Any = None) -> Any:
    """Return (x, y, sample_weight) as trees of tensors on the CPU; floats have Keras' `floatx`."""
    if class_weight is not None:
        if sample_weight is not None:
            raise ValueError("You cannot `class_weight` and `sample_weight` at the same time.")
        if keras.tree.is_nested(y):
            raise ValueError("`class_weight` is only supported for Models with a single output.")
        sample_weight = _weights_of_classes(as_tensor(y), class_weight)
    found = tuple(keras.tree.map_structure(as_tensor, one) for one in (x, y, sample_weight))
    if sample_weight is not None and keras.tree.is_nested(y) and not keras.tree.is_nested(sample_weight):
        weights = found[2]
        found = (*found[:2], keras.tree.map_structure(lambda _: weights, y))
    sizes = {len(one) for one in keras.tree.flatten(found) if one is not None}
    if len(sizes) != 1:
        raise ValueError(
            f"Data cardinality is ambiguous: the arrays of x, y and sample_weight have {sorted(sizes)} rows. All must "
            "have as many."
        )
    return found


def as_tensor(value: Any) -> Tensor | None:
    """One array as a tensor on the CPU."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        found = value.detach().cpu()
    else:
        array = value.to_numpy() if hasattr(value, "to_numpy") else np.asarray(value)
        if array.dtype.kind not in "biufc":
            raise ValueError(
                f"an array of {array.dtype} cannot be a tensor: turn text into numbers before fit(), with "
                "keras.layers.StringLookup or TextVectorization in a preprocessing step, for example"
            )
        found = torch.as_tensor(np.ascontiguousarray(array))
    floatx = getattr(torch, keras.config.floatx())
    return found.to(floatx) if found.is_floating_point() else found


def _weights_of_classes(y: Tensor | None, class_weight: dict[int, float]) -> Tensor:
    if y is None:
        raise ValueError("class_weight= needs targets: give y")
    classes = y
    if y.dim() > 1:
        classes = y.argmax(dim=-1) if y.shape[-1] != 1 else y.squeeze(-1)
    numbers = classes.double().round().long().tolist()
    return torch.tensor([class_weight.get(one, 1.0) for one in numbers], dtype=getattr(torch, keras.config.floatx()))


def split_arrays(x: Any, y: Any, sample_weight: Any, fraction: float) -> tuple[Any, Any]:
    """Return (x, y, sample_weight) to train on, and the last `fraction` of the rows to validate on."""
    if isinstance(x, (DataLoader, Dataset, keras.utils.PyDataset)) or not 0 < fraction < 1:
        raise ValueError(f"validation_split={fraction}: it is between 0 and 1, and {ARRAYS_ONLY}, by validation_data=")
    arrays = tuple(keras.tree.map_structure(as_tensor, one) for one in (x, y, sample_weight))
    num = len(next(one for one in keras.tree.flatten(arrays) if one is not None))
    at = int(np.floor(num * (1.0 - fraction)))
    if at in (0, num):
        raise ValueError(f"validation_split={fraction} of {num} samples leaves none to train, or to validate, on")
    parts = [
        keras.tree.map_structure(lambda one, some=some: None if one is None else one[some], arrays)
        for some in (slice(at), slice(at, None))
    ]
    return parts[0], parts[1]


# Datasets and loaders of torch.


@dataclasses.dataclass(frozen=True, slots=True)
class Collated:
    """Collates as the dataset's own loader, into (x, y, sample_weight)."""

    inner: Callable[[list[Any]], Any]

    def __call__(self, items: list[Any]) -> Any:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(self.inner(items))
        return tuple(keras.tree.map_structure(as_tensor, one) for one in (x, y, weight))


def _of_loader(loader: DataLoader[Any]) -> SampleSource:
    if isinstance(loader.dataset, IterableDataset):
        raise PlanError(_no_access(loader))
    if loader.batch_size is None or not isinstance(loader.sampler, (RandomSampler, SequentialSampler)):
        raise PlanError(
            f"fit() got a DataLoader with the sampler {type(loader.sampler).__name__}, and Paceline has an order of "
            "its own. Give shuffle= and batch_size= to the loader, or use a loop of your own: "
            "worker.batches(dataset, weights=...) draws by weights."
        )
    return SampleSource(
        samples=loader.dataset,
        collate=Collated(loader.collate_fn),
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        loaders=loader.num_workers,
    )


# Datasets of Keras, which give whole batches.


def _of_batches(dataset: Any) -> SampleSource:
    try:
        count = len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise PlanError(_no_access(dataset)) from error
    if count == 0:
        raise ValueError(f"the {type(dataset).__name__} has no batch")
    rows = RowsOfBatches(dataset)
    return SampleSource(samples=rows, collate=stacked, batch_size=rows.each, batches=dataset)


class RowsOfBatches(Dataset[Any]):
    """The rows of a `PyDataset`'s batches by number; the last batch that was read is kept."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._kept: tuple[int, Any] = (-1, None)
        self.each = _num_rows(self._batch(0))
        self._last = _num_rows(self._batch(len(dataset) - 1))

    def __len__(self) -> int:
        return (len(self.dataset) - 1) * self.each + self._last

    def __getitem__(self, number: int) -> Any:
        batch, row = divmod(number, self.each)
        return keras.tree.map_structure(lambda one: None if one is None else one[row], self._batch(batch))

    def _batch(self, number: int) -> Any:
        if self._kept[0] != number:
            x, y, weight = keras.utils.unpack_x_y_sample_weight(self.dataset[number])
            self._kept = (number, tuple(keras.tree.map_structure(as_tensor, one) for one in (x, y, weight)))
        return self._kept[1]

    def rows(self, number: int) -> list[Any]:
        """The rows of a batch."""
        batch = self._batch(number)
        num, wanted = _num_rows(batch), self.each if number < len(self.dataset) - 1 else self._last
        if num != wanted:
            raise ValueError(
                f"batch {number} of the {type(self.dataset).__name__} has {num} samples, not {wanted} as the first, or "
                "as the last one had before: all but the last must have as many, so the epoch's steps are known"
            )
        return [
            keras.tree.map_structure(lambda one, row=row: None if one is None else one[row], batch)
            for row in range(num)
        ]


def _num_rows(batch: Any) -> int:
    return len(next(one for one in keras.tree.flatten(batch) if one is not None))


class BatchItems(IterableDataset[Any]):
    """Samples of a source in the order in which they are trained on: as they are, or whole batches of a `PyDataset`,
    shuffled by seed and epoch."""

    def __init__(self, source: SampleSource, *, seed: int, shuffles: bool) -> None:
        self._source, self._seed, self._shuffles = source, seed, shuffles
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The epoch that is read next."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        rows = self._source.samples
        if not isinstance(rows, RowsOfBatches):
            yield from (rows[number] for number in range(len(rows)))
            return
        count = len(rows.dataset)
        order = sample_indices(
            seed=self._seed,
            epoch=self._epoch,
            num_samples=count,
            positions=np.arange(count),
            shuffle=self._shuffles,
        )
        if self._shuffles and rows.each != _num_rows(rows.rows(count - 1)):
            order = np.concatenate([order[order != count - 1], [count - 1]])  # the short one is the last of its epoch
        rows.dataset.on_epoch_begin()
        yield from itertools.chain.from_iterable(rows.rows(int(number)) for number in order)
        rows.dataset.on_epoch_end()


def ordered(source: SampleSource, *, shuffles: bool, plan_shuffles: bool, seed: int) -> tuple[Any, Any]:
    """Return the dataset for `worker.batches`, and its collate function. Whole batches, and an order that is not the
    plan's, are read one after another."""
    if source.batches is None and shuffles == plan_shuffles:
        return source.samples, source.collate
    is_of_arrays = isinstance(source.samples, InputRows)
    return BatchItems(source, seed=seed, shuffles=shuffles), stacked if is_of_arrays else source.collate
