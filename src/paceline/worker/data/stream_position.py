"""The position of a data stream in its order of samples, for checkpoints and resumes.

A position is valid only in its order, which follows from the number of samples, the seed and whether they are
shuffled. A checkpoint keeps these beside it, so that a position is never used with another order.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from paceline.errors import CheckpointError
from paceline.plan import Batch
from paceline.schedule.sample_order import mix

__all__ = ["SampleOrder", "StreamPosition", "StreamPositions", "resume_position", "stream_seed"]

PLAIN_STREAM = "train"  # the default name: its seed is the plan's


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SampleOrder:
    """The order of a stream's samples, and how it is split into steps."""

    samples: int  # 0: not known (an iterable)
    seed: int
    shuffle: bool
    batch: int
    micro: int
    drop_last: bool
    weights: str = ""  # a checksum of the weights by which samples are drawn
    draws: str = ""  # the name of another order; "", as `weights`: each sample comes once an epoch

    @property
    def order(self) -> tuple[int, int, bool, str, str]:
        """Equal for orders that have the same samples at the same positions."""
        return self.samples, self.seed, self.shuffle, self.weights, self.draws

    def to_dict(self) -> dict[str, Any]:
        """For checkpoints and the ledger: plain values."""
        found = dataclasses.asdict(self)
        return {name: value for name, value in found.items() if value or name not in ("weights", "draws")}

    @property
    def steps(self) -> tuple[int, int, bool]:
        """Equal for orders with the same steps."""
        return self.batch, self.micro, self.drop_last

    def num_steps(self, position: int) -> int:
        """Steps of an epoch from `position` on; `samples` must be known."""
        left = self.samples - position
        return left // self.batch if self.drop_last else -(-left // self.batch)

    def end_of_epoch(self, position: int) -> int:
        """The position at which an epoch's steps from `position` on end; `samples` must be known."""
        return min(self.samples, position + self.num_steps(position) * self.batch)

    def __str__(self) -> str:
        samples = f"{self.samples} samples" if self.samples else "an iterable"
        order = "shuffled" if self.shuffle else "not shuffled"
        if self.weights:
            order = f"drawn by weights {self.weights}"
        return f"{samples}, seed {self.seed}, {f'in the order of {self.draws}' if self.draws else order}"


@dataclasses.dataclass(slots=True)
class StreamPosition:
    """The position of a stream: `position` samples of `epoch` are committed. `of`: None before the stream is opened."""

    epoch: int = 0
    position: int = 0
    of: SampleOrder | None = None
    lanes: Callable[[], dict[str, Any]] | None = None  # how far the lanes of an open stream have come at this position
    saved_lanes: Mapping[str, Any] | None = None  # the same, of a checkpoint

    @staticmethod
    def from_state_dict(saved: Mapping[str, Any]) -> StreamPosition:
        """Read what `state_dict` returned."""
        fields = dict(saved)
        epoch, position, lanes = fields.pop("epoch"), fields.pop("position"), fields.pop("lanes", None)
        return StreamPosition(epoch, position, SampleOrder(**fields), saved_lanes=lanes)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: plain values."""
        order = {} if self.of is None else self.of.to_dict()
        lanes = {} if self.lanes is None else {"lanes": self.lanes()}
        return {"epoch": self.epoch, "position": self.position, **order, **lanes}


class StreamPositions:
    """Where all streams stand: those that are open, and those that a run goes on with but has not opened yet."""

    def __init__(self, opened: Callable[[], Mapping[str, StreamPosition]]) -> None:
        self._opened = opened
        self._saved: Mapping[str, Any] = {}

    def saved(self, stream: str) -> StreamPosition:
        """Where a stream begins that is about to be opened."""
        found = self._saved.get(stream)
        return StreamPosition.from_state_dict(found) if found else StreamPosition()

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: plain values by the names of the streams."""
        return {**self._saved, **{name: position.state_dict() for name, position in self._opened().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self._saved = state


def stream_seed(batch: Batch, stream: str) -> int:
    """The seed of a stream's order: streams over the same dataset must not give the same samples at the same time."""
    return batch.seed if stream == PLAIN_STREAM else mix(batch.seed, zlib.crc32(stream.encode())) >> 1


def resume_position(saved: StreamPosition, now: SampleOrder, stream: str) -> tuple[StreamPosition, list[str]]:
    """Return where a stream of a checkpoint goes on, and notes about what has changed since then.

    Raises CheckpointError where the unused samples of a begun epoch are not known, because its order was another.
    """
    then = saved.of
    if then is None or (saved.epoch, saved.position) == (0, 0):
        return StreamPosition(of=now), []
    cursor, notes = StreamPosition(saved.epoch, saved.position, now), []
    if then.order != now.order:
        if saved.position > 0 and not _is_at_end(saved, then):
            raise CheckpointError(
                f"the checkpoint stands at sample {saved.position} of epoch {saved.epoch + 1} of stream {stream!r}, "
                f"which was read from {then}; now it has {now}: which samples of the epoch are left cannot be told. "
                "Use the same dataset and files, seed, shuffle and weights until the epoch is done, or another name in "
                "worker.batches() to begin at its first sample, or another run_dir, or fresh=True"
            )
        if saved.position:
            cursor = StreamPosition(saved.epoch + 1, 0, now)
        notes.append(
            f"stream {stream!r} goes on in epoch {cursor.epoch + 1} with another order of samples: {now}; "
            f"before: {then}"
        )
    if then.steps != now.steps:
        notes.append(
            f"stream {stream!r} goes on at sample {cursor.position} of epoch {cursor.epoch + 1} in other steps: "
            f"{_steps_text(now)}; before: {_steps_text(then)}"
        )
    return cursor, notes


def _is_at_end(cursor: StreamPosition, of: SampleOrder) -> bool:
    return of.samples > 0 and of.num_steps(cursor.position) == 0


def _steps_text(of: SampleOrder) -> str:
    return f"batch {of.batch} in micro-batches of {of.micro}{', the short last one dropped' if of.drop_last else ''}"
