"""Reads files of `torch.save` that may come from strangers: no code of theirs runs.

DeepSpeed's files are pickles that name its own classes. Nothing that a file names is imported but a fixed list of
containers and torch's own parts. Every other name stands for an inert object, which keeps what it is given and runs no
code.
"""

from __future__ import annotations

import pickle
import types
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import _utils as torch_parts

from paceline.errors import CheckpointError

__all__ = ["Inert", "load_safely"]


class Inert:
    """Stands for an object of a class that is not loaded: it keeps what it is given, and does nothing."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        made = super().__new__(cls)
        made.args = args
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """`__new__` has kept the arguments: pickle may leave this call out."""

    def __call__(self, *args: Any, **kwargs: Any) -> Inert:
        return Inert(*args)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __hash__(self) -> int:
        return id(self)

    def append(self, _: Any) -> None:
        """Pickle appends to lists of other classes."""

    def extend(self, _: Any) -> None:
        """The same."""

    def __setitem__(self, _: Any, __: Any) -> None:
        """Pickle sets items of dicts of other classes."""


def _of_type(build: Any, kind: Any, args: Any, state: Any) -> Any:
    """A tensor that was pickled with a type and attributes of its own: the tensor alone."""
    return build(*args)


_STORAGES = (
    "BFloat16Storage",
    "BoolStorage",
    "ByteStorage",
    "CharStorage",
    "DoubleStorage",
    "FloatStorage",
    "HalfStorage",
    "IntStorage",
    "LongStorage",
    "ShortStorage",
)
_ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): defaultdict,
    ("builtins", "dict"): dict,
    ("builtins", "list"): list,
    ("builtins", "set"): set,
    ("builtins", "int"): int,
    ("builtins", "float"): float,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch._utils", "_rebuild_tensor_v2"): torch_parts._rebuild_tensor_v2,  # pyright: ignore[reportPrivateUsage]  # what torch.save names
    ("torch._utils", "_rebuild_parameter"): torch_parts._rebuild_parameter,  # pyright: ignore[reportPrivateUsage]  # what torch.save names
    ("torch._tensor", "_rebuild_from_type_v2"): _of_type,
    **{("torch", name): getattr(torch, name) for name in _STORAGES},
    **{
        ("torch", str(one).removeprefix("torch.")): one
        for one in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.bool)
    },
}


class _Unpickler(pickle.Unpickler):
    """Finds what is on the list, and an inert class for all else."""

    def find_class(self, module: str, name: str) -> Any:
        return _ALLOWED.get((module, name), Inert)


def load_safely(path: Path) -> Any:
    """Return what `torch.save` wrote into a file, without running code of the file; tensors on the CPU.

    Raises CheckpointError for files of another kind, and for damaged ones.
    """
    try:
        if not zipfile.is_zipfile(path):
            raise CheckpointError(f"{path} is no file of torch.save (of torch 1.6 or later)")
        with zipfile.ZipFile(path) as archive:
            if any(name.endswith("/constants.pkl") for name in archive.namelist()):
                raise CheckpointError(f"{path} is a TorchScript archive, which holds code")
        module = types.SimpleNamespace(
            Unpickler=_Unpickler, load=_refuse_old, loads=_refuse_old, PROTO=pickle.PROTO, __name__="inert"
        )
        return torch.load(path, map_location="cpu", weights_only=False, pickle_module=module, mmap=True)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _refuse_old(*_: Any, **__: Any) -> Any:
    raise CheckpointError("it is of a format before torch 1.6")
