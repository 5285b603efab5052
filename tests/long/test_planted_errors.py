"""Parity is put to the test: errors of the kinds that layouts have had elsewhere are planted into ours, one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from planted_errors import ERRORS, Outcome, PlantedError, Trials, table

CAUGHT, PLACED = 0.95, 0.9


@pytest.mark.timeout(3000)
def test_parity_catches_planted_errors_and_names_their_modules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trials = Trials(tmp_path)
    outcomes = [trials(error) for error in ERRORS]
    with capsys.disabled():
        print(f"\n{table(outcomes)}")
    assert len(outcomes) >= 40
    assert sum(one.is_caught for one in outcomes) >= CAUGHT * len(outcomes), _lost(outcomes)
    assert sum(one.is_placed for one in outcomes) >= PLACED * len(outcomes), _lost(outcomes)


@pytest.mark.parametrize("layout", sorted({error.layout for error in ERRORS}))
def test_without_an_error_nothing_is_caught(layout: str, tmp_path: Path) -> None:
    program = next(error for error in ERRORS if error.layout == layout)
    nothing = PlantedError(
        what="nothing", layout=layout, plant=lambda _: None, expected=(), program=program.reference or program.program
    )
    assert not Trials(tmp_path)(nothing).is_caught


def _lost(outcomes: list[Outcome]) -> str:
    return table([one for one in outcomes if not (one.is_caught and one.is_placed)])
