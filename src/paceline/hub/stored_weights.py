"""What safetensors files of a folder hold, by their headers alone: no byte of a tensor is read."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import CheckpointError

__all__ = [
    "CONFIG",
    "FLOATS",
    "INDEX",
    "MOST_HEADER_BYTES",
    "WHOLE",
    "FileTensor",
    "StoredWeights",
    "read_config",
    "stored_weights",
]

WHOLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
MOST_HEADER_BYTES = 100_000_000  # as safetensors itself limits it
FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclasses.dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of a file."""

    file: str
    type: str  # as safetensors names it: "BF16"
    shape: tuple[int, ...]
    num_bytes: int
    offset: int  # of its first byte, in the file


@dataclasses.dataclass(frozen=True, slots=True)
class StoredWeights:
    """The tensors of a folder's files, by name."""

    folder: Path
    files: tuple[str, ...]
    tensors: Mapping[str, FileTensor]
    opened: Mapping[str, Mapping[str, Tensor]] | None = None  # by file: tensors of files that have not come as a whole

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(one.num_bytes for one in self.tensors.values())

    @property
    def dtype(self) -> torch.dtype:
        """The floating type that most of the bytes have; float32 where none has one."""
        by_type: dict[str, int] = {}
        for one in self.tensors.values():
            by_type[one.type] = by_type.get(one.type, 0) + one.num_bytes
        known = [name for name in sorted(by_type, key=lambda name: -by_type[name]) if name in FLOATS]
        return FLOATS[known[0]] if known else torch.float32


def stored_weights(folder: Path, sizes: Mapping[str, int] | None = None) -> StoredWeights:
    """Look at a folder's safetensors files, one or several with an index. `sizes`: what the files would have in bytes,
    where this folder has their headers alone.

    Raises CheckpointError that names the file where one is absent, cut short or no safetensors file, and where the
    index and the files do not have the same tensors.
    """
    index = folder / INDEX
    if index.exists():
        places = _read_json(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise CheckpointError(
                f"{index} has no weight_map, so nothing says which file has which tensor: copy it again"
            )
        files = tuple(sorted(set(places.values())))
        if absent := [name for name in files if not (folder / name).is_file()]:
            raise CheckpointError(
                f"{folder} lacks {len(absent)} of the {len(files)} files that {INDEX} names ({', '.join(absent[:3])}"
                f"{', ...' if len(absent) > 3 else ''}): copy or download the folder again, whole"
            )
    elif (folder / WHOLE).is_file():
        places, files = None, (WHOLE,)
    else:
        raise CheckpointError(_without_weights(folder))
    tensors: dict[str, FileTensor] = {}
    for name in files:
        tensors.update(_header(folder / name, None if sizes is None else sizes[name]))
    if places is not None:
        _compare(index, places, tensors)
        tensors = {name: one for name, one in tensors.items() if name in places}
    return StoredWeights(folder, files, tensors)


def read_config(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json. Raises CheckpointError where it has none that can be read."""
    if not (folder / CONFIG).is_file():
        raise CheckpointError(
            f"{folder} has no {CONFIG}, which says what model the weights are of: copy it from where the weights came "
            "from, or write it by model.config.save_pretrained(folder)"
        )
    return _read_json(folder / CONFIG)


def _without_weights(folder: Path) -> str:
    others = sorted(one.name for one in folder.glob("*") if one.suffix in (".bin", ".pt", ".pth", ".gguf", ".h5"))
    shards = sorted(one.name for one in folder.glob("model-*-of-*.safetensors"))
    if shards:
        return f"{folder} has {len(shards)} parts ({shards[0]}, ...) and no {INDEX}, which says what is where: copy it"
    if others:
        return (
            f"{folder} has no {WHOLE} and no {INDEX}, but {', '.join(others[:3])}, which no worker can read in parts: "
            "convert it once, AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other_folder)"
        )
    return f"{folder} has no {WHOLE} and no {INDEX}: name a folder as save_pretrained or a hub's client writes it"


def _header(path: Path, size: int | None) -> dict[str, FileTensor]:
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = os.fstat(file.fileno()).st_size if size is None else size
            if size < 8 or length > min(MOST_HEADER_BYTES, size - 8):
                raise CheckpointError(f"{path} is no safetensors file, or was cut short: copy it again")
            found = json.loads(file.read(length))
        end, tensors = 8 + length, dict[str, FileTensor]()
        for name, about in found.items():
            if name != "__metadata__":
                start, stop = about["data_offsets"]
                place = 8 + length + start
                tensors[name] = FileTensor(path.name, about["dtype"], tuple(about["shape"]), stop - start, place)
                end = max(end, 8 + length + stop)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is no safetensors file: its header cannot be read ({error}): copy it again"
        ) from error
    if end > size:
        raise CheckpointError(
            f"{path} was cut short: it has {size} bytes, and its header tells of {end}: copy it again"
        )
    return tensors


def _compare(index: Path, places: Mapping[str, Any], tensors: Mapping[str, FileTensor]) -> None:
    wrong = [name for name, file in places.items() if name not in tensors or tensors[name].file != file]
    if wrong:
        raise CheckpointError(
            f"{index} names {len(wrong)} tensors that are not in the files it gives for them ({', '.join(wrong[:3])}"
            f"{', ...' if len(wrong) > 3 else ''}): the index and the files are of two models; copy the folder again"
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return found
