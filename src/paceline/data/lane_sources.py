"""What of a dataset is read in lanes: streams of Paceline's own, of other packages, and iterables with a state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.data.known_streams import known_stream
from paceline.data.sharded_stream import MOST_LANES, LaneSource, ShardedStream, WholeStream, has_state
from paceline.schedule.lane_mix import LaneMix

__all__ = ["as_sharded_stream", "lanes_name"]


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
        stream = ShardedStream(
            lambda index, count: shard(num_shards=count, index=index), shards=min(num_shards, MOST_LANES)
        )
        stream.contents = f"{num_shards} shards"
        return stream
    return WholeStream(dataset)


def lanes_name(lanes: Sequence[LaneSource], mixing: LaneMix | None) -> str:
    """The name of the order that the samples of lanes have: equal where positions go on from each other's."""
    if mixing is not None:
        return mixing.order_name([one.num_lanes for one in lanes], [one.contents for one in lanes])
    (stream,) = lanes
    return f"lanes {stream.num_lanes} of {stream.contents}" if stream.contents else f"lanes {stream.num_lanes}"
