"""One copy of a folder in object storage on each host: the first of its workers downloads, the others wait for it.

Weights are mapped into memory, so they have to be files. Pieces of all files come at once, and what came before a kill
is not asked for again. The copy gets its name when all of it is there. It is named by the address and by what the store
says of each object (size, tag, time): weights that were written anew are another copy.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError
from paceline.hub.host_lock import STILL_S, alone
from paceline.hub.stored_weights import CONFIG, INDEX, WHOLE
from paceline.storage.object_store import ObjectInfo, ObjectStore
from paceline.units import bytes_text

__all__ = ["host_copy"]

PIECE_BYTES, THREADS = 16 << 20, 8
PREFIX = "weights-"


def host_copy(address: str, cache: Path, *, still_s: float = STILL_S) -> Path:
    """Return this host's copy of a folder, after making it if it is not there.

    Raises CheckpointError where the folder has no weights or the disk no room, and StorageError.
    """
    store = ObjectStore(address)
    wanted = _wanted(store)
    identity = _identity(store, wanted)
    folder = cache / f"{PREFIX}{identity}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with alone(folder, still_s):
        if not folder.is_dir():
            partial = folder.with_suffix(".partial")
            partial.mkdir(exist_ok=True)
            done = _DoneParts(partial / ".pieces")
            try:
                _bring(store, wanted, partial, done)
                is_same = _identity_now(store) == identity
            except FileNotFoundError:
                is_same = False
            if not is_same:  # pieces may be of two models
                shutil.rmtree(partial)
                raise CheckpointError(
                    f"{store.address} was changed while it was read: start again when all of it is written"
                )
            done.remove()
            partial.rename(folder)
    return folder


def _wanted(store: ObjectStore) -> list[ObjectInfo]:
    """The objects of the folder itself that a model is made from: weights by the index, and small files."""
    here = {one.name: one for one in store.listed() if "/" not in one.name}
    if CONFIG not in here:
        raise CheckpointError(
            f"{store.address} has no {CONFIG}"
            + (f" (it has {', '.join(list(here)[:3])})" if here else ", and nothing else")
            + ": name the folder of a model, as save_pretrained or paceline export writes it"
        )
    places = json.loads(store.read(INDEX)).get("weight_map", {}) if INDEX in here else {"": WHOLE}
    weights = set(places.values())
    if absent := sorted(weights - here.keys()):
        raise CheckpointError(f"{store.address} lacks {', '.join(absent[:3])}: upload the folder again, whole")
    small = {name for name in here if not name.endswith((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5"))}
    return [here[name] for name in sorted(weights | small)]


def _identity(store: ObjectStore, wanted: Sequence[ObjectInfo]) -> str:
    rows: list[list[Any]] = [[store.address]]
    for one in wanted:
        told = store.request("look at", one.name, lambda name=one.name: dict(store.files.info(store.path(name))))
        tag = next(
            (told[key] for key in ("ETag", "etag", "md5Hash", "content_md5", "LastModified", "mtime") if told.get(key)),
            "",
        )
        rows.append([one.name, one.num_bytes, str(tag)])
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:24]


def _identity_now(store: ObjectStore) -> str | None:
    """What the folder is after the download; None where it is no whole one any more."""
    try:
        return _identity(store, _wanted(store))
    except (CheckpointError, FileNotFoundError, ValueError):  # the index is being written, say
        return None


def _bring(store: ObjectStore, wanted: Sequence[ObjectInfo], partial: Path, done: _DoneParts) -> None:
    """Fill a folder with the objects' bytes, from where an earlier call was broken off."""
    missing = [
        (one.name, start, min(start + PIECE_BYTES, one.num_bytes))
        for one in wanted
        for start in range(0, one.num_bytes, PIECE_BYTES)
        if (one.name, start) not in done
    ]
    needed, free = sum(end - start for _, start, end in missing), shutil.disk_usage(partial).free
    if needed > free:
        raise CheckpointError(
            f"{store.address} has {bytes_text(needed)} more to come, and {bytes_text(free)} are free in "
            f"{partial.parent}, where each host keeps one copy: free space there, or name another place, "
            "from_pretrained(..., cache_dir=...)"
        )
    with contextlib.ExitStack() as stack:
        opened: dict[str, int] = {}
        for one in wanted:
            opened[one.name] = file = os.open(partial / one.name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, file)
            os.truncate(file, one.num_bytes)
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix="weights"))

        def bring(name: str, start: int, end: int) -> tuple[str, int]:
            os.pwrite(opened[name], store.read(name, start, end), start)
            return name, start

        tasks = [pool.submit(bring, *piece) for piece in missing]
        try:
            for task in concurrent.futures.as_completed(tasks):
                done.add(*task.result())
        finally:
            pool.shutdown(cancel_futures=True)
        for file in opened.values():
            os.fsync(file)


class _DoneParts:
    """Which pieces of files have come, one line each: what a killed download goes on from."""

    def __init__(self, path: Path) -> None:
        self._path, self._known = path, set[tuple[str, int]]()
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError, TypeError):  # a line that a kill has cut
                    name, start = json.loads(line)
                    self._known.add((name, start))

    def __contains__(self, piece: tuple[str, int]) -> bool:
        return piece in self._known

    def add(self, name: str, start: int) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(f"\n{json.dumps([name, start])}")

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
