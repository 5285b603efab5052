"""A sweep as its page shows it, read from the `sweep.json` of its folder: the study, and its trials.

A page gets the trials that have changed since it looked last, so a study of thousands is followed cheaply.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.plain_data import read_object
from paceline.processes import is_same_process, this_host
from paceline.regular_files import read_regular
from paceline.ui.metrics_rows import number
from paceline.ui.run_summary import FileStamp
from paceline.units import name_text, printable

__all__ = ["SWEEP_FILE", "SweepFolder"]

SWEEP_FILE = "sweep.json"
MOST_BYTES = 64 << 20
MOST_TRIALS = 20_000
MOST_PARAMETERS = 100
MOST_TEXT = 400
MOST_NUMBER = 1 << 53
OVERVIEW_VALUES = 60
DIRECTIONS = ("minimize", "maximize")
STATES = ("waiting", "running", "paused", "finished", "pruned", "failed")


class SweepFolder:
    """Call its methods from one thread at a time. `revision` counts looks that found something new."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.problem = ""
        self.revision = 1
        self._study: Mapping[str, Any] = {}
        self._trials: dict[int, dict[str, Any]] = {}
        self._changed: dict[int, int] = {}  # trial -> in which revision
        self._stamp: FileStamp | None = None
        self._pages: dict[int, str] = {}
        self._pool_page: str | None = None
        self._known_state = ""
        self._began = 0  # the revision from which on changes are known; before it, all trials are told

    def look(self) -> bool:
        """Read the file if it has changed; returns whether it has, or the sweep's process has come or gone."""
        stamp = FileStamp.of(self.path / SWEEP_FILE)
        if stamp == self._stamp and self._state() == self._known_state:
            return False
        self._stamp = stamp
        self.revision += 1
        try:
            self._study = read_object(read_regular(self.path / SWEEP_FILE, MOST_BYTES))
            self.problem = ""
        except (OSError, ValueError) as error:
            self.problem = f"{SWEEP_FILE} cannot be read: {printable(str(error))}"
            self._known_state = self._state()
            return True
        found = {one["number"]: one for one in _trials(self._study.get("trials"))}
        if self._trials.keys() - found.keys():  # another study
            self._began, self._changed = self.revision, {}
        for key, trial in found.items():
            if trial != self._trials.get(key):
                self._changed[key] = self.revision
        self._trials, self._known_state = found, self._state()
        return True

    def run_dirs(self) -> dict[int, str]:
        """Return the trials' run directories below the folder, by number."""
        return {key: trial["run_dir"] for key, trial in self._trials.items() if trial["run_dir"]}

    def states(self) -> dict[int, str]:
        """Return the trials' states, by number."""
        return {key: trial["state"] for key, trial in self._trials.items()}

    def summary(self) -> dict[str, Any]:
        """Return a few values, for the overview; `values`: of the best so far, over the trials."""
        best, direction = self._best(), self._direction()
        states = [trial["state"] for trial in self._trials.values()]
        return {
            "name": self.name,
            "state": self._state(),
            "objective": self._text("objective"),
            "direction": direction,
            "best": best,
            "value": None if best is None else self._trials[best]["value"],
            "wanted": _whole_or_none(self._study.get("wanted")),
            "counts": {state: states.count(state) for state in STATES if state in states},
            "values": _thinned(list(_best_so_far(self._trials.values(), direction)), OVERVIEW_VALUES),
        }

    @property
    def pool_dir(self) -> str:
        """The folder of its pool; "" where the file does not say."""
        found = self._study.get("pool")
        return found if isinstance(found, str) and "\0" not in found else ""

    def has_pages(self, pages: Mapping[int, str], *, pool: str | None) -> None:
        """Take which trials have a run that has a page (the runs' names, by trial), and the name of its pool's."""
        different = {key for key in self._trials if pages.get(key) != self._pages.get(key)}
        is_other = pool != self._pool_page
        self._pages, self._pool_page = dict(pages), pool
        if different or is_other:
            self.revision += 1
            self._changed |= dict.fromkeys(different, self.revision)

    def changes(self, since: int) -> dict[str, Any] | None:
        """Return the study, and the trials that a page which has seen `since` lacks; None: nothing."""
        whole = since < self._began or since > self.revision or since == 0
        if since == self.revision:
            return None
        trials = [
            trial | {"page": self._pages.get(key)}
            for key, trial in sorted(self._trials.items())
            if whole or self._changed.get(key, 0) > since
        ]
        return {
            "whole": whole,
            "study": self.summary()
            | {
                "title": self._text("name") or self.name,
                "file": self._text("study"),
                "pool": self._text("pool"),
                "pool_page": self._pool_page,
                "host": self._text("host"),
                "started": number(self._study.get("started")),
                "updated": number(self._study.get("updated")),
                "problem": self.problem,
                "path": printable(str(self.path.resolve())),
                "log": _log_parameters(self._study),
            },
            "trials": trials,
            "revisions": [self.revision],
        }

    def number_of(self, run_dir: Path) -> int | None:
        """The trial whose run lies in this directory (resolved); None where there is none."""
        own = self.path.resolve()
        return next((key for key, name in self.run_dirs().items() if own / name == run_dir), None)

    def _state(self) -> str:
        """The file's, or `lost` where its process is not there any more, or `elsewhere`, where nobody can say."""
        state = self._text("state")
        if state != "running":
            return state if state in ("finished", "stopped") else "unreadable"
        if self._study.get("host") != this_host():
            return "elsewhere"
        pid, started = _whole_or_none(self._study.get("pid")), number(self._study.get("pid_started_s"))
        return "running" if pid and started is not None and is_same_process(pid, started) else "lost"

    def _best(self) -> int | None:
        """The file's, where that trial is there; else by the values of those that finished."""
        told = _whole_or_none(self._study.get("best"))
        if told in self._trials and self._trials[told]["value"] is not None:
            return told
        done = [one for one in self._trials.values() if one["state"] == "finished" and one["value"] is not None]
        sign = -1 if self._direction() == "maximize" else 1
        return min(done, key=lambda one: (sign * one["value"], one["number"]))["number"] if done else None

    def _direction(self) -> str:
        found = self._study.get("direction")
        return found if isinstance(found, str) and found in DIRECTIONS else DIRECTIONS[0]

    def _text(self, name: str) -> str:
        found = self._study.get(name)
        return printable(found)[:MOST_TEXT] if isinstance(found, str) else ""


