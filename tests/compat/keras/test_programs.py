"""Programs written for Keras alone, with the lines changed that a user changes: their losses are those of Keras."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from keras_runs import HERE, LIMIT_S, compare, environment

PROGRAMS = HERE / "programs"
NAMES = sorted(path.stem for path in PROGRAMS.glob("*.py"))
IMPORT = "from paceline.compat.keras import evaluate, fit\n"
RANDOM = ("digits_convnet", "text_transformer")  # dropout: micro-batches draw masks of their own


def changed(text: str) -> str:
    """The program as its user changes it: one import, and the calls of `fit` and `evaluate`."""
    found = text.replace("\nimport keras\n", f"\nimport keras\n{IMPORT}", 1)
    found = found.replace("model.fit(", "fit(model, ").replace("model.evaluate(", "evaluate(model, ")
    assert found.count("model, ") >= 2
    return found


def run(words: list[str], folder: Path) -> tuple[dict[str, Any], list[float]]:
    """What a program prints of its history, and of its test."""
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, cwd=folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("history ", "test ")))
    return ast.literal_eval(lines["history"]), ast.literal_eval(lines["test"])


@pytest.mark.parametrize("name", NAMES)
def test_program_has_the_losses_of_keras(name: str, tmp_path: Path) -> None:
    text = (PROGRAMS / f"{name}.py").read_text().replace("verbose=2", "verbose=0, shuffle=False")
    (tmp_path / "own.py").write_text(text)
    (tmp_path / "ours.py").write_text(changed(text))
    own, own_test = run([sys.executable, "own.py"], tmp_path)
    paceline = [sys.executable, "-m", "paceline", "run", "ours.py", "--threads", "1"]
    found: list[Any] = []
    for workers, plan in ((2, "replicas=2"), (2, "shard=2")):
        found.append(run([*paceline, "--workers", str(workers), "--plan", plan], tmp_path))
    for history, test in found:
        compare(history, found[0][0])
        compare({"test": test}, {"test": found[0][1]})
    if name in RANDOM:
        assert found[0][0]["loss"][-1] == pytest.approx(own["loss"][-1], rel=0.2)
    else:
        compare(found[0][0], own)
        compare({"test": found[0][1]}, {"test": own_test})
