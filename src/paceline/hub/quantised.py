"""Folders whose weights are quantised: several stored tensors, such as codes and scales, make one weight.

No range of a file is a worker's part of such a weight. So the first worker of a host has transformers dequantise the
weights, one tensor after the other, into a folder of ordinary ones (`dequantised_copy`), which all workers map. Codes
of bitsandbytes can also be kept as they are, as the frozen base of adapters (`kept_quantised`).
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.errors import PlanError
from paceline.hub.dequantise import CPU, has_own_way, load_dequantised
from paceline.hub.model_copy import CopyKind, MadeOfFiles, copy_identity, model_copy
from paceline.hub.stored_weights import FLOATS, StoredWeights, read_config
from paceline.parallel.file_weights import is_code
from paceline.parallel.part_dtype import mark

__all__ = ["ACTIVATIONS", "Quantisation", "dequantised_copy", "find_quantisation", "kept_quantised"]

PREFIX = "dequantised-"
KEY, FORMER_KEY = "quantization_config", "compression_config"
KEPT = "bitsandbytes"
PACKAGES = {  # whose versions may change the numbers
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "torchao": "torchao",
}
#: Names in the files of what quantised activations are scaled by: ordinary weights have no use for them.
ACTIVATIONS = tuple(
    f"*.{of}_{what}" for of in ("input", "output", "q", "k", "v") for what in ("scale", "zero_point", "global_scale")
)
Load = Callable[[StoredWeights, torch.dtype, Mapping[str, Any]], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Quantisation:
    """How a folder's weights are quantised, as its configuration says it."""

    method: str
    about: Mapping[str, Any]
    config: Mapping[str, Any]  # config.json

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """A user's options for transformers, of which a `config` says that the weights are quantised."""
        config = copy.deepcopy(given.get("config"))
        if config is not None and _said(config.to_dict()) is None:
            setattr(config, KEY, dict(self.about))
        return dict(given) if config is None else {**given, "config": config}

    def plain_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """A user's options, of which a `config` does not say it: for weights that are dequantised."""
        config = copy.deepcopy(given.get("config"))
        for one in () if config is None else (config, config.get_text_config(decoder=True)):
            if hasattr(one, KEY):
                delattr(one, KEY)
        return dict(given) if config is None else {**given, "config": config}

    @property
    def plain_config(self) -> dict[str, Any]:
        """config.json of the dequantised weights."""
        return {
            name: _without(one) if isinstance(one, dict) else one
            for name, one in self.config.items()
            if name not in (KEY, FORMER_KEY)
        }

    def dtype(self, stored: StoredWeights) -> torch.dtype:
        """The type of what is not quantised: the configuration's, or that of most of the bytes."""
        for config in (self.config, *(one for one in self.config.values() if isinstance(one, dict))):
            named = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
            if getattr(torch, named, None) in FLOATS.values():
                return getattr(torch, named)
        return stored.dtype


def find_quantisation(folder: Path) -> Quantisation | None:
    """Return how a folder's weights are quantised; None where they are not."""
    config = read_config(folder)
    about = _said(config)
    if about is None:
        return None
    method = about.get("quant_method") or (
        KEPT if about.get("load_in_4bit") or about.get("load_in_8bit") else "unknown"
    )
    return Quantisation(str(method), about, config)


def dequantised_copy(
    stored: StoredWeights,
    cache: Path,
    kind: CopyKind,
    found: Quantisation,
    dtype: torch.dtype,
    *,
    num_elements: int,
    load: Load,
    types_of: Callable[[Any], Mapping[str, torch.dtype]],
) -> Path:
    """Return this host's folder with a model's weights in a type of 16 or 32 bits, after making it if it is not there.

    kind, num_elements: the class, and of how many numbers its weights are. load: has transformers make the model from
    files, in a type, with more options. types_of: gives the types of a model's weights, by names.

    Raises PlanError where transformers cannot dequantise them here, and CheckpointError where the disk has no room.
    """
    how = [found.method, dict(found.about), str(dtype), _version(found.method)]
    folder = cache / f"{PREFIX}{copy_identity(stored, kind, how)}"

    def made() -> MadeOfFiles:
        return load_dequantised(
            lambda more: load(stored, dtype, more), found.method, found.about, types_of, stored.folder
        )

    return model_copy(
        stored,
        folder,
        made,
        num_bytes=num_elements * dtype.itemsize,
        why=f"dequantised to {str(dtype).removeprefix('torch.')}",
        config=found.plain_config,
    )


def kept_quantised(
    stored: StoredWeights, found: Quantisation, load: Load, types_of: Callable[[Any], Mapping[str, torch.dtype]] | None
) -> Any:
    """Return a model whose quantised weights are the files' codes. `types_of`: gives the types of the other weights, by
    names; None: as the files have them.

    Raises PlanError for other methods than bitsandbytes.
    """
    where = stored.folder
    if found.method != KEPT:
        remedy = (
            "paceline.from_pretrained(..., dequantize=True) writes one dequantised copy on each host, and reads that"
            if has_own_way(found.method, found.about)
            else "Take the folder with weights of 16 bits; transformers cannot dequantise these"
        )
        raise PlanError(
            f"the weights of {where} are quantised ({found.method}): several stored tensors make one weight, so no "
            f"worker can read its part of it. {remedy}. Only bitsandbytes is kept quantised, for adapters."
        )
    if importlib.util.find_spec(KEPT) is None:
        raise PlanError(
            f"the weights of {where} are quantised (bitsandbytes), and this Python does not have the package: pip "
            "install bitsandbytes, or take the folder with weights of 16 bits"
        )
    model = load(stored, found.dtype(stored), {"device_map": CPU}).model
    if hasattr(model, "hf_device_map"):
        del model.hf_device_map  # worker.prepare moves the model
    if types_of is not None:
        codes = {name for name, one in model.named_parameters() if is_code(one)}
        mark(model, {name: dtype for name, dtype in types_of(model).items() if name not in codes})
    return model


def _said(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a configuration says of the method; the part of a text model may say it, too."""
    for one in (config, *(part for part in config.values() if isinstance(part, dict))):
        about = one.get(KEY) or one.get(FORMER_KEY)
        if about is not None:
            return about if isinstance(about, dict) else about.to_dict() if hasattr(about, "to_dict") else {}
    return None


def _without(part: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in part.items() if name not in (KEY, FORMER_KEY)}


def _version(method: str) -> str:
    try:
        return importlib.metadata.version(PACKAGES[method])
    except (KeyError, importlib.metadata.PackageNotFoundError):
        return ""
