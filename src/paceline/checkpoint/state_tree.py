"""Everything of a checkpoint that is not a named tensor: a tree of plain values; reading it runs no code.

A tree is made of dict, list, tuple, str, int, float, bool, bytes, None and tensors. `torch.load(weights_only=True)`
builds exactly these and refuses everything else. So a value that could not be read back is refused when it is saved,
with its path in the tree.
"""

from __future__ import annotations

import collections
import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import CheckpointError

__all__ = ["decode_state", "encode_state", "freeze"]

_LEAVES = (str, bool, int, float, bytes, type(None), torch.dtype, torch.device)
_MAPPINGS = (dict, collections.OrderedDict, collections.Counter)  # Counter: the milestones of MultiStepLR


def freeze(tree: Any) -> Any:
    """Return a copy of a tree that later changes to the original do not reach; tensors are copied to the CPU.

    Subclasses of str, int and float (numpy.float64, an IntEnum) are stored as the plain value that they equal. Raises
    CheckpointError with every value that cannot be stored.
    """
    refused: list[str] = []
    copy = _copied(tree, "", (), refused)
    if refused:
        listed = "; ".join(refused[:10]) + (f"; and {len(refused) - 10} more" if len(refused) > 10 else "")
        raise CheckpointError(
            f"cannot store {listed}. A checkpoint holds dict, list, tuple, str, int, float, bool, bytes, None and "
            "tensors: let state_dict() return these only."
        )
    return copy


def encode_state(tree: Any) -> bytes:
    """Return a frozen tree as bytes."""
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    return buffer.getvalue()


def decode_state(data: bytes) -> Any:
    """Read a tree back, tensors on the CPU; raises CheckpointError for bytes that hold anything but plain values."""
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        first = str(error).partition("\n")[0]
        raise CheckpointError(f"it holds more than plain values, or is damaged: {first}") from error


def _copied(value: Any, path: str, above: tuple[int, ...], refused: list[str]) -> Any:
    kind = type(value)
    if kind in _LEAVES:
        return value
    if kind in (Tensor, nn.Parameter) and value.layout == torch.strided and not value.is_meta:
        return value.detach().to("cpu", copy=True)
    if id(value) in above:
        refused.append(f"{path or 'the state'}: it contains itself")
        return None
    above = (*above, id(value))
    if isinstance(value, dict) and kind in _MAPPINGS:
        return _copied_mapping(value, path, above, refused)
    if kind is list or kind is tuple or kind is torch.Size:
        items = [_copied(item, f"{path}[{index}]", above, refused) for index, item in enumerate(value)]
        return items if kind is list else tuple(items)
    for plain in (str, int, float):
        if isinstance(value, plain):
            return plain(value)
    refused.append(f"{path or 'the state'}: {_named(value)}")
    return None


def _copied_mapping(tree: dict[Any, Any], path: str, above: tuple[int, ...], refused: list[str]) -> dict[Any, Any]:
    items: dict[Any, Any] = {}
    for key, item in tree.items():
        below = _below(path, key)
        plain = _copied(key, f"the key {below}", above, refused)
        if isinstance(plain, Tensor | list | dict):  # hashed by identity, or not at all
            refused.append(f"the key {below}: {_named(key)}")
        else:
            items[plain] = _copied(item, below, above, refused)
    if isinstance(tree, collections.Counter):
        return collections.Counter(items)
    return collections.OrderedDict(items) if isinstance(tree, collections.OrderedDict) else items


def _below(path: str, key: Any) -> str:
    if isinstance(key, str) and key.replace(".", "_").isidentifier():
        return f"{path}.{key}" if path else key
    return f"{path}[{key!r}]"


def _named(value: Any) -> str:
    """Return a value as an error names it: "<function>", "<numpy.ndarray>"."""
    kind = type(value)
    return f"<{kind.__name__ if kind.__module__ == 'builtins' else f'{kind.__module__}.{kind.__qualname__}'}>"
