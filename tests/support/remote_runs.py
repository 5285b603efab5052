"""Run directories with small checkpoints, and stores that break off, for tests of uploads and downloads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paceline.checkpoint.checkpoint_dir import (
    CommitMarker,
    checksum,
    partial_path,
    publish,
    remove,
    write_commit_marker,
)
from paceline.checkpoint.remote.remote_checkpoints import RemoteCheckpoints
from paceline.storage.object_store import ObjectStore
from paceline.storage.retries import BoundedRetries, StorageError

__all__ = ["BreakingStore", "complete_steps", "drop_checkpoint", "put_checkpoint"]


def put_checkpoint(
    run_dir: Path, step: int, *, saved_at: float | None = None, num_bytes: int = 100, files: int = 2
) -> Path:
    """Make a complete checkpoint of a run, as a save does; its bytes tell the step and when it was saved."""
    saved_at = float(step) if saved_at is None else saved_at
    partial = partial_path(run_dir / "checkpoints", step)
    partial.mkdir(parents=True)
    for number in range(files):
        text = f"{step} {saved_at} {number} ".encode()
        (partial / f"__{number}_0.distcp").write_bytes((text * (num_bytes // len(text) + 1))[:num_bytes])
    paths = sorted(partial.iterdir())
    mark = CommitMarker(
        step=step,
        about={"step": step, "saved_at": saved_at},
        files={path.name: path.stat().st_size for path in paths},
        file_crc32={path.name: checksum(path) for path in paths},
        tensor_crc32={},
    )
    write_commit_marker(partial, mark)
    return publish(partial)


def drop_checkpoint(run_dir: Path, step: int) -> None:
    """Delete it, as retention does."""
    remove(run_dir / "checkpoints" / f"step_{step:08d}")


def complete_steps(remote: RemoteCheckpoints) -> list[int]:
    """The steps of which the store has a complete checkpoint."""
    return [one.step for one in remote.look() if one.problem is None]


class BreakingStore(ObjectStore):
    """A store that fails, or calls something, before a write or a deletion that a test names."""

    def __init__(self, address: str) -> None:
        super().__init__(address, retries=BoundedRetries(tries=1))
        self.before: Callable[[str, str], None] = lambda what, name: None
        self.changes: list[tuple[str, str]] = []

    def break_at(self, number: int) -> None:
        """Fail from the change of this number on, as a process does that is killed."""

        def check(what: str, name: str) -> None:
            if len(self.changes) > number:
                raise StorageError(f"broken off before {what} {name}")

        self.before = check

    def write(self, name: str, data: bytes) -> None:
        self._comes("write", name)
        super().write(name, data)

    def send(self, name: str, path: str) -> None:
        self._comes("send", name)
        super().send(name, path)

    def delete(self, names: object) -> None:
        for name in list(names):  # pyright: ignore[reportArgumentType, reportCallIssue]
            self._comes("delete", name)
            super().delete([name])

    def _comes(self, what: str, name: str) -> None:
        self.changes.append((what, name))
        self.before(what, name)
