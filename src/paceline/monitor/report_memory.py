"""What each worker held, for the report: its peak memory, and how much of it the model's and optimizer's state was.

Layouts that split a replica are chosen for this, so each worker has a row: stages differ, and uneven parts do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from paceline.events import WorkerFinished
from paceline.monitor.goodput_log import AttemptLog
from paceline.units import bytes_text

__all__ = ["Held", "held_by_worker", "held_lines"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Of one worker, in bytes."""

    peak_memory_bytes: int  # of its process, or of its GPU
    state_bytes: int  # parameters, buffers and optimizer state in the end; 0: not known


def held_by_worker(logs: Sequence[AttemptLog]) -> dict[int, Held]:
    """Return what the workers of the newest attempt that came to an end have told, by worker."""
    for log in reversed(logs):
        told = [record.event for record in log.records if isinstance(record.event, WorkerFinished)]
        if told:
            return {
                one.rank: Held(peak_memory_bytes=one.peak_memory_bytes, state_bytes=one.state_bytes)
                for one in sorted(told, key=lambda one: one.rank)
            }
    return {}


def held_lines(held: Mapping[int, Held], *, most: int) -> Iterator[str]:
    """A table with a row for each of the first `most` workers; nothing where nobody has told."""
    if not held:
        return
    yield ""
    yield f"{'worker':<8}{'peak memory':>14}   {'of it parameters, buffers and optimizer state'}"
    for worker, one in list(held.items())[:most]:
        state = bytes_text(one.state_bytes) if one.state_bytes else "not known"
        yield f"{worker:<8}{bytes_text(one.peak_memory_bytes):>14}   {state}"
    if len(held) > most:
        yield f"and {len(held) - most} more: see --json"
