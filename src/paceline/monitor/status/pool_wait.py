"""Whether a run that does not run waits in its pool's queue: its own record only says how its last attempt ended."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.monitor.records.run_record import RunRecord
from paceline.plain_data import read_object
from paceline.regular_files import read_regular

__all__ = ["pool_that_will_go_on"]

MOST_BYTES = 16 << 20  # of a file
MOST_WAITING = 2000  # runs whose files are looked at
WILL_GO_ON = {"stopped": ("waiting", "leaving"), "failed": ("waiting",), "lost": ("waiting",)}  # by the run's state


def pool_that_will_go_on(record: RunRecord) -> str | None:
    """Return the folder of the pool in whose queue a run waits; None where it runs or waits in none, or the pool's
    files cannot be read: they are those of its users.
    """
    phases = WILL_GO_ON.get(record.state_now(), ())
    if record.pool is None or not phases:
        return None
    pool, run_dir = Path(record.pool), os.path.realpath(record.run_dir)
    runs = _read(pool / "pool.json").get("runs")
    entries = runs if isinstance(runs, dict) else {}
    waiting = [name for name, one in entries.items() if isinstance(one, dict) and one.get("phase") in phases]
    own = os.path.basename(run_dir)  # most runs are named so, and then one file is read
    for name in sorted(waiting, key=lambda name: name != own)[:MOST_WAITING]:
        found = _read(pool / "queue" / f"{os.path.basename(name)}.json").get("run_dir")
        if isinstance(found, str) and "\0" not in found and os.path.realpath(found) == run_dir:
            return record.pool
    return None


def _read(path: Path) -> Mapping[str, Any]:
    """An object of JSON; an empty one where there is none that can be read."""
    try:
        return read_object(read_regular(path, MOST_BYTES))
    except (OSError, ValueError):
        return {}
