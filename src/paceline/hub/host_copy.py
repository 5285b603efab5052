"""One copy of a folder in object storage on each host: the first of its workers downloads, the others wait for it.

Weights are mapped into memory, so they have to be files. Pieces of all files come at once, and what came before a kill
is not asked for again. The copy gets its name when all of it is there. It is named by the address and by what the store
says of each object (size, tag, time): weights that were written anew are another copy.

Where workers keep parts, they ask for the pieces of these alone (`part_copy.py`).
"""

from __future__ import annotations

import shutil
from pathlib import Path

from paceline.errors import CheckpointError
from paceline.hub.copied_pieces import CopiedPieces, all_pieces
from paceline.hub.host_lock import STILL_S, alone
from paceline.hub.stored_folder import FolderChanged, look_at
from paceline.storage.object_store import ObjectStore

__all__ = ["PREFIX", "host_copy"]

PREFIX = "weights-"


def host_copy(address: str, cache: Path, *, still_s: float = STILL_S) -> Path:
    """Return this host's copy of a folder, after making it if it is not there.

    Raises CheckpointError where the folder has no weights or the disk no room, and StorageError.
    """
    store = ObjectStore(address)
    stored = look_at(store)
    folder = cache / f"{PREFIX}{stored.identity}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with alone(folder, still_s):
        if not folder.is_dir():
            partial = folder.with_suffix(".partial")
            partial.mkdir(exist_ok=True)
            pieces = CopiedPieces(stored, partial)
            try:
                pieces.bring(store, all_pieces(stored))
                if _identity_now(store) != stored.identity:
                    raise FolderChanged.at(store.address)
            except FolderChanged:
                shutil.rmtree(partial)  # nobody will ask for this version again
                raise
            for name in stored.objects:
                (partial / name).touch(0o600)  # of those without a byte nothing came
            pieces.forget_ledger()
            partial.rename(folder)
    return folder


def _identity_now(store: ObjectStore) -> str | None:
    """What the folder is after the download; None where it is no whole one any more."""
    try:
        return look_at(store).identity
    except (CheckpointError, FileNotFoundError, ValueError):  # the index is being written, say
        return None
