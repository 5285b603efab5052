"""`RUN/engine.json`: where a run was submitted, so that later commands find it; written on the submitting machine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import PlanError, writing
from paceline.plain_data import fitted, read_object
from paceline.private_files import make_run_directory, replace_private
from paceline.regular_files import read_regular

__all__ = ["EngineRecord"]

NAME = "engine.json"
FILES = "engine"  # directory of the run for what the engine needs: scripts, the token, the hosts' output
MOST_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineRecord:
    """The contents of the file; `handle` is the engine's own."""

    run_dir: Path = dataclasses.field(compare=False)  # where it lies; not written
    engine: Mapping[str, Any]  # its settings
    handle: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    run_dir_there: str = ""  # the run directory as the hosts see it
    folder: str = ""  # where the command was given
    python: str = ""  # the hosts' interpreter
    hosts: int = 1
    workers: int = 1
    slots: int = 1  # workers of one host
    workers_each: int = 1  # of a replica
    least_hosts: int = 1
    grace_s: float = 30.0
    submitted: float = 0.0

    @classmethod
    def load(cls, run_dir: Path) -> EngineRecord | None:
        """Read a run's file; None where there is none. Raises PlanError where it is damaged."""
        path = Path(run_dir) / NAME
        try:
            fields = read_object(read_regular(path, MOST_BYTES))
            return dataclasses.replace(fitted(cls, {**fields, "run_dir": ""}), run_dir=Path(run_dir))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise PlanError(f"{path} cannot be read ({error}): it is damaged or of another version.") from error

    def save(self) -> EngineRecord:
        """Write the file and return the record; RunFileError where the disk does not take it."""
        fields = dataclasses.asdict(self)
        del fields["run_dir"]
        with writing(self.run_dir):
            make_run_directory(self.run_dir)
            replace_private(self.run_dir / NAME, (json.dumps(fields, indent=1) + "\n").encode())
        return self

    def changed(self, **fields: Any) -> EngineRecord:
        """Write the record with other values in some fields."""
        return dataclasses.replace(self, **fields).save()

    @property
    def files(self) -> Path:
        """The directory for what the engine needs; made if it is not there."""
        place = self.run_dir / FILES
        with writing(place):
            make_run_directory(self.run_dir)
            place.mkdir(mode=0o700, exist_ok=True)
        return place
