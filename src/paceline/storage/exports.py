"""Writes exported files to object storage: to a folder of this host first, then as objects, the index last."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.errors import CheckpointError
from paceline.storage.address import is_address, joined, plain_path
from paceline.storage.file_sending import FileSender
from paceline.storage.object_store import ObjectStore
from paceline.storage.retries import StorageError

__all__ = ["send_files", "written_to"]


@contextlib.contextmanager
def written_to(path: Path) -> Iterator[Path]:
    """Yield where to write a file or folder that is to be at `path`: there, or, for an address, on this host.

    For an address, what was written is sent when the block ends without an error. Raises CheckpointError.
    """
    address = plain_path(path)
    if address is None or not is_address(address):
        yield path
        return
    try:
        with tempfile.TemporaryDirectory(prefix="paceline-export-") as place:
            local = Path(place) / path.name
            yield local
            send_files(local, address)
    except StorageError as error:
        raise CheckpointError(str(error)) from error


def send_files(local: Path, address: str) -> list[str]:
    """Send a file, or all files of a folder, and return their addresses.

    Raises CheckpointError where the folder has other weights, which readers might take for these, and StorageError.
    """
    folder = address.rstrip("/") if local.is_dir() else address.rpartition("/")[0]
    store, names = ObjectStore(folder), _in_order(local)
    root = local if local.is_dir() else local.parent
    if local.is_dir():
        others = [one.name for one in store.listed() if "/" not in one.name and _is_weights(one.name)]
        if stray := sorted(set(others) - set(names)):
            raise CheckpointError(
                f"{address} has other weights already ({', '.join(stray[:3])}), which readers might take for these: "
                "remove them, or name another folder"
            )
    sender = FileSender(store)
    try:
        for name in names:
            sender.send(root / name, name)
    finally:
        sender.close()
    return [joined(folder, name) for name in names]


def _in_order(local: Path) -> Sequence[str]:
    """Return a file's name, or those of all files in a folder and its folders. What names others comes last."""
    if not local.is_dir():
        return [local.name]
    files = [path.relative_to(local) for path in local.rglob("*") if path.is_file()]
    return [path.as_posix() for path in sorted(files, key=lambda path: (path.suffix == ".json", path))]


def _is_weights(name: str) -> bool:
    return name.startswith("model") and ".safetensors" in name
