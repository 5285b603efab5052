"""A program that joins by itself, without `paceline run`: how it ends is how its run ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import quick

PROGRAM = """
import contextlib
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

from paceline.runs.open_worker import open_worker

if __name__ == "__main__":
    worker = open_worker(run_dir="run", tensorboard=False)
    with contextlib.suppress(SystemExit):
        sys.exit(2)  # which the program itself stands
    for _ in range(2):
        assert sum(1 for _ in DataLoader(TensorDataset(torch.arange(8)), num_workers=1)) == 8
    print("after the loaders")
    how = sys.argv[1]
    if how == "raises":
        raise ValueError("broken")
    if how == "exits":
        exit(3)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "state", "code"), [("returns", "finished", 0), ("raises", "failed", 1), ("exits", "failed", 3)]
)
def test_a_lone_programs_end_is_that_of_its_run_and_its_loaders_end_nothing(
    tmp_path: Path, how: str, state: str, code: int
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    words = [sys.executable, "program.py", how]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["state"] == state, done.stderr
    assert done.stdout.count("after the loaders") == 1
    events = (tmp_path / "run" / "attempt_1" / "worker_0" / "events.jsonl").read_text()
    assert events.count('"WorkerFinished"') == (state == "finished"), "once, by the program, not by its loaders"
    assert ("broken" in done.stderr) == (how == "raises")


RAISES = """
import sys

from paceline.runs.open_worker import open_worker


def main():
    open_worker(run_dir="run", tensorboard=False)
    return int(sys.argv[1])


if __name__ == "__main__":
    code = main()
    raise SystemExit(code)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(("code", "state"), [quick.further(0, "finished"), (3, "failed")])
def test_a_lone_program_that_raises_its_exit_status_has_failed_unless_it_is_0(
    tmp_path: Path, code: int, state: str
) -> None:
    (tmp_path / "program.py").write_text(RAISES)
    words = [sys.executable, "program.py", str(code)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["state"] == state, done.stderr


@pytest.mark.further
@pytest.mark.xfail(strict=True, reason="Python looks the name SystemExit up before main() opens the worker")
def test_a_status_that_main_returns_into_the_raised_exit_counts(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        RAISES.replace("code = main()", "").replace("SystemExit(code)", "SystemExit(main())")
    )
    words = [sys.executable, "program.py", "3"]
    subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["state"] == "failed"
