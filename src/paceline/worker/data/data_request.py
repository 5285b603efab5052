"""What `worker.batches` was asked for: its arguments, and those of a torch DataLoader that it takes over.

A loader's batches are the plan's: a step has the same samples on any number of workers, so no worker batches, shuffles
or divides by itself. What of a loader cannot be kept as it is, is told in one sentence, or refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_collate

from paceline.data.lane_sources import as_sharded_stream, lanes_name
from paceline.data.mixture import Mixture
from paceline.data.sharded_stream import LaneSource
from paceline.data.stream_mixture import StreamMixture
from paceline.errors import SyncError
from paceline.plan import Batch
from paceline.schedule.index_orders import SimilarLengths
from paceline.schedule.lane_mix import LaneMix
from paceline.schedule.sample_order import IndexOrder, WeightedDraws
from paceline.worker.data.data_loading import Collate
from paceline.worker.data.sampler_orders import order_of_sampler

__all__ = ["DataRequest", "is_map_style", "read_request", "require_forked"]

Numbers = Sequence[float] | Tensor
UNNAMED = Batch()  # what plans have that name no size


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DataRequest:
    """What is read, how, and in what order."""

    dataset: Any
    collate: Collate = default_collate
    loaders: int = 0
    prefetch: int = 2
    pin: bool = True  # where the device is a GPU
    draws: IndexOrder | None = None
    shuffle: bool | None = None  # None: as the plan says
    drop_last: bool | None = None  # the same
    begin_loader: Callable[[int], Any] | None = None
    batch_size: int | None = None  # of a loader: samples of a step, where the plan names no size
    takeover: str = ""  # what of a loader is not the same here
    lanes: tuple[LaneSource, ...] = ()  # of a stream that is read in lanes, or of several
    mixing: LaneMix | None = None  # of several

    @property
    def order_name(self) -> str:
        """Names the order of samples on all workers alike; "" for a shuffle, and where it is not known."""
        if self.draws is not None:
            return self.draws.name
        return lanes_name(self.lanes, self.mixing) if self.lanes else ""

    def require_one_order(self, found: Iterable[str]) -> None:
        """Raise SyncError where workers have found other names of the order."""
        names = sorted({self.order_name, *found})
        if len(names) == 1:
            return
        if self.lanes:
            raise SyncError(
                f"worker.batches() got other files or shards on some workers ({'; '.join(names)}), so workers would "
                "read other samples. Files may have been added while workers listed them: list them once, and send the "
                "list: files = worker.gather(files)[0]"
            )
        what = self.order_name.partition(" ")[0]
        raise SyncError(
            f"worker.batches() got other {what} on some workers (checksums {', '.join(names)}), so workers would take "
            f"samples of different draws: compute them from the dataset alone, or send them: {what} = "
            f"worker.gather({what})[0]"
        )

    def within(self, batch: Batch) -> Batch:
        """The plan's batch, with what a loader says of the size and the order."""
        shuffle = batch.shuffle if self.shuffle is None else self.shuffle
        drop_last = batch.drop_last if self.drop_last is None else self.drop_last
        if self.batch_size is not None:
            batch = dataclasses.replace(batch, size=self.batch_size, micro=None)
        return dataclasses.replace(batch, shuffle=shuffle, drop_last=drop_last)


def is_map_style(dataset: Any) -> bool:
    """Whether samples can be read by index."""
    is_iterable_kind = isinstance(dataset, IterableDataset)
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not is_iterable_kind


def read_request(
    dataset: Any,
    batch: Batch,
    *,
    seed: int = 0,
    collate: Collate | None = None,
    loaders: int | None = None,
    prefetch: int | None = None,
    weights: Numbers | None = None,
    lengths: Numbers | None = None,
) -> DataRequest:
    """Read the arguments of `worker.batches`, which count before those of a loader. `seed`: the stream's.

    Raises ValueError or TypeError for what of a loader cannot be taken over, with what to do.
    """
    if weights is not None and lengths is not None:
        raise ValueError("weights= and lengths= are two orders of the same samples: give one of them")
    request = _taken_over(dataset, batch, seed) if isinstance(dataset, DataLoader) else DataRequest(dataset=dataset)
    own: dict[str, Any] = {"collate": collate, "loaders": loaders, "prefetch": prefetch}
    request = dataclasses.replace(request, **{name: value for name, value in own.items() if value is not None})
    if isinstance(dataset, StreamMixture):
        request = dataclasses.replace(request, lanes=dataset.lanes, mixing=dataset.mixing)
    elif not is_map_style(request.dataset) and (stream := as_sharded_stream(request.dataset)) is not None:
        request = dataclasses.replace(request, lanes=(stream,))
    if isinstance(dataset, Mixture):
        if weights is not None or lengths is not None:
            raise ValueError("weights= and lengths= are orders of samples, and a Mixture has its own: give its weights")
        if not batch.shuffle:
            raise ValueError(
                "a Mixture takes samples of its datasets at random, and Batch(shuffle=False) keeps their order: leave "
                "out one of them"
            )
        return dataclasses.replace(request, draws=dataset.order)
    if weights is None and lengths is None:
        return request
    if request.draws is not None or request.shuffle is False:
        option = "weights=" if weights is not None else "lengths="
        raise ValueError(
            f"{option} is an order of samples, and the DataLoader's sampler is another: make the loader with "
            "shuffle=True, or pass loader.dataset"
        )
    if weights is not None:
        draws: IndexOrder = WeightedDraws(_as_numbers(weights))
    else:
        steps = request.within(batch)
        draws = SimilarLengths(_as_numbers(lengths), batch=steps.size, micro=steps.resolved_micro)
    return dataclasses.replace(request, draws=draws)


