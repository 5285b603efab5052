"""What tests of the commands share: an empty script, and a recorder in the place of the function that does the work."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commands import Record


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text("")
    return "train.py"  # tests run in tmp_path


@pytest.fixture
def takes_the_place_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Record]:
    """Put a recorder where a sub-command finds the function that does its work."""

    def put(module: str, function: str, *, returns: int = 0, raises: BaseException | None = None) -> Record:
        calls: Record = []

        def recorder(*args: Any, **keywords: Any) -> int:
            calls.append((args, keywords))
            if raises is not None:
                raise raises
            return returns

        stand_in = types.ModuleType(module)
        setattr(stand_in, function, recorder)
        monkeypatch.setitem(sys.modules, module, stand_in)
        return calls

    return put
