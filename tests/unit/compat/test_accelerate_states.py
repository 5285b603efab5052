"""Names of an Accelerate program's states: the highest number is the newest, over all attempts of the program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.compat.accelerate.saved_state import latest_directory, next_directory
from paceline.compat.accelerate.utils import ProjectConfiguration
from paceline.errors import CheckpointError


class SaidWorker:
    """A worker of a run in which the first one says a number."""

    def __init__(self, said: int | None = None) -> None:
        self.is_first, self._said = said is None, said

    def gather(self, value: int) -> list[int]:
        return [value if self._said is None else self._said, value]


def folder_with(place: Path, *names: str) -> Path:
    for name in names:
        (place / "checkpoints" / name).mkdir(parents=True)
    return place / "checkpoints"


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def save(worker: Any, project: ProjectConfiguration) -> str:
    chosen = next_directory(worker, project)
    chosen.mkdir(parents=True)
    project.iteration += 1
    return chosen.name


def test_a_program_that_begins_again_writes_over_no_state(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "checkpoint_7", "checkpoint_8", "checkpoint_9", "checkpoint_best")
    project = ProjectConfiguration(project_dir=str(tmp_path), total_limit=3)
    assert save(SaidWorker(), project) == "checkpoint_10"
    assert names_in(folder) == ["checkpoint_10", "checkpoint_8", "checkpoint_9", "checkpoint_best"]
    assert latest_directory(project).name == "checkpoint_10"
    assert save(SaidWorker(), project) == "checkpoint_11"
    assert latest_directory(project).name == "checkpoint_11"


def test_the_first_state_has_the_number_that_the_program_says(tmp_path: Path) -> None:
    project = ProjectConfiguration(project_dir=str(tmp_path), iteration=4)
    with pytest.raises(CheckpointError, match="has no checkpoint_0"):
        latest_directory(project)
    assert [save(SaidWorker(), project) for _ in range(2)] == ["checkpoint_4", "checkpoint_5"]


def test_all_workers_have_the_name_that_the_first_one_chose(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "checkpoint_1")
    project = ProjectConfiguration(project_dir=str(tmp_path), total_limit=1)
    worker: Any = SaidWorker(said=6)
    assert next_directory(worker, project).name == "checkpoint_6"
    assert names_in(folder) == ["checkpoint_1"]  # only the first one removes
