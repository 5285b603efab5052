"""What `paceline parity` says of a configuration that differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli.parity.compare import Difference, Differences
from paceline.cli.parity.report import ParityVerdict, Tolerance, parity_text
from paceline.cli.parity.where import ask_for_modules
from paceline.plan import Plan


def said_of(plan: str, difference: float, *, draws_by_unit: bool = False) -> str:
    parsed = Plan.parse(plan)
    nothing = Difference()
    found = Differences(
        num_steps=3, loss=Difference(value=difference, where="loss", step=1), first_gradients=nothing,
        gradients=nothing, weights=nothing, left_out=nothing, num_left_out=0, buffers=nothing, optimizers=nothing,
        metrics=(), wire=nothing,
    )  # fmt: skip
    verdict = ParityVerdict(
        workers=2,
        plan=parsed,
        device="cpu",
        reference_device="cpu",
        tolerance=Tolerance.of(None, precision=parsed.compute.precision),
        found=found,
        draws_by_unit=draws_by_unit,
    )
    return parity_text([verdict])


def test_a_reference_that_draws_as_stages_do_is_told() -> None:
    says = "under stages each unit draws random numbers of its own (dropout); the reference draws them, too"
    assert says in said_of("stages=2", 0.0, draws_by_unit=True)
    assert says not in said_of("stages=2", 0.0)


@pytest.mark.parametrize(("precision", "rounding"), [("bf16", 2**-7), ("fp16", 2**-10)])
def test_sixteen_bits_may_differ_by_two_roundings_of_their_own(precision: str, rounding: float) -> None:
    assert "DIFFERS" not in said_of(f"tensor=2+compute(precision={precision})", 2 * rounding)
    assert "DIFFERS" in said_of(f"tensor=2+compute(precision={precision})", 3 * rounding)


@pytest.mark.parametrize(("precision", "rounding"), [(None, 0.0), ("fp32", 2**-23), ("bf16", 2**-7), ("fp16", 2**-10)])
def test_weights_are_perturbed_by_a_rounding_of_the_plans_precision(
    precision: str | None, rounding: float, tmp_path: Path
) -> None:
    ask_for_modules(tmp_path, steps=2, perturbed_in=precision)
    assert json.loads((tmp_path / "modules.json").read_text()) == {"steps": 2, "rounding": rounding}
