"""Compares how fast the data of a stream is read with how fast the steps use it, says so once, and warns of a lack.

The first steps are left out: loader processes start, files are opened, kernels are built. Then one sentence tells both
rates. Where steps wait for data, a warning names the option that helps, at the start or later in the run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from paceline.environment import usable_cores
from paceline.worker.data.batch_stream import BatchStream
from paceline.worker.data.step_batch import StepBatch

__all__ = ["DataPace", "PaceWindow", "pace_text"]

LEFT_OUT = 3  # steps at the start of a stream
FIRST_S, LATER_S, LEAST_STEPS = 5.0, 60.0, 8  # of a window: seconds, and steps
MOST_WAIT = 0.15  # of the time: below it is no lack
SPARE = 1.2  # how much faster than needed data should be read


@dataclasses.dataclass(kw_only=True, slots=True)
class PaceWindow:
    """Some steps of a stream, as one worker has seen them."""

    num_steps: int = 0
    num_samples: int = 0  # of this worker
    wait_s: float = 0.0
    busy_s: float = 0.0  # all other time of the loop
    read_s: float = 0.0  # by all readers of this worker together
    num_bytes: int = 0

    @property
    def wait_share(self) -> float:
        return self.wait_s / max(1e-9, self.wait_s + self.busy_s)


@dataclasses.dataclass(slots=True)
class _WatchedStream:
    stream: BatchStream
    window: PaceWindow
    num_left_out: int = 0
    is_told: bool = False


class DataPace:
    """Watches the streams of one worker. `tell` says a sentence, `warn(text, once)` warns."""

    def __init__(self, *, tell: Callable[[str], None], warn: Callable[[str, str], None], is_first: bool) -> None:
        """`is_first`: this worker speaks for all."""
        self._tell, self._warn, self._is_first = tell, warn, is_first
        self._watched: dict[str, _WatchedStream] = {}

    def opened(self, stream: BatchStream) -> None:
        """Watch a stream from its first step on."""
        if self._is_first and not stream.source.is_endless:
            self._watched[stream.source.name] = _WatchedStream(stream, PaceWindow())

    def step(self, batch: StepBatch, seconds: Mapping[str, float]) -> None:
        """A step was taken, and took these seconds."""
        one = self._watched.get(batch.stream)
        if one is None:
            return
        if one.num_left_out < LEFT_OUT:
            one.num_left_out += 1
            one.stream.meter.take()
            return
        window = one.window
        window.num_steps += 1
        window.num_samples += sum(micro.num_samples for micro in batch.micros)
        window.wait_s += seconds["data"]
        window.busy_s += max(0.0, seconds["total"] - seconds["data"] - seconds.get("recovery", 0.0))
        lasts_s = LATER_S if one.is_told else FIRST_S
        if window.num_steps >= LEAST_STEPS and window.wait_s + window.busy_s >= lasts_s:
            self._judge(one)

    def _judge(self, one: _WatchedStream) -> None:
        window, source = one.window, one.stream.source
        window.read_s, window.num_bytes = one.stream.meter.take()
        one.window = PaceWindow()
        if not (window.num_samples and window.read_s and window.busy_s):
            return  # it reads otherwise: batches are handed out by number, or none is this worker's
        is_map = one.stream.num_samples > 0
        text, lacks = pace_text(
            window,
            name=source.name,
            loaders=source.loaders,
            prefetch=source.prefetch,
            most_loaders=usable_cores() if is_map or source.lanes else 1,
        )
        if lacks:
            self._warn(text, f"pace of {source.name}")
        elif not one.is_told:
            self._tell(text)
        one.is_told, one.stream.meter.counts_bytes = True, False


def pace_text(window: PaceWindow, *, name: str, loaders: int, prefetch: int, most_loaders: int) -> tuple[str, bool]:
    """Return the sentence on a window, and whether data is lacking. `most_loaders`: that may read on this worker."""
    each = window.num_samples / window.read_s  # samples a second of one reader
    reads, needs = each * max(1, loaders), window.num_samples / window.busy_s
    by = (
        "in the worker itself" if not loaders else "1 loader process" if loaders == 1 else f"{loaders} loader processes"
    )
    size = f", {reads * window.num_bytes / window.num_samples / 1e6:,.3g} MB/s" if window.num_bytes else ""
    text = (
        f"data: stream {name!r} reads {reads:,.0f} samples/s on each worker ({by}{size}), the step needs {needs:,.0f}"
    )
    if window.wait_share < MOST_WAIT:
        return text, False
    waits = f"{text}; {window.wait_share:.0%} of the time it waits for data"
    wanted = max(1, math.ceil(needs * SPARE / each))
    if loaders and reads > needs * SPARE:
        return f"{waits}, though that is enough on average. Read further ahead: prefetch={prefetch * 2}", True
    if wanted > loaders and loaders < most_loaders:
        return f"{waits}. Let more processes read ahead: loaders={min(wanted, most_loaders)} (num_workers)", True
    if most_loaders == 1:
        return (
            f"{waits}. One process at most reads a stream that is not divided: paceline.ShardedStream divides it",
            True,
        )
    return f"{waits}. More loaders than cores do not help: prepare samples before the run, or store them nearer", True
