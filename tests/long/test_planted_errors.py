"""Parity is put to the test: errors of the kinds that layouts have had elsewhere are planted into ours, one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from planted import programs
from planted.planting import PlantedError
from planted.programs import Program
from planted.trials import ERRORS, Outcome, Trials, table, table_by_layout

CAUGHT, PLACED = 0.95, 0.9


@pytest.mark.timeout(3000)
def test_parity_catches_planted_errors_and_names_their_modules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trials = Trials(tmp_path)
    outcomes = [trials(error) for error in ERRORS]
    with capsys.disabled():
        print(f"\n{table(outcomes)}\n\n{table_by_layout(outcomes)}")
    assert len(outcomes) >= 40
    assert not [one for one in outcomes if one.failure], "plantings that do not fit the code"
    assert sum(one.is_caught for one in outcomes) >= CAUGHT * len(outcomes), _lost(outcomes)
    assert sum(one.is_placed for one in outcomes) >= PLACED * len(outcomes), _lost(outcomes)


# Each layout with each program that errors are planted into there, and programs of other kinds.
SOUND: list[tuple[str, Program]] = [(error.plan, error.reference or error.program) for error in ERRORS]
WIRED: list[tuple[str, Program]] = [
    (f"{layout}+{wire}", programs.unclipped_text)
    for layout in ("replicas=2", "replicas=2+shard=2")
    for wire in ("onebit", "int8", "topk(ratio=0.25)")
]
OTHERS: list[tuple[str, Program]] = [
    (plan, program)
    for plan in ("replicas=2", "shard=2", "tensor=2", "stages=2", "replicas=2+shard=2")
    for program in (programs.dropped_text, programs.normed, programs.tied_adam)
    if not (plan == "tensor=2" and program is programs.normed)
    and not (plan == "stages=2" and program in (programs.dropped_text, programs.normed))  # each unit draws by itself
]


@pytest.mark.parametrize(("plan", "program"), dict.fromkeys([*SOUND, *OTHERS, *WIRED]))
def test_without_an_error_nothing_is_caught(plan: str, program: Program, tmp_path: Path) -> None:
    nothing = PlantedError(what="nothing", plan=plan, plant=lambda _: None, expected=(), program=program)
    outcome = Trials(tmp_path)(nothing)
    assert not outcome.failure and not outcome.is_caught, outcome


@pytest.mark.parametrize("plan", ["replicas=2", "shard=2", "stages=2", "tensor=2"])
def test_without_an_error_nothing_is_caught_in_bfloat16(plan: str, tmp_path: Path) -> None:
    nothing = PlantedError(what="nothing", plan=plan, plant=lambda _: None, expected=())
    outcome = Trials(tmp_path)(nothing, precision="bf16")
    assert not outcome.failure and not outcome.is_caught, outcome


IN_BFLOAT16 = (
    "a gradient is not summed over the replicas",
    "the sum of a unit's rows is doubled",
    "tensor parallel workers draw other masks",
    "norm counts whole parameters on each worker",
    "gradient of a column layer's input is not summed",
)


@pytest.mark.parametrize("what", IN_BFLOAT16)
def test_errors_far_above_its_rounding_are_placed_in_bfloat16(what: str, tmp_path: Path) -> None:
    (error,) = (one for one in ERRORS if one.what == what)
    outcome = Trials(tmp_path)(error, precision="bf16")
    assert outcome.is_caught and outcome.is_placed, outcome


def _lost(outcomes: list[Outcome]) -> str:
    return table([one for one in outcomes if not (one.is_caught and one.is_placed)])
