"""What a checkpoint keeps of models of transformers beside their weights: all that `paceline export --format
huggingface` writes around them.

That is the configuration, the settings of generation, the files of the tokenizer from the folder that the model came
from, and, for a model of peft, which tensors are its adapters' and what peft calls them. Nothing is imported here: only
models that these packages have made come to these functions.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.checkpoint.huggingface_folder import FOLDER, TOKENIZER_FILES
from paceline.parallel.class_name import own_class
from paceline.parallel.generation_caches import had_cache
from paceline.parallel.partial_state import reading_parts
from paceline.regular_files import read_regular
from paceline.worker.state.adapter_weights import has_adapters

__all__ = ["config_text", "described_models"]

MOST_FILE_BYTES = 64 << 20  # of one file: a tokenizer's largest has some 20 MB
_files: weakref.WeakKeyDictionary[nn.Module, tuple[str, dict[str, bytes]]] = weakref.WeakKeyDictionary()
_adapters: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()


def described_models(models: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return what is known of those models that have a configuration of transformers' kind, by their names."""
    return {name: found for name, model in models.items() if (found := _described(model)) is not None}


def config_text(model: nn.Module) -> str | None:
    """The text of a model's config.json, where it has a configuration of transformers' kind. It names the class that
    reads the weights, as `save_pretrained` does."""
    to_text: Callable[[], Any] | None = getattr(getattr(model, "config", None), "to_json_string", None)
    text = to_text() if callable(to_text) else None
    if not isinstance(text, str):
        return None
    fields = json.loads(text)
    given: Any = model
    base = given.get_base_model() if has_adapters(model) else model
    if had_cache(base):
        fields["use_cache"] = True
    return json.dumps({**fields, "architectures": [own_class(base).__name__]}, indent=2, sort_keys=True) + "\n"


def _described(model: nn.Module) -> dict[str, Any] | None:
    config = config_text(model)
    if config is None:
        return None
    given: Any = model
    base: Any = given.get_base_model() if has_adapters(model) else model
    settings: Any = getattr(base, "generation_config", None)
    kind = own_class(base)
    found = {
        "class": f"{kind.__module__}:{kind.__qualname__}",
        "config": config,
        "generation": settings.to_json_string() if hasattr(settings, "to_json_string") else None,
        "files": _tokenizer_files(base),
    }
    if has_adapters(model):
        found["adapters"] = _adapters_of(model)
    return found


def _tokenizer_files(model: Any) -> dict[str, bytes]:
    """The files beside the weights that the model came from, read once."""
    place = str(vars(model).get(FOLDER) or getattr(model.config, "name_or_path", "") or "")
    known = _files.get(model)
    if known is not None and known[0] == place:
        return known[1]
    found: dict[str, bytes] = {}
    if place and Path(place).is_dir():
        for name in TOKENIZER_FILES:
            path = Path(place) / name
            if path.is_file() and path.stat().st_size <= MOST_FILE_BYTES:
                found[name] = read_regular(path.resolve())  # a hub's cache consists of links
    _files[model] = place, found
    return found


def _adapters_of(model: Any) -> dict[str, Any]:
    """By the name of an adapter: its configuration, and the model's name for each tensor that peft stores."""
    known = _adapters.get(model)
    if known is not None and known.keys() == model.peft_config.keys():
        return known
    peft: Any = sys.modules["peft"]
    found: dict[str, Any] = {}
    with warnings.catch_warnings(), reading_parts():  # it asks modules for the names of their state
        warnings.simplefilter("ignore")
        names = list(model.state_dict())
        markers = {name: torch.empty(0) for name in names}
        own = {id(one): name for name, one in markers.items()}
        for adapter, config in model.peft_config.items():
            stored = peft.get_peft_model_state_dict(model, state_dict=dict(markers), adapter_name=adapter)
            found[adapter] = {
                "config": _adapter_config(config),
                "names": {name: own[id(one)] for name, one in stored.items() if id(one) in own},
            }
    _adapters[model] = found
    return found


def _adapter_config(config: Any) -> str:
    """The text of an adapter's configuration, as peft writes it for use."""
    trains, config.inference_mode = config.inference_mode, True
    try:
        with tempfile.TemporaryDirectory(prefix="paceline-adapter-") as place:
            config.save_pretrained(place)
            return (Path(place) / "adapter_config.json").read_text(encoding="utf-8")
    finally:
        config.inference_mode = trains
