"""The cost model's constants: twelve, within their bounds, and the same when read again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from paceline.errors import PlanError
from paceline.planner.constants import CONSTANTS, Calibration, Constants, built_in, load_calibration, write_calibration


def test_there_are_twelve_and_each_is_explained() -> None:
    assert len(CONSTANTS) == 12
    assert [one.name for one in CONSTANTS] == [field.name for field in dataclasses.fields(Constants)]
    for one in CONSTANTS:
        assert one.low < one.guess <= one.high
        assert one.unit and one.meaning and one.source


@pytest.mark.parametrize("value", [0.1, 1.5, float("nan")])
def test_a_value_out_of_bounds_is_refused_with_its_meaning(value: float) -> None:
    with pytest.raises(PlanError, match=r"matmul is .*between 0\.6 and 1"):
        Constants(matmul=value)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    calibration = Calibration(
        constants=Constants(matmul=0.8123, latency=2.5e-05),
        factors={'a "quoted" \\ title': 1.25},
        memory_factors={"b": 2.0},
        spreads={"memory none": 0.3},
        baseline={"h100/bf16": 0.4},
    )
    write_calibration(tmp_path / "c.toml", calibration, title="trial")
    assert load_calibration(tmp_path / "c.toml") == calibration


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text.replace("[constants.matmul]", "[constants.matmull]"), "matmul"),
        (lambda text: "x = 1", "KeyError"),
        (lambda text: text.replace("value = 0.8", "value = 8.0"), "between"),
        (lambda text: "nonsense", "not valid TOML"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, change, says: str) -> None:  # pyright: ignore[reportMissingParameterType, reportUnknownParameterType]
    path = tmp_path / "c.toml"
    write_calibration(path, Calibration(constants=Constants(matmul=0.8)), title="trial")
    path.write_text(change(path.read_text()))
    with pytest.raises(PlanError, match=says):
        load_calibration(path)


def test_the_built_in_ones_are_read_and_differ_from_the_first_guesses() -> None:
    found = built_in()
    assert found.constants != Constants()
    assert {"software", "none", "special", "memory none"} <= found.spreads.keys()
