"""A run of a pool, as it was queued: one file for each, in `POOL/queue`, which outlives the pool's process.

The file has what starts the run: the command, the folder, and the environment of the terminal in which it was given. So
it is readable by its user alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from paceline.errors import LaunchError, PlanError
from paceline.plain_data import fitted, read_object
from paceline.pool.batch_growth import BatchGrowth
from paceline.private_files import make_own_directory, read_private, write_private

__all__ = ["QUEUE", "PoolRun", "is_taken_out", "queued_run", "queued_runs"]

QUEUE, SUFFIX = "queue", ".json"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PoolRun:
    """`command`: the words after `paceline run`, without what is about the pool. `least` and `most` replicas of
    `workers_each` workers. `deadline`: by when it should be done, in seconds since 1970. A second of a run with
    `priority` 2 counts as two of others. `growth`: how its batch may grow with its replicas; None: it stays.
    """

    name: str
    command: tuple[str, ...]
    folder: str
    environment: Mapping[str, str] = dataclasses.field(repr=False)
    run_dir: str
    script: str
    least: int
    most: int
    workers_each: int
    submitted: float
    priority: float = 1.0
    deadline: float | None = None
    growth: BatchGrowth | None = None

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise PlanError(
                f"{self.name!r} cannot name a run of a pool; use up to 100 letters, digits, '.', '_' and '-'. The name "
                "is the run directory's last part."
            )

    @property
    def is_elastic(self) -> bool:
        return self.least < self.most

    @property
    def uses_gpus(self) -> bool:
        """Whether it takes GPUs where a node has some: all runs but those whose command says --device cpu."""
        words = self.command[: self.command.index("--") if "--" in self.command else None]
        said = [word.partition("=")[2] for word in words if word.startswith("--device=")]
        said += [after for word, after in itertools.pairwise(words) if word == "--device"]
        return "cpu" not in said

    def add_to(self, pool: Path) -> None:
        """Queue it. Raises PlanError where the pool has a run of this name, or others may write to its folder."""
        make_own_directory(pool)
        (pool / QUEUE).mkdir(mode=0o700, exist_ok=True)
        path = _path(pool, self.name)
        partial = path.with_name(f".{path.name}.new")
        write_private(partial, json.dumps(dataclasses.asdict(self), indent=1).encode())
        try:
            path.hardlink_to(partial)  # unlike a rename it fails where there is one
        except FileExistsError:
            raise PlanError(
                f"{pool} has a run named {self.name} already. Give another --run-dir, or take that one out: "
                f"paceline pool {pool} --cancel {self.name}"
            ) from None
        finally:
            partial.unlink(missing_ok=True)

    def remove_from(self, pool: Path) -> None:
        """Take it out of the queue's folder; its run directory stays."""
        _path(pool, self.name).unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> PoolRun:
        """Read one; raises ValueError for a damaged file."""
        fields = read_object(read_private(path).decode())
        return fitted(cls, fields)


def queued_runs(
    pool: Path, *, known: Mapping[str, PoolRun], problem: Callable[[str], None] | None = None
) -> dict[str, PoolRun]:
    """Return the runs of a pool by name, in the order in which they came; files of `known` ones are not read again.

    A known run is left out only where its own file is gone from a folder that can be listed. Where the folder cannot be
    listed, or is gone, the known ones are returned. This, and a file that is no run, is told to `problem`; without it
    PlanError is raised.
    """
    found: list[PoolRun] = []
    try:
        names = _names(pool)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not known:
            return {}  # nothing was ever queued
        _report(f"{pool / QUEUE} cannot be listed ({error}): runs stay as they are.", error, problem)
        return dict(known)
    for name in sorted(names | known.keys()):
        path = _path(pool, name)
        try:
            if name not in known:
                found.append(PoolRun.load(path))
            elif name in names or not is_taken_out(pool, name):
                found.append(known[name])
        except FileNotFoundError:
            continue  # it was taken out meanwhile
        except (OSError, ValueError, PlanError, LaunchError) as error:
            text = f"{path} is no queued run ({error}). It is damaged or of another version: move it away."
            _report(text, error, problem)
    return {one.name: one for one in sorted(found, key=lambda one: (one.submitted, one.name))}


def queued_run(pool: Path, name: str) -> PoolRun | None:
    """Read one run of a pool; None where there is none. Raises PlanError where its file is damaged or not readable."""
    path = _path(pool, name)
    try:
        return PoolRun.load(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LaunchError) as error:
        raise PlanError(
            f"{path} is no queued run ({error}). It is damaged or of another version: move it away."
        ) from error


def is_taken_out(pool: Path, name: str) -> bool:
    """Whether the queue has no such run. False where that cannot be told: the folder is away, or cannot be read."""
    try:
        os.stat(_path(pool, name))
    except FileNotFoundError:
        return (pool / QUEUE).is_dir()
    except OSError:
        pass
    return False


def _names(pool: Path) -> set[str]:
    """The names of the files in the queue's folder; raises OSError where it cannot be listed."""
    with os.scandir(pool / QUEUE) as entries:
        files = [entry.name for entry in entries]
    return {name.removesuffix(SUFFIX) for name in files if name.endswith(SUFFIX) and not name.startswith(".")}


def _report(text: str, error: Exception, problem: Callable[[str], None] | None) -> None:
    if problem is None:
        raise PlanError(text) from error
    problem(text)


def _path(pool: Path, name: str) -> Path:
    return pool / QUEUE / f"{name}{SUFFIX}"
