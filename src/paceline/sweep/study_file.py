"""`study.toml`: what is searched, which script runs with it, and what makes a trial good.

    script = "digits.py"                            # relative to this file
    plan = "replicas=1-2+batch(size={batch})"       # {name}: the trial's value
    trials = 20

    [objective]
    metric = "eval/accuracy"
    direction = "maximize"

    [parameters]
    lr = { kind = "float", low = 1e-4, high = 1e-1, log = true }
    batch = [32, 64]

Each is read and refused as job files are: by name, with the nearest legal one.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from paceline import config
from paceline.errors import PlanError
from paceline.sweep.space import Space

__all__ = ["JOURNAL", "Objective", "StudyFile", "StudySettings", "read_study_file"]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")  # a part of the names of runs
SQLITE, JOURNAL = "sqlite:///", "journal:"  # begin a storage that is a file
TABLES = ("parameters", "sampler", "pruner", "environment", "job")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """What makes a trial good. `metric`: "loss" or a name that the script reports, "eval/NAME" of an evaluation.

    A metric of steps counts as its mean over `every` steps; an evaluation counts as it is. Pruners count in `unit`.
    `value` of a trial: its last one, or its best.
    """

    metric: str
    direction: Literal["minimize", "maximize"]
    every: int = 10
    unit: Literal["evaluations", "steps"] = "evaluations"
    value: Literal["last", "best"] = "last"

    def __post_init__(self) -> None:
        if not self.metric.strip():
            raise PlanError('objective.metric is empty; name what the script reports: "loss", or "eval/accuracy".')
        if self.every < 1:
            raise PlanError(f"objective.every is {self.every}; it must be at least 1 step.")

    @property
    def is_better(self) -> Callable[[float, float], bool]:
        """Whether the first value is better than the second."""
        return (lambda a, b: a < b) if self.direction == "minimize" else (lambda a, b: a > b)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StudySettings:
    """The lines of a study file above its tables. None: decided by default, as the reference says."""

    script: str
    objective: Objective
    name: str | None = None
    folder: str | None = None
    arguments: str | tuple[str, ...] | None = None
    plan: str | None = None
    replicas: int | str | None = None
    trials: int | None = None
    at_once: int | None = None
    retries: int = 0
    timeout_s: float | None = None
    pool: str | None = None
    slots: int | None = None
    priority: float = 1.0
    deadline_s: float | None = None
    storage: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("trials", 1), ("at_once", 1), ("slots", 1), ("retries", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise PlanError(f"{name} is {value}; it must be at least {least}.")
        for name in ("timeout_s", "priority", "deadline_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise PlanError(f"{name} is {value!r}; it must be above 0.")
        if self.pool is not None and self.slots is not None:
            raise PlanError("slots is about a pool of the sweep's own, and pool names another one; leave one out.")
        if not self.script.endswith(".py"):
            raise PlanError(
                f"script is {self.script!r}; it must be a Python script. Of a job file, name the program, and give the "
                "other lines in [job]."
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StudyFile:
    """A study file, read: its lines, its tables, and the paths that follow from them."""

    path: Path  # of the file, absolute
    settings: StudySettings
    space: Space
    sampler: Mapping[str, Any]
    pruner: Mapping[str, Any]
    environment: Mapping[str, str]
    job: Mapping[str, str]  # fields of a Job, as text

    @property
    def objective(self) -> Objective:
        return self.settings.objective

    @property
    def home(self) -> Path:
        """The file's folder: there trials run, and relative paths begin."""
        return self.path.parent

    @property
    def name(self) -> str:
        return self.settings.name or self.path.stem

    @property
    def folder(self) -> Path:
        """Where the study's own files are, and the run directories of its trials."""
        return self.home / (self.settings.folder or f"runs/{self.name}")

    @property
    def pool(self) -> Path:
        return self.folder / "pool" if self.settings.pool is None else self.home / self.settings.pool

    @property
    def has_own_pool(self) -> bool:
        return self.settings.pool is None

    @property
    def storage(self) -> str:
        """The URL of Optuna's storage. The path of a file starts at the study file's folder."""
        said = self.settings.storage
        if said is None:
            return f"{SQLITE}{self.folder / 'optuna.db'}"
        for beginning in (SQLITE, JOURNAL):
            if said.startswith(beginning) and said != SQLITE:
                return f"{beginning}{self.home / said.removeprefix(beginning)}"
        return said

    def run_dir(self, number: int) -> Path:
        return self.folder / "trials" / f"trial-{number:04}"


def read_study_file(path: Path) -> StudyFile:
    """Read a study file. Raises PlanError that begins with its path, for everything that can be seen in it."""
    path = path.absolute()
    table = config.load_toml(path)
    try:
        found = _read(path, table)
        if not NAME.fullmatch(found.name):
            raise PlanError(
                f"name is {found.name!r}; it names runs and a folder: up to 80 letters, digits, '.', '_' and '-'."
            )
        if not (found.home / found.settings.script).is_file():
            raise PlanError(
                f"script is {found.settings.script!r}, which does not exist. A relative path starts at this file's "
                "folder."
            )
        return found
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def _read(path: Path, table: dict[str, Any]) -> StudyFile:
    tables: dict[str, Mapping[str, Any]] = {}
    for name in TABLES:
        found = table.pop(name, {})
        if not isinstance(found, Mapping):
            raise PlanError(f"{name} is {found!r}; it must be a table: [{name}].")
        tables[name] = found
    misplaced = table.keys() - config.annotations_of(StudySettings).keys()
    for name in sorted(misplaced & {"metric", "direction"}):
        raise PlanError(f"{name} belongs into the table [objective].")
    settings = config.read(StudySettings, table)
    return StudyFile(
        path=path,
        settings=settings,
        space=Space.read(tables["parameters"]),
        sampler=tables["sampler"],
        pruner=tables["pruner"],
        environment=_texts("environment", tables["environment"]),
        job=_texts("job", tables["job"]),
    )


def _texts(table: str, values: Mapping[str, Any]) -> dict[str, str]:
    """The values of a table as text, as a command or an environment has them."""
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, list):
            found[name] = ",".join(map(str, value))
        elif isinstance(value, str | int | float):
            found[name] = str(value).lower() if isinstance(value, bool) else str(value)
        else:
            raise PlanError(f"{table}.{name} is {value!r}; it must be a text or a number.")
    return found
