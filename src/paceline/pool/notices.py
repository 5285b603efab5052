"""Says a fault once while it lasts, and again where it comes back."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Notices"]

QUIET_S = 60.0  # without a fault: then it is over


class Notices:
    """Give it the text of a fault each time that it is met; `say` gets it when it begins."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._met_at: dict[str, float] = {}

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        self._met_at = {text: at for text, at in self._met_at.items() if now - at <= QUIET_S}
        if text not in self._met_at:
            self._say(text)
        self._met_at[text] = now
