"""What may look on while the forwards of micro-batches run; only a comparison module by module does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

__all__ = ["MicroBatchObserver", "observed"]


class MicroBatchObserver(Protocol):
    """Told of each forward."""

    def open(self, micro: tuple[int, int], *, is_void: bool) -> None:
        """The forward of a micro-batch (pass, number in the step) begins."""
        ...

    def close(self) -> None:
        """It has ended."""
        ...


@contextlib.contextmanager
def observed(observer: MicroBatchObserver | None, micro: tuple[int, int], *, is_void: bool) -> Iterator[None]:
    """Surround a forward."""
    if observer is not None:
        observer.open(micro, is_void=is_void)
    try:
        yield
    finally:
        if observer is not None:
            observer.close()
