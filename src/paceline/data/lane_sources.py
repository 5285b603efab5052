"""What of a dataset is read in lanes: streams of Paceline's own, of other packages, and iterables with a state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.data.known_streams import known_stream
from paceline.data.sharded_stream import MOST_LANES, LaneSource, ShardedStream, WholeStream, has_state

__all__ = ["as_sharded_stream"]


def as_sharded_stream(dataset: Any) -> LaneSource | None:
    """Return what of a stream is read in lanes; None for all other datasets.

    A Hugging Face `IterableDataset` is cut into its shards, and datasets of WebDataset and litdata into their files.
    Any other iterable with a state is one lane. Raises ValueError for one that was split by worker already, and for
    what of these packages cannot be divided, with the remedy.
    """
    if isinstance(dataset, ShardedStream):
        return dataset
    if (known := known_stream(dataset)) is not None:
        return known
    if not (hasattr(dataset, "__iter__") and has_state(dataset)) or hasattr(dataset, "__next__"):
        return None
    if getattr(dataset, "_distributed", None) is not None:
        raise ValueError(
            "the dataset was split by split_dataset_by_node(), and its shards are divided among workers here: pass the "
            "whole dataset"
        )
    shard: Callable[..., Any] | None = getattr(dataset, "shard", None)
    num_shards = getattr(dataset, "num_shards", None)
    if shard is not None and isinstance(num_shards, int) and num_shards > 0:
        return ShardedStream(
            lambda index, count: shard(num_shards=count, index=index), shards=min(num_shards, MOST_LANES)
        )
    return WholeStream(dataset)
