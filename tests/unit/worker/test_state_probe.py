"""Whether samples are the same: only what surely differs counts, so that no stream is refused without a cause."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline.worker.data.state_probe import differ

NAN = float("nan")


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (1, 1, False),
        ("a", "b", True),
        (NAN, NAN, False),
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN]), False),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), True),
        (torch.zeros(2), torch.zeros(3), True),
        (np.array(["a"]), np.array(["b"]), True),
        (np.array([{}], dtype=object), np.array([{"x": 1}], dtype=object), False),
        ({"x": [1, (2, 3)]}, {"x": [1, (2, 4)]}, True),
        ({"x": 1}, {"y": 1}, True),
        ([1], [1, 2], True),
        (object(), object(), False),
        ("1", None, True),
    ],
)
def test_samples_differ_only_where_that_is_sure(one: Any, other: Any, expected: bool) -> None:
    assert differ(one, other) is expected and differ(other, one) is expected
