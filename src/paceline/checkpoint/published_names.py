"""The names and shapes under which a model's makers publish its weights, where transformers computes with others.

transformers stacks experts and joins projections when it loads files, and takes them apart again when it saves them.
So do exports, or other readers (vLLM) would not know the names. The model is made without numbers, and tensors without
numbers show which of its tensors become which: each such group is then converted by itself.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.safetensors_file import TensorInfo
from paceline.errors import CheckpointError

__all__ = ["PublishedNames", "published_names"]

OWN = "transformers.models."  # classes of other modules are not imported: a checkpoint runs no code
Convert = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedNames:
    """How a model's tensors become those of files."""

    groups: Sequence[tuple[tuple[str, ...], Mapping[str, TensorInfo]]]  # names in the model, tensors in the files
    convert: Convert | None  # None: they have the same names
    own: Mapping[str, str]  # under which other name the model's tensors have one of these

    def tensors(self) -> dict[str, TensorInfo]:
        """All tensors of the files."""
        return {name: about for _, made in self.groups for name, about in made.items()}

    def reader(self, read: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
        """Return what reads a tensor of the files, given what reads one of the model. One group is in memory."""
        group_of = {name: number for number, (_, made) in enumerate(self.groups) for name in made}
        held: dict[str, Tensor] = {}

        def read_published(name: str) -> Tensor:
            if name not in held:
                held.clear()
                names, _ = self.groups[group_of[name]]
                found = {one: read(self.own.get(one, one)) for one in names}
                held.update(found if self.convert is None else self.convert(found))
            return held.pop(name)

        return read_published


def published_names(
    class_name: str | None, config: str, tensors: Mapping[str, TensorInfo], ties: Mapping[str, str]
) -> PublishedNames:
    """Find out what a model's tensors are in files. Without transformers, and for classes that are not its own, names
    stay as they are.

    class_name: "module:Class"; None: by the configuration. ties: further names of tensors, each with the one in
    `tensors`. Of these transformers leaves out the same as when it saves. Raises CheckpointError where it cannot make
    the model.
    """
    model = _on_meta(class_name, json.loads(config))
    never: set[str] = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    replaced: set[str] = set(getattr(model, "all_tied_weights_keys", None) or ())
    sources = {first: name for name, first in ties.items() if first in replaced and name not in replaced}
    kept = {sources.get(name, name): about for name, about in tensors.items() if name not in never}
    own = {new: name for name, new in sources.items()}
    convert = None if model is None else _conversion(model)
    groups: list[tuple[tuple[str, ...], Mapping[str, TensorInfo]]] = []
    if convert is not None and _is_same(kept, convert):
        convert = None
    if convert is not None:
        groups = list(_groups(kept, convert))
        if [tuple(made) for _, made in groups] == [(name,) for name in kept]:
            convert = None
    if convert is None:
        groups = [((name,), {name: about}) for name, about in kept.items()]
    return PublishedNames(groups=groups, convert=convert, own=own)


def _on_meta(class_name: str | None, config: dict[str, Any]) -> Any:
    """The model without numbers; None where it is not one of transformers' own, or transformers is not there."""
    if importlib.util.find_spec("transformers") is None:
        return None
    transformers: Any = importlib.import_module("transformers")
    found: Any = None
    if class_name is None:
        names = config.get("architectures") or [""]
        found = getattr(transformers, names[0], None)
    else:
        module, _, name = class_name.partition(":")
        if module.startswith(OWN):
            found = getattr(importlib.import_module(module), name, None)
    if found is None or not hasattr(found, "config_class"):
        return None
    try:
        settings = found.config_class.from_dict(config)
        with torch.device("meta"):
            return found(settings)
    except Exception as error:  # whatever a model does with a configuration of another version
        version = getattr(transformers, "__version__", "?")
        raise CheckpointError(
            f"transformers {version} cannot make {found.__name__} from the checkpoint's configuration "
            f"({type(error).__name__}: {error}): use the version that the run was trained with, or export a plain "
            "folder (without --format huggingface), which keeps the names that the model has"
        ) from error


def _conversion(model: Any) -> Convert | None:
    """What takes weights apart as transformers does; None in versions that convert nothing."""
    try:
        revert: Any = importlib.import_module("transformers.core_model_loading").revert_weight_conversion
    except (ImportError, AttributeError):
        return None

    def convert(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return revert(model, weights)

    return convert


def _empty(tensors: Mapping[str, TensorInfo]) -> dict[str, Tensor]:
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in tensors.items()}


def _is_same(tensors: Mapping[str, TensorInfo], convert: Convert) -> bool:
    return _about(convert(_empty(tensors))) == dict(tensors)


def _groups(
    tensors: Mapping[str, TensorInfo], convert: Convert
) -> Iterator[tuple[tuple[str, ...], dict[str, TensorInfo]]]:
    """Group the names of tensors that are converted together: alone where that gives the same, or else with those of
    their module."""
    empty = _empty(tensors)
    whole = _about(convert(dict(empty)))
    together: dict[str, list[str]] = {}
    made: set[str] = set()
    for name, one in empty.items():
        try:
            alone = _about(convert({name: one}))
        except Exception:  # it needs others beside it
            alone = {}
        if alone and all(whole.get(key) == about for key, about in alone.items()) and not made & alone.keys():
            made |= alone.keys()
            yield (name,), alone
        else:
            together.setdefault(name.rpartition(".")[0].rpartition(".")[0], []).append(name)
    for names in together.values():
        found = _about(convert({name: empty[name] for name in names}))
        made |= found.keys()
        yield tuple(names), found
    if made != whole.keys():
        raise CheckpointError(
            f"{len(made ^ whole.keys())} tensors ({', '.join(sorted(made ^ whole.keys())[:3])}, ...) become others "
            "when they are converted in parts: export a plain folder (without --format huggingface)"
        )


def _about(tensors: Mapping[str, Tensor]) -> dict[str, TensorInfo]:
    return {name: (one.dtype, tuple(one.shape)) for name, one in tensors.items()}
