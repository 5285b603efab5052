"""docs/reference/optimizers.md: every optimizer of torch.optim and pytorch_optimizer is tried anew, and compared."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(1200)
def test_the_table_of_optimizers_is_what_a_trial_shows() -> None:
    made = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "optimizers.py"], capture_output=True, text=True, check=True
    )
    page = (ROOT / "docs" / "reference" / "optimizers.md").read_text(encoding="utf-8")
    told = page[page.index("| optimizer |") :].splitlines()
    assert len(told) > 130 and made.stdout.splitlines() == told
