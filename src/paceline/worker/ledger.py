"""The ledger: which positions of which stream this worker ran in each committed step. `paceline audit` proves from it
that no sample was lost or repeated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.schedule.share import Micro
from paceline.worker.batch import StepBatch

__all__ = ["Ledger"]


class Ledger:
    """Appends one JSON line per committed step to `ledger.jsonl`, flushed at once."""

    def __init__(self, path: Path, *, attempt: int, from_step: int) -> None:
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._write({"attempt": attempt, "from_step": from_step})

    def opened(self, stream: str, **about: Any) -> None:
        """Note what a stream reads: samples, batch, micro, seed, shuffle, drop_last."""
        self._write({"stream": stream, **about})

    def committed(self, batch: StepBatch, *, step: int, skipped: bool) -> None:
        """Note this worker's positions of a step; a skipped step used its samples without changing the weights."""
        self._write(
            {
                "step": step,
                "stream": batch.stream,
                "epoch": batch.epoch,
                "ranges": _ranges(batch.micros),
                "skipped": skipped,
            }
        )

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")


def _ranges(micros: Sequence[Micro]) -> list[list[int]]:
    """Positions as half-open ranges, neighbours joined."""
    ranges: list[list[int]] = []
    for micro in micros:
        if ranges and ranges[-1][1] == micro.start:
            ranges[-1][1] = micro.stop
        else:
            ranges.append([micro.start, micro.stop])
    return ranges
