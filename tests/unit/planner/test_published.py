"""The cost model on published measurements, with the constants that Paceline has: what docs/reference/benchmarks.md
says of them. The data is `benchmarks/data/published.jsonl`."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.planner.constants import CONSTANTS, built_in

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
ROWS = BENCHMARKS / "data" / "published.jsonl"
sys.path.insert(0, str(BENCHMARKS))

from tables import fitting  # noqa: E402
from tables.answers import answer, receipts  # noqa: E402
from tables.report import Tried, held, rank_lines  # noqa: E402
from tables.rows import Row, load_rows, read_row  # noqa: E402


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return load_rows(ROWS)


def complete(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["kind"] == "train" and row["grade"] == "A" and not read_row(row).is_special]


def quantiles(errors: list[float]) -> tuple[float, float]:
    """The median and the 90th percentile of relative errors."""
    found = sorted(abs(math.expm1(error)) for error in errors)
    return found[len(found) // 2], found[int(len(found) * 0.9)]


def test_every_row_has_an_answer_and_says_what_it_assumed(rows: list[Row]) -> None:
    answers = [answer(read_row(row), built_in()).to_json() for row in rows]
    assert len(answers) > 700
    for row, one in zip(rows, answers, strict=True):
        low, high = one["step_time_s_band"]
        assert 0 < low < one["step_time_s"] < high
        assert one["memory_gb"] > 0
        if row.get("recompute") is None:
            assert any("recompute" in said for said in one["assumed"])
        if row["batch"].get("micro_batch") is None and row["batch"].get("grad_accum") is None:
            assert any(said.startswith("batch.micro_batch") for said in one["assumed"])


def test_nothing_that_was_measured_is_read(rows: list[Row]) -> None:
    for row in rows[::20]:
        hidden: dict[str, Any] = {
            key: row[key] for key in ("model", "cluster", "layout", "batch", "source") if key in row
        }
        hidden |= {"precision": row.get("precision"), "recompute": row.get("recompute"), "id": row["id"]}
        assert answer(read_row(hidden), built_in()).to_json() == answer(read_row(row), built_in()).to_json()


@pytest.mark.thorough
def test_rows_that_are_not_in_the_fit_are_predicted(rows: list[Row]) -> None:
    found = fitting.samples(complete(rows))
    kept, others = fitting.folds(found)[0]
    constants = fitting.fit(kept)
    factors = fitting.software_factors(kept, constants)
    median, p90 = quantiles([one.log_error(constants, factors.get(one.title, 1.0)) for one in others])
    assert median < 0.05
    assert p90 < 0.15


def test_a_receipt_corrects_its_neighbors(rows: list[Row]) -> None:
    found = complete(rows)
    smallest = receipts(found, built_in())
    errors = {"with": list[float](), "without": list[float]()}
    for row in found:
        reading = read_row(row)
        receipt = smallest.get(reading.id)
        with_it = Tried(answer(reading, built_in(), receipt=receipt), row)
        if receipt is None or receipt.row == reading.id or with_it.log_error is None:
            continue
        errors["with"].append(with_it.log_error)
        errors["without"].append(Tried(answer(reading, built_in()), row).log_error or 0.0)
    median, p90 = quantiles(errors["with"])
    assert median < 0.04
    assert p90 < 0.12
    assert median < quantiles(errors["without"])[0]


def test_memory_is_predicted_and_what_ran_out_of_it_never_fits(rows: list[Row]) -> None:
    found = [Tried(answer(read_row(row), built_in()), row) for row in rows if not row["layout"].get("offload")]
    errors = [one.memory_error for one in found if one.memory_error is not None and one.row["grade"] == "A"]
    median, p90 = quantiles(errors)
    assert median < 0.08
    assert p90 < 0.20
    ran_out = [one for one in found if one.is_oom]
    assert len(ran_out) >= 10
    assert not [one.reading.id for one in ran_out if one.answer.fits == "fits"]
    assert not [one.reading.id for one in found if one.memory_error is not None and one.answer.fits == "does not fit"]


def test_bands_hold_what_they_say(rows: list[Row]) -> None:
    special = [
        Tried(answer(read_row(row), built_in()), row)
        for row in rows
        if row["kind"] == "train" and (read_row(row).is_special or read_row(row).is_incomplete)
    ]
    share = held([(one.log_error, one.answer.band) for one in special if one.log_error is not None])
    assert 0.75 <= share <= 0.88


def test_of_two_plans_the_faster_one_is_known(rows: list[Row]) -> None:
    lines = rank_lines([Tried(answer(read_row(row), built_in()), row) for row in complete(rows)])
    right = float(lines[0].split("right in ")[1].split(" %")[0])
    regret = float(lines[1].split("90th percentile ")[1].split(" %")[0])
    assert right >= 85
    assert regret <= 8


def command(*words: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "published.py"), *words], cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.thorough
def test_the_command_answers_rows_in_their_order(tmp_path: Path, rows: list[Row]) -> None:
    some = tmp_path / "some.json"
    some.write_text(json.dumps(rows[:30]))
    built = BENCHMARKS.parent / "src" / "paceline" / "planner" / "constants.toml"
    lines = command("--constants", str(built), "--rows", str(some), "--json", cwd=tmp_path).splitlines()
    assert [json.loads(line)["id"] for line in lines] == [row["id"] for row in rows[:30]]
    known = json.loads(lines[0])["step_time_s"]
    lines = command("--constants", str(built), "--rows", str(some), "--json", "--leave-out-source", cwd=tmp_path)
    assert json.loads(lines.splitlines()[0])["step_time_s"] != known


@pytest.mark.further
def test_the_constants_that_paceline_has_are_those_of_the_command(tmp_path: Path) -> None:
    told = command("--fit", str(ROWS), "--out", str(tmp_path / "c.toml"), cwd=tmp_path).splitlines()
    known, unknown, receipt = ([float(word) for word in line.replace("%", "").split()[-2:]] for line in told[1:4])
    assert known[0] <= 5 and known[1] <= 15
    assert unknown[0] <= 12 and unknown[1] <= 30
    assert receipt[0] <= 4 and receipt[1] <= 12
    from paceline.planner.constants import load_calibration

    fresh = load_calibration(tmp_path / "c.toml")
    for constant in CONSTANTS:
        ours, found = (getattr(one.constants, constant.name) for one in (built_in(), fresh))
        assert ours == pytest.approx(found, rel=0.02), constant.name
    assert dataclasses.asdict(fresh)["spreads"] == pytest.approx(dict(built_in().spreads), rel=0.02)
