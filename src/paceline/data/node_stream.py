"""A graph of torchdata's nodes as a stream of one lane. The package is not imported: nodes are known by what they have.

Some nodes count epochs by themselves, by how often they were reset: an order that depends on what was read before. Here
they are told the epoch each time that the graph begins anew, so any reader finds the order of the epoch it reads.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from paceline.data.sharded_stream import OpenLane, has_state

__all__ = ["NodeStream"]

UNFIT_SAMPLERS = frozenset({"RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler"})
_first_epochs: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of nodes, as they were given


class NodeStream:
    """A graph of nodes with one root: one lane, which each worker reads.

    Raises ValueError for a graph that gives each worker a part, or an order that no state brings back.
    """

    num_lanes, opens_copies, contents = 1, False, ""

    def __init__(self, root: Any) -> None:
        self._root = root
        for node in _nodes_below(root):
            _require_fit(node)
            if (epoch := _epoch_field(node)) is not None:
                _first_epochs.setdefault(node, getattr(node, epoch))

    def open(self, lane: int, epoch: int, count: int, state: Any) -> OpenLane:
        """Open it; its one object begins anew, or goes on from the state."""
        return OpenLane(_NodeItems(self._root), epoch=epoch, count=count, state=state)


class _NodeItems:
    def __init__(self, root: Any) -> None:
        self._root, self._epoch, self._state = root, 0, None

    def __iter__(self) -> Iterator[Any]:
        nodes = _nodes_below(self._root)
        for node in nodes:
            _end_threads(node)  # one that still reads would count on
        for node in nodes:
            _begin_epoch(node, self._epoch)
        self._root.reset(self._state)
        return iter(self._root)

    def set_epoch(self, epoch: int) -> None:
        """For nodes that have epochs, such as samplers."""
        self._epoch = epoch

    def state_dict(self) -> Any:
        """Where it stands."""
        return self._root.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Go on from there."""
        self._state = state


def _nodes_below(root: Any) -> list[Any]:
    """All nodes of a graph: in attributes of each, and in lists and mappings whose first value is one."""
    found, left = dict[int, Any](), [root]
    while left:
        one = left.pop()
        if isinstance(one, (Mapping, list, tuple)):
            values: Iterable[Any] = one.values() if isinstance(one, Mapping) else one
            if _is_node(next(iter(values), None)):  # others may be data, of any size
                left.extend(values)
        elif _is_node(one) and id(one) not in found:
            found[id(one)] = one
            left.extend(getattr(one, "__dict__", {}).values())
    return list(found.values())


def _is_node(thing: Any) -> bool:
    return callable(getattr(thing, "reset", None)) and callable(getattr(thing, "get_state", None))


def _require_fit(node: Any) -> None:
    sampler = getattr(node, "sampler", None)
    for counts, name in ((sampler, "num_replicas"), (node, "world_size")):
        if (parts := getattr(counts, name, 1)) != 1:
            raise ValueError(
                f"{type(counts).__name__} of the nodes has {name}={parts}, so each worker would read other samples, "
                f"and workers share the samples of one graph here: make it with {name}=1, rank=0"
            )
    if not has_state(sampler) and any(kind.__name__ in UNFIT_SAMPLERS for kind in type(sampler).__mro__):
        raise ValueError(
            f"a {type(sampler).__name__} of the nodes draws an order that is not in their state, so a resume would use "
            "other samples. Use DistributedSampler(dataset, num_replicas=1, rank=0), whose order follows from the "
            "epoch; or pass the dataset itself to worker.batches(), which shuffles it"
        )


def _epoch_field(node: Any) -> str | None:
    """Where a node has its number of the epoch, which it raises itself when it is reset after it was read."""
    if not hasattr(node, "_started"):
        return None
    return next((name for name in ("epoch", "_epoch") if isinstance(getattr(node, name, None), int)), None)


def _begin_epoch(node: Any, epoch: int) -> None:
    """Have a node begin an epoch at its next reset, as if it had read all epochs before."""
    set_epoch = getattr(node, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)
    name = _epoch_field(node)
    if name is None:
        return
    own, update = _first_epochs.get(node, 0), getattr(node, "epoch_updater", None)
    for _ in range(epoch):  # the nodes' own way, which need not be one more
        own = own + 1 if update is None else int(update(own))
    setattr(node, name, own)
    node._started = False


def _end_threads(node: Any) -> None:
    end = getattr(getattr(node, "_it", None), "_shutdown", None)
    if callable(end):
        end()
