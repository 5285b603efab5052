"""Records, waits and ages do not depend on the clock of the system, which people and daemons set."""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline import clock
from paceline.runs import restart_loop

ROOT = Path(__file__).parents[3] / "src" / "paceline"
DAY_S = 86_400.0
# When this machine began, beside the time of day; the day on a page; the name of a file.
MAY_READ = {"clock.py", "worker/external_launch.py", "monitor/report/html_page.py", "monitor/export/tensorboard.py"}
READS = re.compile(r"\btime\.time(_ns)?\(|datetime\.now\(|\.utcnow\(|\bdate\.today\(")


@pytest.mark.parametrize("jump_s", [-DAY_S, -3600.0, 3600.0, DAY_S])
def test_times_of_records_do_not_jump_with_the_clock(monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    before, of_day = clock.now(), time.time()
    monkeypatch.setattr(time, "time", lambda: of_day + jump_s)
    assert 0.0 <= clock.now() - before < 3600.0


def test_no_module_reads_the_clock_of_the_system_by_itself() -> None:
    reads = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if READS.search(path.read_text())}
    assert reads == MAY_READ


@pytest.mark.parametrize("is_fresh", [False, True])
def test_what_a_run_has_saved_is_its_own_whatever_the_time_of_its_files(tmp_path: Path, is_fresh: bool) -> None:
    def save(step: int) -> Path:
        path = tmp_path / "checkpoints" / f"step_{step:08d}"
        path.mkdir(parents=True)
        (path / "checkpoint.json").write_text("{}")
        return path

    old = save(9)
    attempt = cast("Any", SimpleNamespace(run_dir=tmp_path, job=SimpleNamespace(fresh=is_fresh)))
    before = restart_loop._marks(tmp_path)

    def found(newest: Path, step: int) -> int | None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(restart_loop, "find", lambda _: SimpleNamespace(newest=newest, step=step))
            return restart_loop._on_disk(attempt, before=before)

    assert found(old, 9) == (None if is_fresh else 9)
    assert found(save(4), 4) == 4, "its time may be before the run's start: the clock was set back"
