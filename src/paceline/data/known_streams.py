"""Streams of WebDataset and litdata, read in lanes: none of these packages is imported here.

Each of them divides its files among processes by itself, by what it finds in the environment. Here lanes divide them,
so that the same steps come on any number of workers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.data.node_stream import NodeStream
from paceline.data.sharded_stream import MOST_LANES, FileSequence, LaneSource, ShardedStream
from paceline.data.stream_contents import contents_of
from paceline.schedule.sample_order import mix, sample_indices

__all__ = ["known_stream"]

ORDER_SEED = 0  # of files and chunks, where the dataset shuffles them; each epoch has an order of its own


def known_stream(dataset: Any) -> LaneSource | None:
    """Return what is read in lanes of a dataset of one of these packages; None for all others.

    Raises ValueError for one whose parts can not be read each by itself, with the remedy.
    """
    for kind in type(dataset).__mro__:
        make = _KNOWN.get((kind.__module__.partition(".")[0], kind.__name__))
        if make is not None:
            return make(dataset)
    return None


def _refused(what: str, remedy: str) -> Callable[[Any], LaneSource]:
    def refuse(dataset: Any) -> LaneSource:
        raise ValueError(f"{what}: {remedy}")

    return refuse


class _OrderedFiles(FileSequence):
    """Lane k of files in an order of each epoch's own."""

    def __init__(
        self, files: Sequence[Any], read: Callable[[Any], Iterable[Any]], *, lane: int, lanes: int, shuffle: bool
    ) -> None:
        super().__init__(files[lane::lanes], read)
        self._all, self._lane, self._lanes, self._shuffle = files, lane, lanes, shuffle

    def set_epoch(self, epoch: int) -> None:
        """Begin the order of an epoch."""
        order = sample_indices(
            seed=ORDER_SEED,
            epoch=epoch,
            num_samples=len(self._all),
            positions=np.arange(len(self._all)),
            shuffle=self._shuffle,
        )
        self._files = [self._all[place] for place in order.tolist()[self._lane :: self._lanes]]


# WebDataset.

SPLITS = frozenset({"split_by_node", "split_by_worker", "single_node_only"})
SHUFFLES = frozenset({"shuffle", "detshuffle"})
OPENERS = frozenset({"StreamingOpen", "FileCache"})
DEFAULT_BUFFER = 1000  # samples, of a shuffle that is given no number
UNFIT_SHUFFLE = "its buffer is in no checkpoint. Leave it out; shardshuffle= shuffles the archives"
_UNFIT_CACHE = (
    "it would give the first archive's samples for all others. Leave it out; cache_dir= keeps archives on disk"
)
UNFIT_STAGES = {  # behind the opening of an archive: each archive is read by itself
    "shuffle": (".shuffle()", UNFIT_SHUFFLE),
    "detshuffle": (".detshuffle()", UNFIT_SHUFFLE),
    "batched": (
        ".batched()",
        "a step's samples are the plan's here. Leave it out, and give collate= to worker.batches()",
    ),
    "islice": (
        ".slice()",
        "archives are read each by itself, so it would be taken of each of them. Leave it out; pass fewer archives, or "
        "end after a number of steps (max_steps=)",
    ),
    "rsample": (
        ".rsample()",
        "which samples it leaves out is drawn while it reads, so a resume would leave out others. Leave it out, and "
        "choose by the key: .select(lambda sample: zlib.crc32(sample['__key__'].encode()) % 2 == 0)",
    ),
    "Cached": (".mcached()", _UNFIT_CACHE),
    "LMDBCached": (".lmdb_cached()", _UNFIT_CACHE),
}


def _of_webdataset(dataset: Any) -> LaneSource:
    """Its archives are the files of lanes; what comes behind the opening of an archive is kept."""
    stages = list(dataset.pipeline)
    archives = getattr(stages[0], "urls", None) if type(stages[0]).__name__ == "SimpleShardList" else None
    opener = next((place for place, one in enumerate(stages) if type(one).__name__ in OPENERS), None)
    if archives is None or opener is None:
        raise ValueError(
            f"the WebDataset begins with {type(stages[0]).__name__}, which draws or lists archives by itself: pass "
            "WebDataset(list_of_archives, shardshuffle=...), or paceline.ShardedStream.of_files(archives, read)"
        )
    if dataset.repetitions != 1 or dataset.nsamples > 0:
        raise ValueError(
            "the WebDataset has .repeat() or .with_epoch(): leave it out, an epoch is each sample once here, and "
            "worker.batches(..., epochs=n) has several"
        )
    for stage in stages[1:opener]:
        if _name_of(stage) not in (*SPLITS, *SHUFFLES):
            raise ValueError(
                f"the WebDataset has {_name_of(stage)!r} between its list of archives and their opening, and lanes "
                "divide the list itself: leave it out, and pass the archives that it gives"
            )
    for stage in stages[opener:]:
        call, remedy = UNFIT_STAGES.get(_name_of(stage), ("", ""))
        if call and (remedy != UNFIT_SHUFFLE or _shuffles(stage)):
            raise ValueError(f"the WebDataset has {call}: {remedy}")
    kept = [stage for stage in stages[opener:] if _name_of(stage) != "check_empty"]
    shuffles = stages[0].seed is not None or any(map(_shuffles, stages[1:opener]))

    def read(archive: str) -> Iterable[Any]:
        one = copy.copy(dataset)
        one.pipeline = [[{"url": archive}], *kept]
        return one

    lanes = min(len(archives), MOST_LANES)
    stream = ShardedStream(
        lambda lane, num: _OrderedFiles(list(archives), read, lane=lane, lanes=num, shuffle=shuffles), shards=lanes
    )
    stream.contents = contents_of("archives", archives, also="shuffled" if shuffles else "")
    return stream


