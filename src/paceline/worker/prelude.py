"""What all workers do together before the first step, kept for those who come later.

A newcomer runs the same program from its first line, but the others are far beyond. What their gathers, broadcasts,
averages and evaluations returned before their first loop over batches is on the board, and a newcomer's calls return
that.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import SyncError

__all__ = ["Prelude"]

KEY = "paceline/prelude"
LARGEST = 4 << 20  # bytes, of all values together: they travel in one message


class Prelude:
    """The results of one worker's calls, in their order; `store` is None where nobody can come later."""

    def __init__(self, store: dist.Store | None) -> None:
        self.is_over = False
        self._store = store
        self._values: list[Any] = []
        self._num_taken = 0
        self._is_read = False

    def note(self, value: Any) -> None:
        """Keep a result, until the first loop begins."""
        if self._store is not None and not self.is_over:
            self._values.append(value)

    def next(self) -> Any:
        """For a newcomer: what this call returned to the others."""
        if self._store is None:
            raise SyncError("there is no board to learn from what was done before this worker came")
        if not self._is_read:
            self._store.wait([KEY])
            self._values = torch.load(io.BytesIO(base64.b64decode(self._store.get(KEY))), weights_only=False)
            self._is_read = True
        self._num_taken += 1
        if self._num_taken > len(self._values):
            raise SyncError(
                "this worker joins a run whose members exchanged more than "
                f"{LARGEST >> 20} MiB by worker.gather(), worker.broadcast() and the like before their first step, or "
                "fewer values than it asks for: compute large values on each worker instead of sending them"
            )
        return self._values[self._num_taken - 1]

    def end(self, is_first: bool) -> None:
        """The first loop begins (or another worker has become the first): the first worker leaves the results."""
        self.is_over = True
        if is_first and self._store is not None:
            stream = io.BytesIO()
            torch.save(self._values, stream)
            if stream.tell() > LARGEST:
                stream = io.BytesIO()
                torch.save([], stream)
            self._store.set(KEY, base64.b64encode(stream.getvalue()).decode())