def _as_numbers(values: Any) -> Any:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else values


def _taken_over(loader: DataLoader[Any], batch: Batch, seed: int) -> DataRequest:
    """The parts of a loader. Raises ValueError for what cannot be kept."""
    _refuse_unfit(loader)
    sampler, size, drop_last = _batching(loader)
    is_stream = not is_map_style(loader.dataset)
    draws, shuffle, said = None, None, list[str]()
    if not is_stream:
        draws, shuffle, said = order_of_sampler(sampler, len(loader.dataset), seed=seed)  # type: ignore[arg-type]  # it has a length
        if shuffle and not batch.shuffle and draws is None:
            shuffle = False
            said = ["samples come in their order, as batch(shuffle=false) of the plan says"]
    loaders = loader.num_workers
    if is_stream and loaders > 1 and as_sharded_stream(loader.dataset) is None:
        said.append(f"one loader process reads the stream, not {loaders}")
        loaders = 1
    if loader.generator is not None:
        said.append("its generator draws nothing: the plan's seed does")
    if callable(getattr(loader, "state_dict", None)):
        said.append("its state_dict() is not needed: checkpoints have the stream's position")
    if loader.timeout:
        said.append(f"a loader may take the run's timeout_s, not {loader.timeout:g} s")
    names_size = (batch.size, batch.resolved_micro) != (UNNAMED.size, UNNAMED.resolved_micro)
    own = None if names_size or size == batch.size else size
    if own is not None:
        said.insert(0, f"a step has its batch_size of {size} samples over all workers, since the plan names no size")
    elif size != batch.size:
        said.insert(0, f"a step has the plan's {batch.size} samples over all workers, not {size} on each")
    drops = drop_last or batch.drop_last
    return DataRequest(
        dataset=loader.dataset,
        collate=loader.collate_fn,
        loaders=loaders,
        prefetch=loader.prefetch_factor or 2,
        pin=loader.pin_memory,
        draws=draws,
        shuffle=shuffle,
        drop_last=drops,
        begin_loader=loader.worker_init_fn,
        batch_size=own,
        takeover="; ".join(said),
    )


def _batching(loader: DataLoader[Any]) -> tuple[Any, int, bool]:
    """A loader's sampler, batch size and drop_last."""
    batches = loader.batch_sampler
    if loader.batch_size is not None:
        return loader.sampler, loader.batch_size, loader.drop_last
    if type(batches) is BatchSampler:
        return batches.sampler, batches.batch_size, batches.drop_last
    if batches is not None:
        raise ValueError(
            f"the DataLoader's batch_sampler is a {type(batches).__name__}, which chooses whole batches: a step's "
            "samples are the plan's here. To have samples of similar length in a step, pass lengths= with "
            "loader.dataset; for another order, a sampler= with batch_size="
        )
    raise ValueError(
        "the DataLoader has batch_size=None, so its dataset gives whole batches: have it give samples, with a "
        "batch_size, since a step's samples are divided among all workers"
    )


def _refuse_unfit(loader: DataLoader[Any]) -> None:
    require_forked(loader)
    if not is_map_style(loader.dataset) and loader.worker_init_fn is not None:
        raise ValueError(
            "the DataLoader of an iterable dataset has a worker_init_fn, which may give each loader process a part of "
            "the stream: leave it out, and see `docs/how-to/stream-data-with-exact-resume.md` for streams that are "
            "divided"
        )


def require_forked(loader: DataLoader[Any]) -> None:
    """Raise ValueError where a loader starts its processes in another way than is done here."""
    context: Any = loader.multiprocessing_context
    method = context if isinstance(context, str) else context and context.get_start_method()
    if method not in (None, "fork"):
        raise ValueError(
            f"the DataLoader has multiprocessing_context={method!r}, and loader processes are forked here: leave it out"
        )


def options_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a call of `worker.batches`, by the names of `read_request`; torch's names are understood."""
    return {
        "collate": call.get("collate") or call.get("collate_fn"),
        "loaders": call.get("loaders") if call.get("loaders") is not None else call.get("num_workers"),
        "prefetch": call.get("prefetch"),
        "weights": call.get("weights"),
        "lengths": call.get("lengths"),
    }
