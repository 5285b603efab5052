"""What a submitted run says of itself, where its directory is on a disk that the submitting machine sees."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline import environment
from paceline.errors import LaunchError
from paceline.launch.engines.engine import Engine, EngineState
from paceline.launch.engines.engine_record import EngineRecord
from paceline.plain_data import read_object
from paceline.regular_files import read_regular

__all__ = ["coordinators_host", "ended", "hosts_at_work", "is_readable", "paceline_words", "workers_at_work"]

MOST_BYTES = 8 << 20
CLOCKS_DIFFER_S = 60.0  # between two machines, at most


def ended(record: EngineRecord, name: str, *, otherwise: Callable[[], tuple[int | None, str]]) -> EngineState:
    """The state of a job that the engine has nothing of any more: as the run says, or `otherwise()` the engine."""
    run = _run(record.run_dir)
    if run is not None and float(run.get("started", 0.0)) >= record.submitted - CLOCKS_DIFFER_S:
        code, word = run.get("exit_code"), str(run.get("state"))
        if isinstance(code, int) and word != "running":
            return EngineState(
                phase="ended", says=f"{name} has ended: the run is {word} (exit status {code})", exit_code=code
            )
    code, word = otherwise()
    return EngineState(
        phase="ended", says=f"{name} is {word}" + ("" if code is None else f" (exit status {code})"), exit_code=code
    )


def coordinators_host(run_dir: Path) -> str | None:
    """The name of the host that leads the run, by its record; None where there is none."""
    run = _run(run_dir)
    return None if run is None else str(run.get("host", "")) or None


def hosts_at_work(engine: Engine, record: EngineRecord) -> frozenset[str]:
    """The names of the hosts that have workers, and of the coordinator's. Raises LaunchError where nobody can tell."""
    coordinator, hosts = _at_work(engine, record)
    return frozenset([coordinator, *hosts])


def workers_at_work(engine: Engine, record: EngineRecord) -> int:
    """How many workers the run has now. Raises LaunchError where nobody can tell."""
    return len(_at_work(engine, record)[1])


def _at_work(engine: Engine, record: EngineRecord) -> tuple[str, list[str]]:
    """The coordinator's host, and that of each worker."""
    answer = engine.at_head(record, paceline_words(record, "status", record.run_dir_there, "--json"))
    try:
        status: Mapping[str, Any] = json.loads(answer.output)
        live = [one for one in status["workers"] if one["state"] in ("starting", "running", "halted")]
        return str(status["host"]), [str(one["host"]) for one in live]
    except (ValueError, KeyError, TypeError):
        raise LaunchError(f"The run does not tell its workers: {answer.errors.strip() or 'no answer'}") from None


def paceline_words(record: EngineRecord, *words: str) -> list[str]:
    """The words of a paceline command on the run's hosts, which asks no engine there."""
    return ["env", f"{environment.ENGINE}=none", *environment.path_words()[1:], record.python, "-m", "paceline", *words]


def _run(run_dir: Path) -> dict[str, Any] | None:
    try:
        return read_object(read_regular(Path(run_dir) / "run.json", MOST_BYTES))
    except (OSError, ValueError):
        return None


def is_readable(run_dir: Path) -> bool:
    """Whether the run's record is on a disk that this machine sees."""
    return _run(run_dir) is not None
