"""The checkpoints below an address: which are complete, how one appears, how one goes.

    s3://bucket/runs/first/
      run.json                     which run's checkpoints these are, and which start writes them
      step_00000100/               complete: checkpoint.json is there
        __0_0.distcp  .metadata  state.pt
        checkpoint.json            the commit marker: written last, deleted first

Objects have the names and bytes of the local files, so a folder that any tool has copied is a checkpoint. A store has
no rename. What has no marker is no checkpoint: it is being written, or was left unfinished. No torch here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping

from paceline.checkpoint.checkpoint_dir import COMMIT_MARKER, CommitMarker, NewerFormatError, parse_commit_marker
from paceline.errors import CheckpointError
from paceline.storage.object_store import ObjectStore
from paceline.storage.uploads_in_parts import abort_uploads

__all__ = ["RemoteCheckpoint", "RemoteCheckpoints", "folder_of"]

_OBJECT = re.compile(r"step_(\d{8,})/([^/]+)")


def folder_of(step: int) -> str:
    """Return the folder of a step's checkpoint, below the address."""
    return f"step_{step:08d}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteCheckpoint:
    """What lies in one step's folder. `problem`: why it is no complete checkpoint; None: it is one."""

    step: int
    files: Mapping[str, int]  # bytes of each object
    marker: bytes = b""
    mark: CommitMarker | None = None
    problem: str | None = None
    is_newer_format: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(self.files.values())


class RemoteCheckpoints:
    """All checkpoints below the address of a store."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store

    def look(self) -> list[RemoteCheckpoint]:
        """Return what is there, by step. Raises StorageError where the store does not answer."""
        found: dict[int, dict[str, int]] = {}
        for one in self.store.listed():
            matched = _OBJECT.fullmatch(one.name)
            if matched is not None:
                found.setdefault(int(matched[1]), {})[matched[2]] = one.num_bytes
        return [self._about(step, found[step]) for step in sorted(found)]

    def marker(self, step: int) -> bytes | None:
        """Return the marker of a step's checkpoint as it is now; None: there is none."""
        try:
            return self.store.read(f"{folder_of(step)}/{COMMIT_MARKER}")
        except FileNotFoundError:
            return None

    def commit(self, step: int, marker: bytes, files: Mapping[str, int]) -> None:
        """Make the files of a step a checkpoint; raises CheckpointError where one of them is not there in full."""
        there = {one.name.rpartition("/")[2]: one.num_bytes for one in self.store.listed(folder_of(step))}
        for name, num_bytes in files.items():
            if there.get(name) != num_bytes:
                raise CheckpointError(
                    f"{self.store.where(f'{folder_of(step)}/{name}')} has {there.get(name, 'no')} bytes; "
                    f"{num_bytes} were sent"
                )
        self.store.write(f"{folder_of(step)}/{COMMIT_MARKER}", marker)
        self.store.delete(f"{folder_of(step)}/{name}" for name in there.keys() - {*files, COMMIT_MARKER})

    def uncommit(self, step: int) -> None:
        """Make a step's files no checkpoint any more, before they are replaced or deleted."""
        self.store.delete([f"{folder_of(step)}/{COMMIT_MARKER}"])

    def remove(self, step: int, names: Collection[str]) -> None:
        """Delete a checkpoint: its marker first, so that a reader never takes the rest for one."""
        self.uncommit(step)
        self.store.delete(f"{folder_of(step)}/{name}" for name in sorted(names) if name != COMMIT_MARKER)

    def prune(
        self,
        *,
        keep: int,
        committed: CommitMarker,
        here: Collection[int],
        busy: Collection[int],
        is_first_of_fresh: bool,
    ) -> None:
        """Delete what is beyond the `keep` newest complete ones, and what was left unfinished.

        committed: what was just written, and always stays. here: steps that the run has on its disk; busy: that are
        being uploaded. A later step that was saved earlier is one that the run has gone back from, and goes, too.
        is_first_of_fresh: the run has started over, so that nothing stays that it does not have. Those of a newer
        format stay in all cases.
        """
        num_good = 0
        for one in reversed(self.look()):
            if one.is_newer_format:
                continue
            is_given_up = one.step not in here and (is_first_of_fresh or _is_given_up(one, committed))
            if one.step == committed.step or (one.problem is None and not is_given_up and num_good < keep):
                num_good += 1
            elif one.step not in busy:
                self.remove(one.step, one.files)
        folders = {folder_of(step) for step in busy}
        abort_uploads(self.store, lambda name: bool(_OBJECT.fullmatch(name)) and name.split("/")[0] not in folders)

    def _about(self, step: int, files: Mapping[str, int]) -> RemoteCheckpoint:
        if COMMIT_MARKER not in files:
            return RemoteCheckpoint(
                step=step, files=files, problem=f"it has no {COMMIT_MARKER}: the upload was not completed"
            )
        marker = self.marker(step)
        if marker is None:  # it is being deleted
            return RemoteCheckpoint(step=step, files=files, problem=f"it has no {COMMIT_MARKER} any more")
        try:
            mark = parse_commit_marker(marker)
        except CheckpointError as error:
            is_newer = isinstance(error, NewerFormatError)
            return RemoteCheckpoint(step=step, files=files, marker=marker, problem=str(error), is_newer_format=is_newer)
        wrong = _first_wrong(mark, files)
        return RemoteCheckpoint(step=step, files=files, marker=marker, mark=mark, problem=wrong)


def _first_wrong(mark: CommitMarker, files: Mapping[str, int]) -> str | None:
    for name, num_bytes in mark.files.items():
        if files.get(name) != num_bytes:
            return f"the file {name} has {files.get(name, 'no')} bytes; {num_bytes} were written"
    return None


def _is_given_up(one: RemoteCheckpoint, committed: CommitMarker) -> bool:
    if one.mark is None:
        return True
    saved_at, committed_at = _saved_at(one.mark), _saved_at(committed)
    return one.step > committed.step and saved_at is not None and committed_at is not None and saved_at < committed_at


def _saved_at(mark: CommitMarker) -> float | None:
    said = mark.about.get("saved_at")
    return float(said) if isinstance(said, (int, float)) else None
