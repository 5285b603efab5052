"""Streams of samples that are cut into lanes: `ShardedStream`, and one that cannot be cut.

A lane is a part of the stream that can only be read forwards, such as some of its files. It is the same part whichever
worker reads it, so lanes are given to other workers at any time. A lane with a state goes on from it at once; one
without is read again up to where it was.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from paceline.data.stream_contents import contents_of
from paceline.storage.reading import files_like

__all__ = ["MOST_LANES", "FileSequence", "LaneSource", "OpenLane", "ShardedStream", "WholeStream", "has_state"]

MOST_LANES = 64  # by default: each is open on the worker that reads it, and all are on a single one


class LaneSource(Protocol):
    """What gives the lanes of one dataset."""

    num_lanes: int
    opens_copies: bool  # a lane may be open twice, so that its state can be tried
    contents: str  # what the order follows from besides, such as "70 files 1a2b3c4d"; "": not known

    def open(self, lane: int, epoch: int, count: int, state: Any) -> OpenLane:
        """Open a lane in an epoch of its own, where its state after `count` items was this; None: it had none."""
        ...


class ShardedStream:
    """A stream that is read in lanes: `make(shard, num_shards)` returns an iterable over one part of it.

    All parts together are the stream; a part must not depend on the process that reads it. Where what `make` returns,
    or its iterator, has `state_dict()` and `load_state_dict(state)`, a resume goes on from its state, else the part is
    read again up to where it was. `set_epoch(epoch)` is called where it exists. The number of shards is a part of the
    order of samples, and no number of workers: 64 keep up to 64 workers busy.

    The first state is tried: a copy that begins from it must give the same samples, else the loop ends with an error.
    With `uses_state=False` states are left alone, and parts are read again up to where they were.

    Raises ValueError for less than one shard. Pass it to `worker.batches`.

    Example::

        def numbers(shard, num_shards):
            return range(shard, 1000, num_shards)

        stream = paceline.ShardedStream(numbers, shards=8)
        assert sorted(sample for shard in range(8) for sample in stream.make(shard, 8)) == list(range(1000))
    """

    opens_copies = True

    def __init__(self, make: Callable[[int, int], Iterable[Any]], *, shards: int, uses_state: bool = True) -> None:
        if shards < 1:
            raise ValueError(f"ShardedStream(shards={shards}): give at least 1, better one for each worker or more")
        self.make, self.num_lanes, self.uses_state = make, shards, uses_state
        self.contents = ""

    @classmethod
    def of_files(
        cls, files: Sequence[Any] | str, read: Callable[[Any], Iterable[Any]], *, shards: int | None = None
    ) -> ShardedStream:
        """Return a stream over files, or whatever `read(file)` gives the samples of.

        `files` may be one pattern: `"data/*.jsonl"`, or `"s3://bucket/data/*.jsonl"` (also gs://, az://). `read` is
        given the paths or addresses that match, and may open them with `paceline.open_file`.

        Lanes take turns in the list: lane k has files k, k + shards, ... A resume opens the file that a lane stood in,
        and passes over what it had given of it. `shards` is at most the number of files, by default up to 64 of them.
        What `read` draws at random for a sample is the same after a resume; which samples come must not be drawn.

        The names of the files are part of the order: all workers must have the same list, and so must a resume in an
        epoch that has begun. The folder that holds all of them may be another one.
        """
        if isinstance(files, str):
            pattern, files = files, files_like(files)
            if not files:
                raise ValueError(f"ShardedStream.of_files(): no file is like {pattern!r}; correct the pattern")
        if not files:
            raise ValueError("ShardedStream.of_files() got no files")
        lanes = min(len(files), MOST_LANES) if shards is None else shards
        if lanes > len(files):
            raise ValueError(f"shards={lanes} of {len(files)} files: use at most one shard a file")
        stream = cls(lambda shard, num_shards: FileSequence(files[shard::num_shards], read), shards=lanes)
        stream.contents = contents_of("files", files)
        return stream

    def open(self, lane: int, epoch: int, count: int, state: Any) -> OpenLane:
        """Open a lane; see `LaneSource`."""
        dataset = self.make(lane, self.num_lanes)
        return OpenLane(dataset, epoch=epoch, count=count, state=state, uses_state=self.uses_state)


class FileSequence:
    """Samples of files, one file after the other; its state is the file and how many of its samples were given."""

    def __init__(self, files: Sequence[Any], read: Callable[[Any], Iterable[Any]]) -> None:
        self._files, self._read = files, read
        self._file = self._given = 0

    def __iter__(self) -> Iterator[Any]:
        """Passes over what was given at once: random state is seeded behind that, for the first item that is used."""
        items: Iterator[Any] | None = None
        if self._given:
            items = iter(self._read(self._files[self._file]))
            for _ in range(self._given):
                next(items, None)
        return self._items(items)

    def _items(self, items: Iterator[Any] | None) -> Iterator[Any]:
        while self._file < len(self._files):
            for item in iter(self._read(self._files[self._file])) if items is None else items:
                self._given += 1
                yield item
            self._file, self._given, items = self._file + 1, 0, None

    def state_dict(self) -> dict[str, int]:
        """Where it stands."""
        return {"file": self._file, "given": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self._file, self._given = state["file"], state["given"]


class OpenLane:
    """A lane that is being read: `count` items of its epoch were taken."""

    def __init__(self, dataset: Iterable[Any], *, epoch: int, count: int, state: Any, uses_state: bool = True) -> None:
        state = state if uses_state else None
        self.epoch, self.count = epoch, count if state is not None else 0
        set_epoch = getattr(dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        is_own = uses_state and has_state(dataset)
        if state is not None and is_own:
            own: Any = dataset
            own.load_state_dict(state)
        self._items = iter(dataset)
        holder: Any = dataset if is_own else self._items if uses_state and has_state(self._items) else None
        self._holder = holder
        if state is not None and not is_own:
            if holder is None:
                raise ValueError(
                    f"a checkpoint has a state of a lane, and its {type(dataset).__name__} has no load_state_dict() now"
                )
            holder.load_state_dict(state)
        self._known = (self.count, state)

    def __next__(self) -> Any:
        item = next(self._items)
        self.count += 1
        return item

    def state(self) -> Any:
        """The state after the items that were taken; None where there is none, or none was taken."""
        if self._holder is None or self.count == 0:
            return None
        if self._known[0] != self.count:
            self._known = self.count, self._holder.state_dict()
        return self._known[1]

    def close(self) -> None:
        """Let go of what the lane has open."""
        close = getattr(self._items, "close", None)
        if callable(close):
            with contextlib.suppress(RuntimeError):  # a generator that is running
                close()


class WholeStream:
    """A stateful iterable that cannot be cut: one lane, which each worker reads."""

    num_lanes, opens_copies, contents = 1, False, ""

    def __init__(self, dataset: Any) -> None:
        self._dataset, self._fresh = dataset, dataset.state_dict()

    def open(self, lane: int, epoch: int, count: int, state: Any) -> OpenLane:
        """Open it; its one object begins anew, or goes on from the state."""
        if state is None and self._fresh is not None:
            self._dataset.load_state_dict(self._fresh)
        return OpenLane(self._dataset, epoch=epoch, count=count, state=state)


def has_state(thing: Any) -> bool:
    """Whether an object has a state that can be kept and given back, without further arguments."""
    get, load = getattr(thing, "state_dict", None), getattr(thing, "load_state_dict", None)
    if not (callable(get) and callable(load)):
        return False
    try:
        parameters = inspect.signature(get).parameters.values()
    except (TypeError, ValueError):  # of compiled code
        return True
    return all(one.default is not one.empty or one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL) for one in parameters)
