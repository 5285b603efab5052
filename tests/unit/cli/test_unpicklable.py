"""A function that cannot be sent to the workers is refused in one sentence that names what it uses."""

from __future__ import annotations

import threading
from typing import Any

import cloudpickle
import pytest

from paceline.errors import PlanError
from paceline.runs.unpicklable import pickled_function

SOURCE = """
import threading
lock = threading.Lock()
def helper():
    with lock:
        return 1
def train(worker):
    return [helper() for _ in range(3)]
def plain(worker):
    return helper.__name__
"""


def cell() -> dict[str, Any]:
    """The names of a notebook, after a cell has run."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(SOURCE, names)
    return names


def test_the_global_is_named_though_a_helper_uses_it() -> None:
    with pytest.raises(PlanError) as info:
        pickled_function(cell()["train"], {})
    text = str(info.value)
    assert text.startswith(
        "train cannot be sent to the workers: it uses 'lock', an object of type lock, which cannot be"
    )
    assert "Make it inside of the function" in text and "\n" not in text


def test_a_closure_and_what_can_be_sent() -> None:
    guard = threading.Lock()

    def train(worker: Any) -> Any:
        return guard

    with pytest.raises(PlanError, match="it uses 'guard', an object of type lock"):
        pickled_function(train, {})
    function, fields = cloudpickle.loads(pickled_function(lambda worker: worker + 1, {"workers": 2}))
    assert (function(1), fields) == (2, {"workers": 2})
