"""Finds out before a run whether a store can be used: writes, reads, lists and deletes one small object."""

from __future__ import annotations

import os
import socket

from paceline.storage.object_store import ObjectStore
from paceline.storage.retries import StorageError

__all__ = ["probe"]


def probe(store: ObjectStore) -> None:
    """Raise StorageError, with the remedy, where a run could not keep its checkpoints there."""
    name = f".probe-{socket.gethostname()}-{os.getpid()}"
    text = name.encode()
    store.write(name, text)
    try:
        try:
            read = store.read(name)
        except FileNotFoundError:
            read = b""
        if read != text:
            raise StorageError(f"{store.where(name)} was written, and cannot be read: the store loses objects")
        store.listed()
    finally:
        store.delete([name])
