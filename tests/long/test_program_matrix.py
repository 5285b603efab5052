"""docs/reference/programs-and-plans.md: every program is tried anew under every plan, and compared with the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "programs-and-plans.md"


def counts(text: str) -> Counter[str]:
    found = re.search(r"^In all: (.+)\.$", text, re.MULTILINE)
    assert found is not None, text[-2000:]
    pairs = [one.split() for one in found[1].split(", ")]
    return Counter({state: int(count) for count, state in pairs})


@pytest.mark.timeout(5400)
def test_every_program_is_as_in_one_process_or_refused_by_name_under_every_plan(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "program_matrix.py"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    now, told = counts(made.stdout), counts(PAGE.read_text(encoding="utf-8"))
    assert not {"WRONG", "CRASH", "HANG"} & now.keys(), made.stdout[-6000:]
    assert now["same"] >= told["same"] > 200, made.stdout[-6000:]
