"""Has transformers read tensors that are mapped already, in the place of files that it would open itself."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.hub.stored_weights import StoredWeights

__all__ = ["can_read_opened", "reading_opened"]

READERS = ("transformers.modeling_utils", "transformers.modeling_layers")  # that call safetensors' safe_open
NAME = "safe_open"
_patching = threading.RLock()


def can_read_opened() -> bool:
    """Whether this version of transformers opens files as it is known to."""
    return hasattr(importlib.import_module(READERS[0]), NAME)


@contextlib.contextmanager
def reading_opened(stored: StoredWeights) -> Iterator[None]:
    """Within it, transformers finds the tensors of `stored.opened` in that folder's files, and other files as ever.

    A version that opened them in another way would find nothing wrong: they end behind their headers, and are refused.
    """
    opened = stored.opened
    if opened is None:
        yield
        return
    with _patching:
        modules = [module for module in map(importlib.import_module, READERS) if hasattr(module, NAME)]
        former = [getattr(module, NAME) for module in modules]

        def open_file(path: Any, *args: Any, **kwargs: Any) -> Any:
            if Path(path).parent == stored.folder and Path(path).name in opened:
                return _OpenedFile(opened[Path(path).name])
            return former[0](path, *args, **kwargs)

        for module in modules:
            setattr(module, NAME, open_file)
        try:
            yield
        finally:
            for module, one in zip(modules, former, strict=True):
                setattr(module, NAME, one)


class _OpenedFile:
    """What safetensors' open files do."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def keys(self) -> Iterable[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name].detach()

    get_slice = get_tensor  # a tensor is cut as a slice is

    def metadata(self) -> dict[str, str]:
        return {"format": "pt"}

    def __enter__(self) -> _OpenedFile:
        return self

    def __exit__(self, *_: object) -> None:
        return None
