"""The system's clock is set forward and back during a run, and between two starts: nothing waits or expires by it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import warm
from elastic_runs import LIMIT_S, assert_unharmed, finish, reached, start
from paceline.monitor.audit.audit import audit

# Python's own view of the system's clock, in all processes of a run.
JUMPING = """
import os, time

own, own_of = time.time, time.clock_gettime

def offset():
    with open(os.environ["CLOCK_OFFSET"]) as file:
        return float(file.read() or 0)

time.time = lambda: own() + offset()
time.time_ns = lambda: int(time.time() * 1e9)
time.clock_gettime = lambda clock: own_of(clock) + offset() * (clock == time.CLOCK_REALTIME)
"""
DAY_S = 86_400

pytestmark = pytest.mark.timeout(2 * LIMIT_S)


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is written here, in seconds, is added to the clock of all programs at once; monotonic clocks go on."""
    (tmp_path / "clock").write_text("0")
    (tmp_path / "own" / "sitecustomize.py").parent.mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text(JUMPING)
    paths = [str(tmp_path / "own"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("CLOCK_OFFSET", str(tmp_path / "clock"))
    monkeypatch.setattr(warm, "start", _cold)  # the others are forks of a process that knows nothing of this clock
    return tmp_path / "clock"


def _cold(words: Sequence[str], *, env: Mapping[str, str], cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(words, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.further
def test_a_clock_that_jumps_costs_no_step_and_no_worker_and_the_next_start_finds_the_newest_checkpoint(
    clock: Path, tmp_path: Path
) -> None:
    lost = {"worker": 2, "step": 7, "where": "sum"}
    fields = {"silence_s": 5.0, "max_steps": 9}
    process = start(tmp_path / "a", lost, job=fields, pause_s=0.2)
    for step, jump in ((2, 3), (4, -20), (6, 400)):
        reached(tmp_path / "a" / "run", step, process)
        clock.write_text(str(jump * DAY_S))
    first = finish(tmp_path / "a", process)
    assert first.code == 0, first.output
    assert len(first.events("WorkerLost")) == 1, "the one that was killed, and nobody for being silent"
    started = json.loads((first.run_dir / "attempt_1/worker_0/events.jsonl").read_text().splitlines()[0])["time"]
    assert abs(started - time.time()) < LIMIT_S
    times = [row["time"] for row in first.metrics()]
    assert times == sorted(times) and times[-1] - times[0] < LIMIT_S
    clock.write_text(str(-30 * DAY_S))
    run = finish(tmp_path / "a", start(tmp_path / "a", lost, job=fields | {"max_steps": 12}))
    assert "step 9" in run.output
    assert_unharmed(run)
    assert audit(run.run_dir).is_clean
    assert run.metrics()[-1]["time"] == pytest.approx(time.time() - 30 * DAY_S, abs=LIMIT_S), "the clock was set back"
    saved = json.loads((run.run_dir / "summary.json").read_text())
    assert saved["step"] == 12
