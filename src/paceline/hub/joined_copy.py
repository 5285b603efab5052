"""One copy on each host of weights that transformers joins when it loads them: stacked experts, joined projections.

Bytes of several tensors cannot be mapped as one. So the first worker of a host lets transformers join them, each into a
file as soon as it is there, and writes a folder with the model's own tensors. All workers map that, as any other: each
reads its experts alone. The copy is named by the folder, its files' sizes and times, the class and its options, and the
version of transformers. What the files lack is not in it either: each model begins that anew.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from paceline.checkpoint.published_names import published_names
from paceline.checkpoint.safetensors_file import TensorInfo
from paceline.checkpoint.staging import bytes_of
from paceline.checkpoint.weight_files import MAX_SHARD_BYTES, write_shards
from paceline.errors import CheckpointError
from paceline.hub.host_lock import alone
from paceline.hub.stored_weights import INDEX, StoredWeights
from paceline.parallel.class_name import own_class
from paceline.parallel.file_weights import FileMappings, WeightFiles
from paceline.units import bytes_text

__all__ = ["JoinedModel", "are_joined", "joined_copy"]

PREFIX = "joined-"
LEAST_BYTES = 1 << 10  # of what is kept in a file of its own
SAME_WEIGHTS = ("attn_implementation",)  # options that change no tensor
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


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


class JoinedModel:
    """What a folder's tensors are joined for: a class, with options, and names that are left out."""

    def __init__(self, kind: type[Any], *, unused: Sequence[str], options: Mapping[str, Any]) -> None:
        others = [(name, _shown(one)) for name, one in options.items() if name not in SAME_WEIGHTS]
        #: Of other classes or options the tensors may be others. Weights that begin anew are in no copy.
        self.identity = [f"{kind.__module__}:{kind.__qualname__}", sorted(unused), sorted(others)]


def joined_copy(
    stored: StoredWeights, cache: Path, about: JoinedModel, load: Callable[[StoredWeights], _MadeOfFiles]
) -> Path:
    """Return this host's folder with the tensors of the model itself, after making it if it is not there. `load` has
    transformers make the model. Raises CheckpointError where the disk has no room."""
    folder = cache / f"{PREFIX}{_identity(stored, about)}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with alone(folder):
            if not folder.is_dir():
                _make(stored, folder, load)
    return folder


class _MadeOfFiles(Protocol):
    """A model, and the names of its weights that the files lack."""

    @property
    def model(self) -> Any: ...

    @property
    def begun(self) -> set[str]: ...


def _identity(stored: StoredWeights, about: JoinedModel) -> str:
    version = importlib.import_module("transformers").__version__
    rows: list[Any] = [str(stored.folder.resolve()), version, about.identity]
    for name in (*stored.files, "config.json"):
        file = (stored.folder / name).stat()
        rows.append([name, file.st_size, file.st_mtime_ns])
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:24]


def _shown(option: Any) -> str:
    """An option as text, the same in all processes."""
    to_text: Any = getattr(option, "to_json_string", None)  # of configurations
    return str(to_text()) if callable(to_text) else ADDRESS.sub("", repr(option))


def _make(stored: StoredWeights, folder: Path, load: Callable[[StoredWeights], _MadeOfFiles]) -> None:
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    needed, free = 2 * stored.num_bytes, shutil.disk_usage(partial).free
    if needed > free:
        raise CheckpointError(
            f"the weights of {stored.folder} are joined for this model, which takes {bytes_text(needed)} in "
            f"{folder.parent} meanwhile, and {bytes_text(free)} are free: free space there, or name another place, "
            "from_pretrained(..., cache_dir=...)"
        )
    try:
        _fill(stored, partial, load)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # as large as the weights, and of no use
        raise
    partial.rename(folder)


def _fill(stored: StoredWeights, partial: Path, load: Callable[[StoredWeights], _MadeOfFiles]) -> None:
    pieces = _ParameterFiles(partial / "pieces")
    keep: Any = pieces.keep  # torch's annotation of such hooks has no result
    handle = register_module_parameter_registration_hook(keep)
    try:
        made = load(stored)
    finally:
        handle.remove()
    _write(made.model, partial, made.begun)
    del made
    pieces.remove()
    for path in stored.folder.iterdir():
        if path.is_file() and path.suffix in (".json", ".model", ".txt", ".jinja") and path.name != INDEX:
            shutil.copyfile(path, partial / path.name)


class _ParameterFiles:
    """Puts parameters that are in memory into files, as soon as a module gets them."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0
        folder.mkdir()

    def keep(self, module: nn.Module, name: str, parameter: Any) -> nn.Parameter | None:
        """Called with each parameter that a module gets; returns the one that it shall get."""
        if not isinstance(parameter, nn.Parameter) or parameter.is_meta or parameter.nbytes < LEAST_BYTES:
            return None
        if FileMappings().mapping_of(parameter) is not None:
            return None
        self._number += 1
        path = self._folder / str(self._number)
        with open(path, "wb") as file:
            file.write(bytes_of(parameter.detach().contiguous()))
        raw = torch.from_file(str(path), shared=False, size=parameter.nbytes, dtype=torch.uint8)
        mapped = nn.Parameter(raw.view(parameter.dtype).view(parameter.shape), parameter.requires_grad)
        vars(mapped).update(vars(parameter))  # what transformers notes there
        return mapped

    def remove(self) -> None:
        shutil.rmtree(self._folder)


def _write(model: nn.Module, folder: Path, begun: set[str]) -> None:
    held: Mapping[str, Tensor] = {name: one for name, one in model.state_dict().items() if name not in begun}
    first: dict[tuple[int, torch.Size], str] = {}  # tied ones are written once
    for name, one in held.items():
        first.setdefault((one.data_ptr(), one.shape), name)
    files, written = WeightFiles(held.values()), list[Tensor]()
    files.coming(held[name] for name in first.values())

    def read(name: str) -> Tensor:
        if written:
            files.was_read(written.pop())
        written.append(held[name])
        return held[name]

    tensors: dict[str, TensorInfo] = {name: (held[name].dtype, tuple(held[name].shape)) for name in first.values()}
    write_shards(folder, tensors, read, MAX_SHARD_BYTES, lambda _: {"format": "pt"})
