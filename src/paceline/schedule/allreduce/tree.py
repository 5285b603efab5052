"""Double binary tree all-reduce: sums go up a tree and come down again, half of the chunks in each of two trees.

In a binary tree half of the workers are leaves, which forward nothing. So there are two trees, and an inner worker of
one is a leaf of the other. Together all workers send about the same, chunk after chunk, so that all are busy. Each
sends at most twice the tensor, and the first chunk is done after 2 log2 n steps: for many workers and middle sizes
(Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from paceline.schedule.allreduce.rounds import Round, Send

__all__ = ["parents", "tree"]


def parents(num_workers: int) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
    """Return the parent of each worker in each of the two trees; None for the root.

    The first is in the order of the workers, with leaves at 0, 2, 4, ... The second is its mirror image, or, for odd
    numbers, which have the same workers at both ends, the first moved by one place.
    """
    first: list[int | None] = [None] * num_workers
    _grow(first, 0, num_workers, None)
    second: list[int | None] = [None] * num_workers
    for worker, parent in enumerate(first):
        second[_moved(worker, num_workers)] = None if parent is None else _moved(parent, num_workers)
    return tuple(first), tuple(second)


def tree(num_workers: int, num_chunks: int) -> Iterator[Round]:
    """Yield the rounds; chunks alternate between the trees.

    Each round takes what is possible of the remaining sends, with one send and one receive for each worker. Sends up
    come before sends down, because nothing can come down that has not gone up, and old chunks come first. That makes at
    most a third more rounds than the necessary two for each chunk, and those until the first chunk is done.
    """
    trees = [
        _Tree(above, range(which, num_chunks, 2)) for which, above in enumerate(parents(num_workers)) if num_workers > 1
    ]
    while any(not one.is_done for one in trees):
        possible = sorted((step for one in trees for step in one.possible()), key=_urgency)
        senders, receivers = set[int](), set[int]()
        taken: list[_Step] = []
        for step in possible:
            if step.send.source not in senders and step.send.target not in receivers:
                senders.add(step.send.source)
                receivers.add(step.send.target)
                taken.append(step)
        for step in taken:
            step.tree.done(step.send)
        yield tuple(step.send for step in taken)


class _Tree:
    """How many of its chunks have gone up and down each edge, by the child."""

    def __init__(self, parents: Sequence[int | None], chunks: range) -> None:
        self._chunks = chunks
        self._edges = [(child, parent) for child, parent in enumerate(parents) if parent is not None]
        self._parents = parents
        self._children: list[list[int]] = [[] for _ in parents]
        for child, parent in self._edges:
            self._children[parent].append(child)
        self._num_up, self._num_down = [0] * len(parents), [0] * len(parents)

    @property
    def is_done(self) -> bool:
        return all(self._num_down[child] == len(self._chunks) for child, _ in self._edges)

    def possible(self) -> Iterator[_Step]:
        """Yield what may be sent next along each edge, in each direction."""
        for child, parent in self._edges:
            if (number := self._num_up[child]) < min(len(self._chunks), self._num_complete(child)):
                yield _Step(number, Send(child, parent, *self._range(number), True), self)
            if (number := self._num_down[child]) < min(len(self._chunks), self._num_final(parent)):
                yield _Step(number, Send(parent, child, *self._range(number), False), self)

    def done(self, send: Send) -> None:
        """Count a send."""
        if send.adds:
            self._num_up[send.source] += 1
        else:
            self._num_down[send.target] += 1

    def _range(self, number: int) -> tuple[int, int]:
        return self._chunks[number], self._chunks[number] + 1

    def _num_complete(self, worker: int) -> int:
        """Return for how many chunks a worker has the sum of all workers below it."""
        return min((self._num_up[child] for child in self._children[worker]), default=len(self._chunks))

    def _num_final(self, worker: int) -> int:
        """Return for how many chunks a worker has the whole sum."""
        return self._num_complete(worker) if self._parents[worker] is None else self._num_down[worker]


class _Step(NamedTuple):
    """A possible send, and its priority."""

    number: int  # of the chunk, in its tree
    send: Send
    tree: _Tree


def _urgency(step: _Step) -> tuple[bool, int]:
    return not step.send.adds, step.number


def _grow(parents: list[int | None], first: int, stop: int, above: int | None) -> None:
    """Make the tree of workers `first` to `stop - 1`: a perfect one on the left of its root, the rest on the right."""
    if first == stop:
        return
    root = first + (1 << ((stop - first).bit_length() - 1)) - 1
    parents[root] = above
    _grow(parents, first, root, root)
    _grow(parents, root + 1, stop, root)


def _moved(worker: int, num_workers: int) -> int:
    """Return the position in the second tree of a worker of the first."""
    return num_workers - 1 - worker if num_workers % 2 == 0 else (worker + 1) % num_workers
