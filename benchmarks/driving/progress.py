"""What a benchmark is at, said on standard error, so that nobody waits without a word."""

from __future__ import annotations

import sys

__all__ = ["doing"]


def doing(text: str) -> None:
    """Say what is begun now."""
    print(f"  {text}", file=sys.stderr, flush=True)
