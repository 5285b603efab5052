"""TensorFlow's own guide to parameter servers as a program: started by hand, a process for each task with its
TF_CONFIG, and by Paceline."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from guide_programs import parameter_server_training
from network_hosts import free_port
from programs import PACELINE, run

LIMIT_S = 900.0
TASKS = {"chief": 1, "worker": 2, "ps": 2}

pytestmark = pytest.mark.timeout(2 * LIMIT_S)


@pytest.fixture(autouse=True)
def _guides_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guides' code is for Keras 2."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")


def by_paceline(program: Path, *options: str) -> str:
    words = [*PACELINE, "run", "--for", "tensorflow", program.name, "--run-dir", "run", *options]
    code, output = run(*words, cwd=program.parent, cold=True, limit_s=LIMIT_S)
    assert code == 0, output
    return (program.parent / "run/attempt_1/worker_0/stdout.log").read_text()


def by_hand(program: Path) -> str:
    """Start each task as the guide says; what the chief has printed. Workers and servers serve until they are ended."""
    cluster = {kind: [f"127.0.0.1:{free_port()}" for _ in range(num)] for kind, num in TASKS.items()}
    tasks = {(kind, index): _task(program, cluster, kind, index) for kind, num in TASKS.items() for index in range(num)}
    try:
        assert tasks["chief", 0].wait(LIMIT_S) == 0, (program.parent / "chief_0.log").read_text()
    finally:
        for task in tasks.values():
            task.kill()
            task.wait()
    return (program.parent / "chief_0.log").read_text()


def _task(program: Path, cluster: Mapping[str, Any], kind: str, index: int) -> subprocess.Popen[bytes]:
    config = json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})
    with (program.parent / f"{kind}_{index}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, program.name],
            cwd=program.parent,
            env={**os.environ, "TF_CONFIG": config, "TF_NUM_INTRAOP_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def written(folder: Path, name: str, code: str) -> Path:
    folder.mkdir()
    (folder / name).write_text(code)
    return folder / name


def test_parameter_servers_train_as_by_hand_and_their_numbers_are_shown(tmp_path: Path) -> None:
    """The steps are asynchronous, so no two runs are alike."""
    code = parameter_server_training()
    began = time.monotonic()
    hand = by_hand(written(tmp_path / "hand", "parameter_server.py", code))
    middle = time.monotonic()
    program = written(tmp_path / "paceline", "parameter_server.py", code)
    ours = by_paceline(program, "--workers", "2", "--servers", "2", "--threads", "1")
    print(f"by hand {middle - began:.1f} s, by Paceline {time.monotonic() - middle:.1f} s")
    fits = [[float(loss) for loss in re.findall(r"20/20 .* loss: (\S+)", text)] for text in (hand, ours)]
    finals = [float(re.search(r"Final loss is (\S+)", text)[1]) for text in (hand, ours)]  # type: ignore[index]
    print(fits, finals)
    assert [len(fit) for fit in fits] == [5, 5]
    assert fits[1] == pytest.approx(fits[0], rel=0.5)
    assert all("Finished epoch 3, accuracy is" in text and "Evaluation accuracy: 1.0" in text for text in (hand, ours))
    rows = [json.loads(line) for line in (program.parent / "run/metrics.jsonl").read_text().splitlines()]
    shown = {row["step"]: row["loss"] for row in rows if "loss" in row}
    assert shown == pytest.approx(dict(enumerate(fits[1], start=1)), abs=1e-3), "the TensorBoard callback's numbers"
    status, output = run(*PACELINE, "status", "run", cwd=program.parent)
    assert status == 0 and re.search(r"step 5  epoch 5  loss \S+ \(by the program's event files\)", output), output
