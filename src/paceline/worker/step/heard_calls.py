"""The calls of modules in a pass, by which a trial of buffers can be made where no function runs a micro-batch.

In the script's own loop over a batch the models' calls are listened to, and those of the modules that have buffers, for
models whose own forward is not called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["HeardCall", "HeardCalls"]

HeardCall = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
EACH = 2  # calls of a module that has buffers: a trial needs no more


class HeardCalls:
    """What was called in the present pass."""

    def __init__(self) -> None:
        self.micros: list[list[HeardCall]] = []  # calls of models, by micro-batches
        self.owners: Mapping[nn.Module, list[HeardCall]] = {}  # of modules that have buffers
        self.is_open = True
        self._handles: list[RemovableHandle] = []

    def listen(self, models: Iterable[nn.Module], owners: Iterable[nn.Module]) -> None:
        """Listen to these modules until `end`."""
        self.micros, self.owners = [], {owner: [] for owner in owners}
        self._handles = [one.register_forward_pre_hook(self._of_model, with_kwargs=True) for one in models]
        self._handles += [one.register_forward_pre_hook(self._of_owner, with_kwargs=True) for one in self.owners]

    def open_micro(self) -> None:
        """The next micro-batch begins."""
        if self._handles:
            self.micros.append([])

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Meanwhile calls do not count: those of a trial."""
        self.is_open = False
        try:
            yield
        finally:
            self.is_open = True

    def end(self) -> None:
        """Forget what was heard."""
        for handle in self._handles:
            handle.remove()
        self._handles, self.micros, self.owners = [], [], {}

    def _of_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.is_open and 0 < len(self.micros) <= EACH:
            self.micros[-1].append((model, args, kwargs))

    def _of_owner(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls = self.owners.get(owner)
        if self.is_open and calls is not None and len(calls) < EACH:
            calls.append((owner, args, kwargs))