def _trials(found: object) -> Iterator[dict[str, Any]]:
    for one in found[:MOST_TRIALS] if isinstance(found, list) else ():
        if isinstance(one, dict) and (key := _whole_or_none(one.get("number"))) is not None:
            state, run_dir = one.get("state"), one.get("run_dir")
            yield {
                "number": key,
                "state": state if isinstance(state, str) and state in STATES else "waiting",
                "parameters": dict(_parameters(one.get("parameters"))),
                "value": number(one.get("value")),
                "step": _whole_or_none(one.get("step")) or 0,
                "last_step": _whole_or_none(one.get("last_step")),
                "replicas": _whole_or_none(one.get("replicas")) or 0,
                "run_dir": run_dir if isinstance(run_dir, str) and _is_below(run_dir) else "",
                "why": printable(str(one.get("why") or ""))[:MOST_TEXT],
            }


def _parameters(found: object) -> Iterator[tuple[str, Any]]:
    for name, value in list(found.items())[:MOST_PARAMETERS] if isinstance(found, dict) else ():
        if isinstance(value, bool) or value is None:
            yield name_text(name), value
        elif isinstance(value, int | float):
            yield name_text(name), number(value)
        else:
            yield name_text(name), printable(str(value))[:MOST_TEXT]


def _is_below(path: str) -> bool:
    """Whether a path leads to a place below the folder it starts from."""
    return bool(path) and not path.startswith("/") and ".." not in path.split("/") and "\0" not in path


def _log_parameters(study: Mapping[str, Any]) -> list[str] | None:
    """Parameters that are sampled by their logarithms; None where the file does not say."""
    found = study.get("log")
    return [name_text(name) for name in found if isinstance(name, str)] if isinstance(found, list) else None


def _best_so_far(trials: Iterator[dict[str, Any]] | Any, direction: str) -> Iterator[float]:
    """The best value of the finished trials up to each one, by number."""
    better, best = max if direction == "maximize" else min, None
    for trial in sorted(trials, key=lambda one: one["number"]):
        if trial["state"] == "finished" and trial["value"] is not None:
            best = trial["value"] if best is None else better(best, trial["value"])
            yield best


def _thinned(values: Sequence[float], most: int) -> list[float]:
    if len(values) <= most:
        return list(values)
    return [values[round(place * (len(values) - 1) / (most - 1))] for place in range(most)]


def _whole_or_none(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= MOST_NUMBER else None
