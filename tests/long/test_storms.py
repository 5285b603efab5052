"""Random faults in runs under all kinds of plan: nothing that is promised is broken."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

STORMS = Path(__file__).parents[2] / "benchmarks" / "storms.py"
FAULTS, SEED = 100, 5000


@pytest.mark.timeout(3600)
def test_storms_break_no_promise(tmp_path: Path) -> None:
    words = [sys.executable, str(STORMS), "--faults", str(FAULTS), "--seed", str(SEED), "--folder", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
