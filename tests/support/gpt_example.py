"""The demo, `examples/gpt.py`, as a module for tests."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

__all__ = ["demo"]


@functools.cache
def demo() -> Any:
    """The module `examples/gpt.py`, loaded once."""
    path = Path(__file__).parents[2] / "examples" / "gpt.py"
    spec = importlib.util.spec_from_file_location("demo_gpt", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