def _name_of(stage: Any) -> str:
    function = getattr(stage, "f", stage)
    return str(getattr(function, "__name__", type(stage).__name__)).strip("_")


def _shuffles(stage: Any) -> bool:
    """Whether a stage changes an order: with a buffer of one, or none (`shardshuffle=False`), it does not."""
    if _name_of(stage) not in SHUFFLES:
        return False
    size = getattr(stage, "kw", {}).get("bufsize", getattr(stage, "bufsize", None))
    if size is None:
        size = next(iter(getattr(stage, "args", ())), DEFAULT_BUFFER)
    return int(size) > 1


# litdata.


def _of_litdata(dataset: Any) -> LaneSource:
    """Its chunks are the files of lanes; samples are read by their numbers."""
    bounds, begin = list[tuple[int, int]](), 0
    for first, stop in dataset.region_of_interest:
        bounds.append((begin, begin + stop - first))
        begin += stop - first
    if not bounds:
        raise ValueError("the StreamingDataset has no chunks: it is empty, or its folder has no index.json")
    stream = ShardedStream(
        lambda lane, num: _LitPart(dataset, bounds, lane=lane, lanes=num), shards=min(len(bounds), MOST_LANES)
    )
    order = f"shuffled by {dataset.seed}" if dataset.shuffle else ""
    stream.contents = contents_of("chunks", [f"{first}-{stop}" for first, stop in bounds], also=order)
    return stream


class _LitPart:
    """Some of the chunks, in an order of each epoch's own where the dataset shuffles; its state is a number."""

    def __init__(self, dataset: Any, bounds: Sequence[tuple[int, int]], *, lane: int, lanes: int) -> None:
        self._dataset = copy.copy(dataset)  # with files of its own: chunks are opened one at a time
        self._dataset.cache = None
        self._bounds, self._lane, self._lanes = bounds, lane, lanes
        self._epoch = self._given = 0

    def set_epoch(self, epoch: int) -> None:
        """Which of its orders it has."""
        self._epoch = epoch

    def _order(self, count: int, *mixed: int) -> list[int]:
        seed = mix(int(self._dataset.seed), *mixed) >> 1
        order = sample_indices(
            seed=seed,
            epoch=self._epoch,
            num_samples=count,
            positions=np.arange(count),
            shuffle=bool(self._dataset.shuffle),
        )
        return order.tolist()

    def __iter__(self) -> Iterator[Any]:
        before = 0
        for chunk in self._order(len(self._bounds))[self._lane :: self._lanes]:
            first, stop = self._bounds[chunk]
            if self._given < before + stop - first:
                order = self._order(stop - first, chunk + 1)
                while self._given < before + len(order):
                    self._given += 1
                    yield self._dataset[first + order[self._given - before - 1]]
            before += stop - first

    def state_dict(self) -> dict[str, int]:
        """Where it stands."""
        return {"given": self._given}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there."""
        self._given = state["given"]


_KNOWN: dict[tuple[str, str], Callable[[Any], LaneSource]] = {
    ("webdataset", "WebLoader"): _refused("the WebLoader reads in processes of its own", "pass its WebDataset"),
    ("webdataset", "DataPipeline"): _of_webdataset,
    ("torchdata", "Loader"): lambda loader: NodeStream(loader.root),
    ("torchdata", "BaseNode"): NodeStream,
    ("litdata", "StreamingDataset"): _of_litdata,
    ("litdata", "CombinedStreamingDataset"): _refused(
        "the CombinedStreamingDataset draws from its datasets by itself",
        "pass paceline.StreamMixture({name: dataset, ...}, weights=...)",
    ),
    ("litdata", "ParallelStreamingDataset"): _refused(
        "the ParallelStreamingDataset cycles through its datasets by itself", "pass one dataset whose samples have all"
    ),
}
