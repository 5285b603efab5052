"""Uploads a run's checkpoints one after the other, the newest first, and deletes those beyond `keep` in the store.

A checkpoint whose upload has begun stays on the disk until it is sent, at most one beyond the run's own `keep`. An
upload that fails is tried again, or the next checkpoint is uploaded in its place. Nothing here is in training's way:
it runs in a process of its own, and only reads what is committed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Container, Mapping
from pathlib import Path

from paceline.checkpoint.checkpoint_dir import COMMIT_MARKER, CommitMarker, candidates, is_whole, step_of
from paceline.checkpoint.remote.remote_checkpoints import RemoteCheckpoints, folder_of
from paceline.checkpoint.remote.run_identity import Claim, SupersededError
from paceline.checkpoint.remote.staged_upload import StagedUpload, staged_steps
from paceline.errors import CheckpointError
from paceline.regular_files import read_regular
from paceline.storage.file_sending import PART_BYTES, FileSender
from paceline.storage.retries import StorageError

__all__ = ["UploadReport", "Uploader"]

OTHERS_S = 1.0  # between two looks at files that other hosts send


@dataclasses.dataclass(frozen=True, kw_only=True)
class UploadReport:
    """What became of an upload. `reason`: why it is not there; None: it is. `num_sent`: bytes that went out now."""

    step: int
    address: str
    num_bytes: int = 0
    num_sent: int = 0
    seconds: float = 0.0
    reason: str | None = None
    remains: str | None = None  # why older ones could not be deleted


class Uploader:
    """Keeps the checkpoints of one run directory in a store, as seen from one host."""

    def __init__(
        self,
        run_dir: Path,
        remote: RemoteCheckpoints,
        *,
        keep: int,
        is_fresh: bool = False,
        claim: Claim | None = None,
        on_begin: Callable[[int, int], None] = lambda step, num_bytes: None,
        part_bytes: int = PART_BYTES,
    ) -> None:
        """`claim`: this start's, where it is alone; `on_begin` hears step and bytes of each upload."""
        self._run_dir, self._remote, self._keep = run_dir, remote, keep
        self._claim, self._is_fresh, self._on_begin = claim, is_fresh, on_begin
        self._part_bytes = part_bytes
        self._there: dict[int, bytes] = {}  # markers of what is in the store
        self._seen: dict[Path, tuple[tuple[int, int], bytes]] = {}  # markers on the disk, and what they were read from
        self._stuck: int | None = None  # a step of which the last try has sent nothing
        self._is_first = True
        self._sent, self._counting = 0, threading.Lock()
        self._given_up: frozenset[bytes] = frozenset()  # markers of what a run that starts over has on its disk
        if is_fresh:
            self._given_up = frozenset(marker for _, marker in self._local().values())

    def waiting(self) -> list[int]:
        """Return the steps that are to be uploaded, the next one first.

        An upload that has begun comes first, also where the run has deleted the checkpoint meanwhile: otherwise saves
        that come faster than uploads end would let none of them end. One that came no further gives way.
        """
        local = {step: marker for step, (_, marker) in self._local().items()}
        newest = sorted(local, reverse=True)[: self._keep]
        wanted = [step for step in newest if self._there.get(step) != local[step]]
        begun = [step for step in self._held(local) if step != self._stuck or not wanted]
        return [*begun, *(step for step in wanted if step not in begun)]

    def drop_all(self) -> None:
        """Give up what an earlier start was uploading."""
        for step in staged_steps(self._run_dir):
            StagedUpload(self._run_dir, step).drop()

    def turn(self) -> UploadReport | None:
        """Upload the next checkpoint; None: there is none to upload, or another host does it.

        A failure is in the report. Raises SupersededError where a later start of the run writes to the address.
        """
        steps = self.waiting()
        if not steps:
            return None
        step, began = steps[0], time.monotonic()
        local, staged = self._local(), StagedUpload(self._run_dir, step)
        self._drop_others(step)
        self._sent = 0
        address = self._remote.store.where(folder_of(step))
        try:
            staged.stage(local[step][0] if step in local else None)
            if self._is_there(staged):
                self._done(staged)
                return None
            num_bytes = sum(staged.mark.files.values()) + len(staged.marker)
            self._on_begin(step, num_bytes)
            self._send_all(staged)
            if not self._commit(staged):
                return None
        except SupersededError:
            raise
        except (StorageError, OSError, CheckpointError) as error:
            if isinstance(error, FileNotFoundError) and not staged.directory.exists():
                return None  # another host has committed it
            self._stuck = None if self._sent else step
            return UploadReport(step=step, address=address, num_sent=self._sent, reason=str(error))
        return UploadReport(
            step=step,
            address=address,
            num_bytes=num_bytes,
            num_sent=self._sent,
            seconds=time.monotonic() - began,
            remains=self._prune(staged.mark),
        )

    def _held(self, local: Container[int]) -> list[int]:
        """Return the steps whose upload has begun, the newest first; what was only half held is dropped."""
        found: list[int] = []
        for step in reversed(staged_steps(self._run_dir)):
            staged = StagedUpload(self._run_dir, step)
            if step in local or (staged.directory / COMMIT_MARKER).exists():
                found.append(step)
            else:
                staged.drop()
        return found

    def _local(self) -> Mapping[int, tuple[Path, bytes]]:
        """Return the complete checkpoints on the disk, by step, with their markers."""
        found: dict[int, tuple[Path, bytes]] = {}
        for path in candidates(self._run_dir / "checkpoints"):
            if path.suffix:
                continue
            with contextlib.suppress(OSError):
                about = (path / COMMIT_MARKER).stat()
                key = about.st_ino, about.st_mtime_ns
                if self._seen.get(path, (None,))[0] != key and is_whole(path):
                    self._seen[path] = key, read_regular(path / COMMIT_MARKER)
                is_known = path in self._seen and self._seen[path][0] == key
                if is_known and self._seen[path][1] not in self._given_up:
                    found[step_of(path)] = path, self._seen[path][1]
        return found

    def _drop_others(self, step: int) -> None:
        """Give up what is held of other checkpoints: the disk holds one more than the run keeps, and no more."""
        for other in staged_steps(self._run_dir):
            if other != step:
                StagedUpload(self._run_dir, other).drop()

    def _is_there(self, staged: StagedUpload) -> bool:
        """Whether the store has this very checkpoint; another one of the step is made none, before it is replaced."""
        with staged.taking(COMMIT_MARKER) as note:
            marker = self._remote.marker(staged.step)
            if marker == staged.marker:
                return True
            if note is not None and marker is not None:
                self._fence()
                self._remote.uncommit(staged.step)
        return False

    def _send_all(self, staged: StagedUpload) -> None:
        """Send all files, together with other hosts that have the disk; returns when all are sent."""
        sender = FileSender(self._remote.store, part_bytes=self._part_bytes, on_sent=self._count)
        small = concurrent.futures.ThreadPoolExecutor(4, thread_name_prefix="upload files")
        try:
            left = list(staged.mark.files)
            while left:
                tasks = {
                    name: small.submit(self._send, staged, sender, name)
                    for name in left
                    if staged.mark.files[name] <= self._part_bytes
                }
                done = {name: self._send(staged, sender, name) for name in left if name not in tasks}
                done |= {name: task.result() for name, task in tasks.items()}
                left = [name for name in left if not done[name]]
                if left:
                    time.sleep(OTHERS_S)
        finally:
            small.shutdown(cancel_futures=True)
            sender.close()

    def _send(self, staged: StagedUpload, sender: FileSender, name: str) -> bool:
        """Send a file, unless that was done; False: another host is at it."""
        with staged.taking(name) as note:
            if note is None:
                return False
            if not note.read().get("is_done"):
                sender.send(staged.directory / name, f"{folder_of(staged.step)}/{name}", note)
                note.write({"is_done": True})
        return True

    def _commit(self, staged: StagedUpload) -> bool:
        """Make it a checkpoint; False: another host is at that."""
        self._fence()
        with staged.taking(COMMIT_MARKER) as note:
            if note is None:
                return False
            try:
                self._remote.commit(staged.step, staged.marker, staged.mark.files)
            except CheckpointError:
                staged.forget()
                raise
        self._done(staged)
        return True

    def _done(self, staged: StagedUpload) -> None:
        self._there[staged.step], self._stuck = staged.marker, None
        staged.drop()

    def _prune(self, committed: CommitMarker) -> str | None:
        """Delete what is beyond; returns what went wrong. It is tried again after the next upload."""
        busy = set(staged_steps(self._run_dir))
        is_first, self._is_first = self._is_first, False
        keep = committed.about.get("keep")  # as the workers' script says it
        try:
            self._remote.prune(
                keep=keep if isinstance(keep, int) and keep > 0 else self._keep,
                committed=committed,
                here={*self._local(), *busy, committed.step},
                busy=busy,
                is_first_of_fresh=self._is_fresh and is_first,
            )
        except StorageError as error:
            return str(error)
        return None

    def _fence(self) -> None:
        if self._claim is not None:
            self._claim.check()

    def _count(self, num_bytes: int) -> None:
        with self._counting:
            self._sent += num_bytes
