"""The ledger: which positions of which stream this worker ran in each committed step. `paceline audit` proves from it
that no sample was lost or repeated."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import writing
from paceline.events import open_log
from paceline.schedule.micro_batches import MicroBatch
from paceline.worker.data.step_batch import StepBatch

__all__ = ["ResumeOrigin", "SampleLedger"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ResumeOrigin:
    """What an attempt goes on from: nothing, a checkpoint of its run, or one of another run."""

    step: int = 0
    attempt: int | None = None  # of this run, which saved the checkpoint
    source: str | None = None  # the checkpoint, where it is of another run
    starts: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict[str, tuple[int, int]])
    """Of another run: where each of its streams stands, (epoch, position); what came before is not in our ledgers."""


class SampleLedger:
    """Appends one JSON line per committed step to `ledger.jsonl`, flushed at once; RunFileError where it cannot."""

    def __init__(self, path: Path, *, attempt: int, origin: ResumeOrigin | None) -> None:
        """`origin` is None for a worker that joins a run under way, perhaps in the place of one that was lost."""
        self._path, self._attempt = path, attempt
        self._waiting: dict[int, tuple[dict[str, Any], list[MicroBatch]]] = {}  # by step, until a round of them counts
        with writing(path):
            self._file = open_log(path)
        if origin is None:
            self._write({"joins": True})
        else:
            self.begin(origin)

    def begin(self, origin: ResumeOrigin) -> None:
        """Note what the attempt goes on from; said again before its first step, the later word counts."""
        line: dict[str, Any] = {"attempt": self._attempt, "from_step": origin.step, "of_attempt": origin.attempt}
        if origin.source is not None:
            line.update(source=origin.source, starts={name: list(start) for name, start in origin.starts.items()})
        self._write(line)

    def opened(self, stream: str, **about: Any) -> None:
        """Note what a stream reads: samples, batch, micro, seed, shuffle, drop_last; and the plan's staleness, where it
        bounds how far updates may be behind."""
        self._write({"stream": stream, **about})

    def committed(
        self,
        batch: StepBatch,
        micros: Sequence[MicroBatch],
        *,
        step: int,
        skipped: bool,
        is_whole: bool,
        waits: bool = False,
    ) -> None:
        """Note the micro-batches that this worker ran for a step; a skipped one used them without changing the weights.

        `is_whole`: note the whole step's positions, too. In an elastic run each member does: one that is lost after its
        gradients were summed, and before it could write them down, leaves no gap. So does a replica that has run all of
        a step by itself, which is in nobody else's ledger. Micro-batches that came too late
        for the step are noted by all who did not. A step that `waits` is written by `settle`.
        """
        line: dict[str, Any] = {
            "step": step,
            "stream": batch.stream,
            "epoch": batch.epoch,
            "ranges": [],
            "skipped": skipped,
        }
        if is_whole:
            line["whole"] = [batch.start, batch.stop]
        if batch.dropped:
            line["dropped"] = _ranges(batch.dropped)
        if batch.behind is not None:
            line["behind"] = batch.behind
        self._waiting[step] = line, list(micros)
        if not waits:
            self.settle()

    def ran_more(self, step: int, micros: Sequence[MicroBatch]) -> None:
        """Add to a step that waits micro-batches that a lost member should have run; of one that was written already
        they were noted."""
        if step in self._waiting:
            self._waiting[step][1].extend(micros)

    def settle(self) -> None:
        """Write the steps that waited, in order: they count now."""
        for line, micros in self._waiting.values():
            self._write({**line, "ranges": _ranges(micros)})
        self._waiting.clear()

    def rolled_back(self, *, from_step: int, to_step: int, skips: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        """Note that after `from_step` the state became that of `to_step` again, and the steps between are undone.

        `skips` has for each stream (epoch, position) where it stood then, and where it stands and goes on: the samples
        between are not used again.
        """
        places = {name: [list(place) for place in span] for name, span in skips.items() if span[0] != span[1]}
        self._write({"rollback": {"to_step": to_step, "from_step": from_step, "skips": places}})

    def close(self) -> None:
        with writing(self._path):
            self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        with writing(self._path):
            self._file.write(json.dumps(line) + "\n")


def _ranges(micros: Sequence[MicroBatch]) -> list[list[int]]:
    """Positions as half-open ranges, neighbours joined."""
    ranges: list[list[int]] = []
    for micro in micros:
        if ranges and ranges[-1][1] == micro.start:
            ranges[-1][1] = micro.stop
        else:
            ranges.append([micro.start, micro.stop])
    return ranges
