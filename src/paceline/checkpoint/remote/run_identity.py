"""Which run's checkpoints lie at an address, and which start of it writes them: `run.json` there and in the run.

Two runs that write to one address would replace and delete each other's checkpoints. So a run directory that has
checkpoints of its own does not take over an address that has another run's. Of two starts of one run the later one
writes, and the earlier one finds that out before it commits or deletes anything.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Collection, Sequence
from pathlib import Path

from paceline import clock
from paceline.checkpoint.checkpoint_dir import COMMIT_MARKER, candidates, is_whole
from paceline.checkpoint.remote.remote_checkpoints import RemoteCheckpoint
from paceline.checkpoint.remote.staged_upload import UPLOADS
from paceline.errors import CheckpointError
from paceline.plain_data import read_object
from paceline.private_files import make_run_directory
from paceline.processes import this_host
from paceline.regular_files import read_regular
from paceline.storage.object_store import ObjectStore
from paceline.storage.retries import StorageError

__all__ = ["Claim", "SupersededError", "claim"]

NAME = "run.json"


class SupersededError(CheckpointError):
    """A later start of the run writes to the address."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """What this start has written to the address."""

    store: ObjectStore
    start: str

    def check(self) -> None:
        """Raise SupersededError where a later start has taken over."""
        start, host = _read(self.store)[1:]
        if start and start != self.start:
            raise SupersededError(
                f"a later start of the run, on {host or 'another host'}, writes to {self.store.address}: this one "
                "uploads nothing any more"
            )


def claim(store: ObjectStore, run_dir: Path, *, remote: Sequence[RemoteCheckpoint], is_fresh: bool) -> Claim:
    """Note that this start of this run writes to the address.

    Raises CheckpointError where another run's checkpoints are there, and this run has some of its own: unless it
    starts over (`is_fresh`).
    """
    own, theirs = _own(run_dir), _read(store)
    local = local_markers(run_dir)
    is_shared = any(one.marker in local for one in remote if one.marker)
    if remote and local and own != theirs[0] and not is_shared and not is_fresh:
        raise CheckpointError(
            f"{store.address} has checkpoints of another run (the newest of step {remote[-1].step}, written by "
            f"{theirs[2] or 'an unknown host'}), and {run_dir} has some of its own. Use another --remote-dir; to go on "
            "with those, an empty --run-dir; to replace them, --fresh"
        )
    run = ("" if is_fresh or not remote else theirs[0]) or own or uuid.uuid4().hex
    start = uuid.uuid4().hex
    text = json.dumps({"run": run, "start": start, "host": this_host(), "at": clock.now()})
    store.write(NAME, text.encode())
    make_run_directory(run_dir)
    (run_dir / UPLOADS).mkdir(exist_ok=True)
    (run_dir / UPLOADS / NAME).write_text(json.dumps({"run": run, "address": store.address}), encoding="utf-8")
    return Claim(store=store, start=start)


def local_markers(run_dir: Path) -> Collection[bytes]:
    """Return the markers of the checkpoints that a run has on its disk."""
    found = [path for path in candidates(run_dir / "checkpoints") if not path.suffix and is_whole(path)]
    return {read_regular(path / COMMIT_MARKER) for path in found}


def _own(run_dir: Path) -> str:
    try:
        return str(read_object(read_regular(run_dir / UPLOADS / NAME)).get("run", ""))
    except (OSError, ValueError):
        return ""


def _read(store: ObjectStore) -> tuple[str, str, str]:
    """Return run, start and host that the address names; empty where there are none."""
    try:
        found = read_object(store.read(NAME))
    except FileNotFoundError:
        return "", "", ""
    except ValueError as error:
        raise StorageError(f"{store.where(NAME)} is damaged ({error}): delete it, and start again") from error
    return str(found.get("run", "")), str(found.get("start", "")), str(found.get("host", ""))
