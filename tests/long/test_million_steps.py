"""The records of a million steps on 32 workers stay small, and are read in seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "long_runs.py"


@pytest.mark.timeout(3600)
def test_the_records_of_a_million_steps_are_small_and_soon_read(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), "--json", "--folder", str(tmp_path)]
    made = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert made["bytes_of_ten_million"] < 2e9
    limits = {"status": 1.0, "audit": 20.0, "report": 20.0}
    for name, most_s in limits.items():
        _, cpu_s, peak_kb, exit_status = made["commands"][name]
        assert exit_status == 0
        assert cpu_s <= most_s  # of the processor: others may be busy, too
        assert peak_kb < 500_000
