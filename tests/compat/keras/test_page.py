"""The page for Keras' users does what it shows, and `fit` in a training function takes the function's worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from keras_runs import HERE, LIMIT_S, environment
from markdown_pages import blocks

PAGE = HERE.parents[2] / "docs" / "how-to" / "bring-your-keras-program.md"

IN_A_FUNCTION = """\
import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np

import paceline
from paceline.compat.keras import fit


def train(worker):
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    history = fit(model, x, x[:, :1], epochs=2, verbose=0)
    return [worker.workers, worker.step, len(history.history["loss"])]


if __name__ == "__main__":
    print("value", paceline.run(train, workers=2, threads=1))
"""


def run(words: list[str], folder: Path) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    env = {**environment(), "PATH": path}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=LIMIT_S, cwd=folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_every_block_of_the_page_runs(tmp_path: Path) -> None:
    for name, words in (("paceline", "-m paceline"), ("python", "")):
        (tmp_path / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (tmp_path / name).chmod(0o755)
    shown: list[str] = []
    for block in blocks(PAGE):
        if block.file_name:
            (tmp_path / block.file_name).write_text(block.text)
            shown.append(block.file_name)
        elif block.language == "bash":
            run(["bash", "-euo", "pipefail", "-c", f'PATH="$PWD:$PATH"\n{block.text}'], tmp_path)
    assert shown == ["fit.py", "loop.py"]


def test_fit_in_a_training_function_takes_its_worker(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(IN_A_FUNCTION)
    assert "value [2, 4, 2]" in run([sys.executable, "train.py"], tmp_path)
