"""A command whose standard streams are closed, or cannot be written, works all the same, or says so in one sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from paceline.monitor.records.run_record import RunRecord

SCRIPT = """
import paceline

def train(worker):
    print("here")
    worker.report(x=1.0)

paceline.run(train, workers=1, plan="replicas=1")
"""


def test_a_run_with_closed_streams_ends_as_any_other(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    started = subprocess.run(
        ["/bin/sh", "-c", f"{sys.executable} train.py <&- >&- 2>&-"], cwd=tmp_path, check=False, timeout=120
    )
    (run,) = (tmp_path / "runs").iterdir()
    assert started.returncode == RunRecord.load(run).exit_code
    assert (run / "attempt_1" / "worker_0" / "stdout.log").read_text() == "here\n"
    shown = subprocess.run(
        ["/bin/sh", "-c", f"{sys.executable} -m paceline status {run} >/dev/full"],
        cwd=tmp_path, check=False, timeout=120, capture_output=True, text=True,
    )  # fmt: skip
    assert shown.returncode == 1
    assert (
        shown.stderr == "paceline: the output cannot be written: No space left on device. Free space where it goes.\n"
    )
