"""Which run of a tracker a run's directory belongs to, and the last step that it has: `RUN/loggers/NAME.json`."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

from paceline.monitor.export.run_logger import LoggedRun
from paceline.monitor.records.run_files import replace_text
from paceline.plain_data import read_object, whole
from paceline.regular_files import read_regular

__all__ = ["LOGGERS_DIR", "TrackerState"]

LOGGERS_DIR = "loggers"
MOST_BYTES = 1 << 16


class TrackerState:
    """The tracker's run of a run directory; written after each batch that the tracker has taken."""

    def __init__(self, path: Path, *, run_id: str, last_step: int | None = None) -> None:
        self.path, self.directory = path, path.parent
        self.run_id, self.last_step = run_id, last_step
        self.place = ""

    @classmethod
    def of(cls, run: LoggedRun, name: str, *, makes_id: bool = True) -> TrackerState:
        """Read the file, or begin a new one: where there is none, or the run is fresh. A damaged one is begun anew."""
        path = Path(run.run_dir) / LOGGERS_DIR / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not run.is_fresh:
            try:
                said = read_object(read_regular(path, MOST_BYTES).decode())
                last = said.get("last_step")
                return cls(path, run_id=str(said["run_id"]), last_step=None if last is None else whole(last))
            except (OSError, ValueError, TypeError, KeyError):
                pass
        state = cls(path, run_id=uuid.uuid4().hex[:16] if makes_id else "")
        if makes_id:
            state.save()
        return state

    def tell_place(self, place: str) -> None:
        """Note where people find the tracker's run."""
        self.place = place
        self.save()

    def note(self, step: int) -> None:
        """Note that the tracker has the points until this step."""
        self.last_step = max(self.last_step or 0, step)
        self.save()

    def save(self) -> None:
        said = {"run_id": self.run_id, "last_step": self.last_step, "place": self.place}
        replace_text(self.path, json.dumps(said) + "\n")
