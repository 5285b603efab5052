"""The pages on sweeps say what the code takes and writes."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from markdown_pages import blocks
from paceline.sweep import optuna_parts
from paceline.sweep.study_file import TABLES, Objective, StudySettings, read_study_file
from paceline.sweep.sweep_record import SweepRecord, TrialRow
from paceline.sweep.trial_run import check_commands

ROOT = Path(__file__).resolve().parents[3]
HOW_TO, REFERENCE = ROOT / "docs/how-to/sweep-hyperparameters.md", ROOT / "docs/reference/study-file.md"


def first_cells(after: str, *, nth: int = 0) -> list[str]:
    """The names in the first column of the n-th table behind a line of the reference."""
    text = REFERENCE.read_text()
    tables = re.findall(r"(?m)^\|.*\|\n\|[-|]+\|\n((?:\|.*\|\n)+)", text[text.index(after) :])
    rows = tables[nth].splitlines()
    return [name for row in rows for name in re.findall(r"`([\w-]+)`", row.split("|")[1])]


def names_of(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def test_the_tables_of_the_reference_have_all_fields_in_their_order() -> None:
    assert first_cells("## Lines") == names_of(StudySettings)
    assert first_cells("## objective") == names_of(Objective)
    assert first_cells("## sampler") == list(optuna_parts.SAMPLERS)
    assert first_cells("## sampler", nth=1) == list(optuna_parts.PRUNERS)
    assert first_cells("### sweep.json") == names_of(SweepRecord)
    assert sorted(first_cells("### sweep.json", nth=1)) == sorted(names_of(TrialRow))
    headings = " ".join(re.findall(r"(?m)^## (.*)$", REFERENCE.read_text()))
    assert all(table in headings for table in TABLES)


def test_the_study_of_the_how_to_is_one(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    for block in blocks(HOW_TO):
        if block.file_name:
            (tmp_path / block.file_name).write_text(block.text)
    study = read_study_file(tmp_path / "study.toml")
    check_commands(study)
    optuna_parts.make_sampler(study.sampler, study.space, number=0)
    optuna_parts.make_pruner(study.pruner)
