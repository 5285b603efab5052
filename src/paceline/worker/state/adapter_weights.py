"""The weights of adapters (LoRA and the other kinds of the peft package), apart from the model that they adapt.

peft itself says which tensors belong to an adapter, and writes the folder that its `from_pretrained` reads. It is not
imported here: only models that it has made come to these functions.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import CheckpointError
from paceline.parallel.partial_state import reading_parts

__all__ = ["adapter_names", "has_adapters", "write_adapters"]


def has_adapters(model: nn.Module) -> bool:
    """Whether a model is one of peft's, with adapters beside the weights that they adapt."""
    return "peft" in sys.modules and isinstance(model, sys.modules["peft"].PeftModel)


def adapter_names(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return which of a model's tensors its adapters consist of, trained biases and modules included."""
    peft: Any = sys.modules["peft"]
    given: Any = model
    markers = {name: torch.empty(0) for name in names}
    asked: set[int] = set()
    with warnings.catch_warnings(), reading_parts():  # it asks modules for the names of their state
        warnings.simplefilter("ignore")  # they are given when the folder is written
        for adapter in given.peft_config:
            found = peft.get_peft_model_state_dict(model, state_dict=dict(markers), adapter_name=adapter)
            asked |= {id(one) for one in found.values()}
    return [name for name, one in markers.items() if id(one) in asked]


def write_adapters(model: nn.Module, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write a folder for peft's `from_pretrained`: adapter_config.json and adapter_model.safetensors, and one folder
    inside for each further adapter.

    weights: the whole tensors of `adapter_names`. Each file appears whole or not at all, and the weights come before
    what describes them. Raises CheckpointError if peft cannot write them, OSError if the disk cannot.
    """
    given: Any = model
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as place:
        try:
            with reading_parts():
                given.save_pretrained(place, state_dict=dict(weights))
        except OSError:
            raise
        except Exception as error:  # peft's own, and those of the packages that it writes with
            raise CheckpointError(f"peft cannot write the adapters: {type(error).__name__}: {error}") from error
        files = [path.relative_to(place) for path in Path(place).rglob("*") if path.is_file()]
        for name in sorted(files, key=lambda path: (path.suffix == ".json", path)):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(place) / name).replace(folder / name)
