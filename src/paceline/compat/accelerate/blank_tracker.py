"""A tracker of Accelerate that keeps nothing: a run's loggers live beside its workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["BlankTracker"]


class BlankTracker:
    """Takes every call and returns nothing, as Accelerate's does where a process has no tracker.

    `tell` notes, for each method, that what the program gives to it is left out.
    """

    def __init__(self, name: str, tell: Callable[[str], None]) -> None:
        self.name, self._tell = name, tell

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)

        def leave_out(*args: Any, **kwargs: Any) -> None:
            self._tell(
                f"get_tracker({self.name!r}).{name}(...) keeps nothing: a run's loggers take numbers, by "
                "accelerator.log(values). Write others beside them, with the logger's own package"
            )

        return leave_out
