"""The batch of a run is that of `fit`, but for what the command says."""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import pytest

from paceline.compat.keras.fit import merged_batch
from paceline.plan import Batch, Plan


@pytest.mark.parametrize(
    ("command", "program", "expected"),
    [
        ("replicas=2", Batch(size=64, shuffle=False), Batch(size=64, shuffle=False)),
        ("batch(size=16)", Batch(size=64, drop_last=True), Batch(size=16, drop_last=True)),
        ("batch(shuffle=false,drop_last=true)", Batch(size=64), Batch(size=64, shuffle=False, drop_last=True)),
        ("batch(micro=8,seed=3)", Batch(size=64), Batch(size=64, micro=8, seed=3)),
    ],
)
def test_what_the_command_says_of_the_batch_stays(command: str, program: Batch, expected: Batch) -> None:
    assert merged_batch(Plan.parse(command).batch, program) == expected
