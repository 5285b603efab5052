"""The sample ledger: the positions of each stream that this worker ran, step by step, for `paceline audit`.

The audit proves from the ledgers of all workers that no sample was lost or repeated.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import writing
from paceline.logs.ledger_runs import merge_ledger
from paceline.logs.sealed_log import LineLog, Sealing
from paceline.schedule.micro_batches import MicroBatch
from paceline.worker.data.step_batch import StepBatch

__all__ = ["ResumeOrigin", "SampleLedger"]

SEAL_BYTES, KEEP_BYTES = 1 << 19, 1 << 16  # of the file; and of its newest lines, that stay as they are
STEP = '{"step": '  # how the line of a step begins
TOLD_EVERY = 500  # steps: what mixtures have given
GRID = 1000  # steps: all workers' ledgers are cut at the same ones, so that their runs are as long


Drawn = Mapping[str, int] | None
Shares = Mapping[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ResumeOrigin:
    """What an attempt resumes from: nothing, a checkpoint of its run, or one of another run."""

    step: int = 0
    attempt: int | None = None  # of this run, which saved the checkpoint
    source: str | None = None  # the checkpoint, where it is of another run
    starts: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict[str, tuple[int, int]])
    """For a checkpoint of another run, the (epoch, position) of each stream; earlier samples are in no ledger here."""


class SampleLedger:
    """Appends one JSON line per committed step to `ledger.jsonl`, flushed at once; raises RunFileError where it
    cannot. Old lines are merged when the file has grown, and leave it for a sealed file beside it.
    """

    def __init__(
        self,
        path: Path,
        *,
        attempt: int,
        origin: ResumeOrigin | None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """`origin` is None for a worker that joins a running run, perhaps in place of a lost one. `say` is told where
        the file cannot be shortened."""
        self._path, self._attempt = path, attempt
        self._mixtures: dict[str, tuple[Callable[[], Drawn], Shares]] = {}  # by stream
        self._step = self._told_at = 0  # the newest step; the one with which it was told what mixtures had given
        self._waiting: dict[int, tuple[dict[str, Any], list[MicroBatch]]] = {}  # by step, until the round is committed
        with writing(path):
            sealing = Sealing(merge=merge_ledger, cut=_cut, over_bytes=SEAL_BYTES)
            self._log = LineLog(path, sealing=sealing, say=say)
        if origin is None:
            self._write({"joins": True})
        else:
            self.begin(origin)

    def begin(self, origin: ResumeOrigin) -> None:
        """Note what the attempt resumes from; before its first step a second call replaces the first."""
        line: dict[str, Any] = {"attempt": self._attempt, "from_step": origin.step, "of_attempt": origin.attempt}
        if origin.source is not None:
            line.update(source=origin.source, starts={name: list(start) for name, start in origin.starts.items()})
        self._write(line)

    def opened(self, stream: str, *, drawn: Callable[[], Drawn], shares: Shares, **about: Any) -> None:
        """Note what a stream reads: samples, batch, micro, seed, shuffle, drop_last; and the plan's staleness, where it
        bounds how far updates may be behind. `drawn()`: of a mixture, how many samples of each dataset committed steps
        have, and `shares`, which part of all each is to have."""
        self._write({"stream": stream, **about})
        if shares:
            self._mixtures[stream] = drawn, shares

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
        a step by itself, which no other ledger has. Micro-batches that came too late for the step are noted by the
        workers that were in time. A step that `waits` is written by `settle`.
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
        """Add micro-batches of a lost member to a step that waits; of a step that was written already they are
        noted."""
        if step in self._waiting:
            self._waiting[step][1].extend(micros)

    def settle(self) -> None:
        """Write the steps that waited, in order: they are committed now."""
        for step, (line, micros) in self._waiting.items():
            self._write({**line, "ranges": _ranges(micros)})
            self._step = step
        self._waiting.clear()
        if self._step // TOLD_EVERY != self._told_at // TOLD_EVERY:
            self._tell_drawn()

    def _tell_drawn(self) -> None:
        """Note what mixtures have given up to the newest step, of all attempts."""
        if not self._mixtures or self._step == self._told_at:
            return
        self._told_at = self._step
        for stream, (drawn, shares) in self._mixtures.items():
            counts = drawn()
            if counts is not None:
                told = {name: [counts[name], round(share, 9)] for name, share in shares.items()}
                self._write({"drawn": told, "of": stream, "until": self._step})

    def rolled_back(self, *, from_step: int, to_step: int, skips: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        """Note that after `from_step` the state became that of `to_step` again, and the steps between are undone.

        `skips` has two (epoch, position) pairs for each stream, at `to_step` and now: the samples between are skipped.
        """
        spans = {name: [list(position) for position in span] for name, span in skips.items() if span[0] != span[1]}
        self._write({"rollback": {"to_step": to_step, "from_step": from_step, "skips": spans}})

    def close(self) -> None:
        """Write what is left, and close the file."""
        self._tell_drawn()
        with writing(self._path):
            self._log.close()

    def _write(self, line: dict[str, Any]) -> None:
        with writing(self._path):
            self._log.write(json.dumps(line))


def _cut(lines: Sequence[str]) -> int:
    """How many of the oldest lines are sealed: at a step that other workers' ledgers are cut at, where there is one."""
    kept, most = 0, 0
    for place in range(len(lines) - 1, -1, -1):
        kept += len(lines[place]) + 1
        if kept > KEEP_BYTES:
            most = most or place + 1
            if _step(lines[place]) % GRID == 0:
                return place + 1
    return most


def _step(line: str) -> int:
    """The step of a line; 1 where it has none."""
    try:
        return int(line[len(STEP) : line.index(",")]) if line.startswith(STEP) else 1
    except ValueError:  # damaged
        return 1


def _ranges(micros: Sequence[MicroBatch]) -> list[list[int]]:
    """Positions as half-open ranges, neighbours joined."""
    ranges: list[list[int]] = []
    for micro in micros:
        if ranges and ranges[-1][1] == micro.start:
            ranges[-1][1] = micro.stop
        else:
            ranges.append([micro.start, micro.stop])
    return ranges
