"""A model's folder in object storage: which of its objects a model is made from, and which version of them there is."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from paceline.errors import CheckpointError
from paceline.hub.stored_weights import CONFIG, INDEX, WHOLE
from paceline.storage.object_store import ObjectInfo, ObjectStore

__all__ = ["FolderChanged", "StoredFolder", "look_at", "tag_of"]

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5")
TAGS = ("ETag", "etag", "md5Hash", "content_md5", "LastModified", "mtime")  # as stores name what changes with contents


class FolderChanged(CheckpointError):
    """Another version came while one was read: pieces may be of two models."""

    @classmethod
    def at(cls, address: str) -> FolderChanged:
        return cls(f"{address} was changed while it was read: start again when all of it is written")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoredFolder:
    """The objects that are wanted, by name, with the tags of their versions."""

    address: str
    objects: Mapping[str, ObjectInfo]
    tags: Mapping[str, str]

    @property
    def identity(self) -> str:
        """Another one where the address, an object's size or its version is another one."""
        rows = [[self.address], *([name, one.num_bytes, self.tags[name]] for name, one in self.objects.items())]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:24]

    @property
    def weights(self) -> list[str]:
        """The names of the objects that are weights."""
        return [name for name in self.objects if name.endswith(WEIGHTS)]


def look_at(store: ObjectStore) -> StoredFolder:
    """Return what the folder has now: the weights that its index names, and its small files.

    Raises CheckpointError where it is no whole folder of a model, and StorageError.
    """
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
    small = {name for name in here if not name.endswith(WEIGHTS)}
    objects = {name: here[name] for name in sorted(weights | small)}
    return StoredFolder(address=store.address, objects=objects, tags={name: tag_of(store, name) for name in objects})


def tag_of(store: ObjectStore, name: str) -> str:
    """Return what tells an object's version; "" where the store tells nothing. FileNotFoundError: it is gone."""

    def ask() -> dict[str, Any]:
        return dict(store.files.info(store.path(name), refresh=True))

    told = store.request("look at", name, ask)
    return str(next((told[key] for key in TAGS if told.get(key)), ""))
