"""The batch of a run is that of `fit`, but for what the command says."""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import pytest

from paceline.compat.keras.fit import merged_batch
from paceline.plan import Batch, CommandPlan, Plan


@pytest.mark.parametrize(
    ("command", "program", "expected"),
    [
        ("replicas=2", Batch(size=64, shuffle=False), Batch(size=64, shuffle=False)),
        ("batch(size=16)", Batch(size=64, drop_last=True), Batch(size=16, drop_last=True)),
        ("batch(shuffle=false,drop_last=true)", Batch(size=64), Batch(size=64, shuffle=False, drop_last=True)),
        ("batch(micro=8,seed=3)", Batch(size=64), Batch(size=64, micro=8, seed=3)),
        ("batch(size=32,shuffle=true)", Batch(size=64, shuffle=False), Batch(size=32)),  # defaults that are written
        ("default", Batch(size=64, shuffle=False), Batch(size=64, shuffle=False)),
    ],
)
def test_what_the_command_says_of_the_batch_stays(command: str, program: Batch, expected: Batch) -> None:
    plan = CommandPlan.of(Plan.parse(command), given=Plan.names_in(command))
    assert merged_batch(plan, program) == expected
    if "32" not in command:  # where it is not known what was written, what is not the default counts
        assert merged_batch(CommandPlan(whole=Plan.parse(command)), program) == expected


def test_a_set_value_counts_beside_a_plan() -> None:
    plan = CommandPlan.of(Plan.parse("replicas=2"), ["plan.batch.size=32"], given=Plan.names_in("replicas=2"))
    assert merged_batch(plan, Batch(size=64, micro=8)) == Batch(size=32, micro=8)
