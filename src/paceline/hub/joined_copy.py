"""One copy on each host of weights that transformers joins when it loads them: stacked experts, joined projections.

Bytes of several tensors cannot be mapped as one. So the first worker of a host lets transformers join them, and writes
a folder with the model's own tensors. All workers map that, as any other: each reads its experts alone. The copy is
named by the folder, its files' sizes and times, the class and its options, and the version of transformers. What the
files lack is not in it either: each model begins that anew.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.checkpoint.published_names import published_names
from paceline.checkpoint.safetensors_file import TensorInfo
from paceline.hub.model_copy import CopyKind, MadeOfFiles, copy_identity, model_copy
from paceline.hub.stored_weights import StoredWeights
from paceline.parallel.class_name import own_class

__all__ = ["are_joined", "joined_copy"]

PREFIX = "joined-"


def are_joined(empty: Any, stored: StoredWeights) -> bool:
    """Whether tensors of the files become others when transformers loads them. `empty`: the model without numbers."""
    tensors: dict[str, TensorInfo] = {name: (one.dtype, tuple(one.shape)) for name, one in empty.state_dict().items()}
    kind = own_class(empty)
    names = published_names(f"{kind.__module__}:{kind.__qualname__}", empty.config.to_json_string(), tensors, {})
    for own, made in names.groups if names.convert is not None else ():
        if dict(made) != {one: tensors.get(one) for one in own} and len(made) != len(own):
            first = next(iter(made))
            if any(f".{name}".endswith(f".{first}") for name in stored.tensors):  # with or without the model's prefix
                return True
    return False


def joined_copy(
    stored: StoredWeights, cache: Path, kind: CopyKind, load: Callable[[StoredWeights], MadeOfFiles]
) -> Path:
    """Return this host's folder with the tensors of the model itself, after making it if it is not there. `load` has
    transformers make the model. Raises CheckpointError where the disk has no room."""
    folder = cache / f"{PREFIX}{copy_identity(stored, kind)}"
    return model_copy(stored, folder, lambda: load(stored), num_bytes=stored.num_bytes, why="joined for this model")
