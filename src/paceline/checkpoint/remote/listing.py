"""Lists checkpoints for people and programs, on a disk and in a store."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.checkpoint.checkpoint_dir import candidates, step_of, usable
from paceline.checkpoint.remote.remote_checkpoints import RemoteCheckpoints, folder_of
from paceline.errors import CheckpointError
from paceline.storage.object_store import ObjectStore
from paceline.units import bytes_text

__all__ = ["ListedCheckpoint", "lines_of", "listed_here", "listed_remotely"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListedCheckpoint:
    """One row. `problem`: why it is not complete; None: it is."""

    step: int
    place: str
    num_bytes: int
    saved_at: float | None = None  # seconds since the epoch
    plan: str | None = None
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def listed_here(directory: Path) -> list[ListedCheckpoint]:
    """Return what is in a folder of checkpoints, by step; by sizes, without reading the files."""
    found: list[ListedCheckpoint] = []
    for path in candidates(directory):
        about: dict[str, Any] = {}
        problem: str | None = None
        try:
            about = dict(usable(path).about)
        except CheckpointError as error:
            problem = str(error)
        num_bytes = sum(file.stat().st_size for file in path.glob("*") if file.is_file())
        found.append(_row(step_of(path), str(path), num_bytes, about, problem))
    return found


def listed_remotely(address: str) -> list[ListedCheckpoint]:
    """Return what is below an address, by step. Raises StorageError where the store does not answer."""
    store = ObjectStore(address)
    return [
        _row(
            one.step,
            store.where(folder_of(one.step)),
            one.num_bytes,
            {} if one.mark is None else dict(one.mark.about),
            one.problem,
        )
        for one in RemoteCheckpoints(store).look()
    ]


def lines_of(found: Sequence[ListedCheckpoint]) -> Iterator[str]:
    """Yield a table's lines."""
    if not found:
        yield "there are no checkpoints"
    for one in found:
        when = "" if one.saved_at is None else f"{datetime.datetime.fromtimestamp(one.saved_at):%Y-%m-%d %H:%M:%S}"
        state = when if one.problem is None else f"NOT COMPLETE: {one.problem}"
        yield f"step {one.step:<10} {bytes_text(one.num_bytes):>10}  {state:<19}  {one.place}"


def _row(step: int, place: str, num_bytes: int, about: dict[str, Any], problem: str | None) -> ListedCheckpoint:
    saved_at, plan = about.get("saved_at"), about.get("plan")
    return ListedCheckpoint(
        step=step,
        place=place,
        num_bytes=num_bytes,
        saved_at=float(saved_at) if isinstance(saved_at, (int, float)) else None,
        plan=str(plan) if plan is not None else None,
        problem=problem,
    )
