"""Horovod's own tests for torch, unmodified, against this package.

They are not kept here. `HOROVOD_SOURCE` names a checkout of Horovod's repository; without it nothing is run.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from programs import run

SOURCE = os.environ.get("HOROVOD_SOURCE", "")
PROGRAM = """
import sys, types
import unittest.mock
import pytest

sys.modules.setdefault("mock", unittest.mock)  # what their helpers import is in the standard library
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-rf", *sys.argv[1:]]))
"""
# torch has optimizers since then that their models do not fit: Muon takes matrices only.
NOT_OF_THEIR_TIME = {"test_broadcast_state", "test_broadcast_state_options", "test_force_allreduce"}
# On three workers these compare a float16 sum with a product that is not rounded to float16: no sum can pass.
NOT_ROUNDED = {
    "test_horovod_allreduce_prescale",
    "test_horovod_grouped_reducescatter_prescale",
    "test_horovod_reducescatter_prescale",
}

pytestmark = pytest.mark.skipif(not SOURCE, reason="HOROVOD_SOURCE names no checkout of Horovod's repository")


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", ["test_torch.py", "test_adasum_pytorch.py"])
def test_horovods_own_tests_pass(tmp_path: Path, name: str, workers: int) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    left_out = NOT_ROUNDED if workers == 3 and name == "test_torch.py" else set[str]()
    options = ["-k", f"not ({' or '.join(sorted(left_out))})"] if left_out else []
    _, output = run(
        *(sys.executable, "-m", "paceline", "run", "--as", "horovod", tmp_path / "program.py"),
        *("--workers", str(workers), "--run-dir", tmp_path / "run", "--show", "all"),
        *("--", Path(SOURCE) / "test" / "parallel" / name, *options),
        limit_s=1500.0,
    )
    failed = set(re.findall(r"FAILED \S*::(\w+)", output))
    ends = re.findall(r"(\d+) passed", output)
    assert failed <= NOT_OF_THEIR_TIME, output
    assert len(ends) == workers or name == "test_adasum_pytorch.py", output  # those need GPUs: all are skipped
