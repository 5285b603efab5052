"""`fit` under torchrun; first weights and samples that a program draws by itself."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from keras_runs import LIMIT_S, compare, environment

PROGRAM = """\
import os
import sys

import keras
import numpy as np

keras.utils.set_random_seed(os.getpid() if "unseeded" in sys.argv else 7)
x = np.random.normal(size=(72, 6)).astype("float32")


class Regression(keras.Model):  # which is built, and draws its weights, within fit
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs)


model = Regression()
model.compile("sgd", "mse")
given = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
if "own" in sys.argv:
    history = model.fit(x, x[:, :1], **given)
else:
    from paceline.compat.keras import fit

    history = fit(model, x, x[:, :1], **given)
sys.stdout.write(f"history {history.history}\\n")  # at once: two processes write
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(PROGRAM)
    return subprocess.run(
        [sys.executable, *words], env=environment(), capture_output=True, text=True, timeout=LIMIT_S, cwd=folder
    )


def histories(done: subprocess.CompletedProcess[str]) -> list[Any]:
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [ast.literal_eval(found) for found in re.findall(r"history ({.*?})", done.stdout)]


@pytest.mark.parametrize(
    ("start", "num_prints"), [(TORCHRUN, 2), (("-m", "paceline", "run", "--workers", "2"), 1)], ids=("torchrun", "run")
)
def test_a_model_that_fit_builds_has_the_weights_that_the_program_s_seed_draws(
    start: tuple[str, ...], num_prints: int, tmp_path: Path
) -> None:
    (own,) = histories(run(tmp_path, "program.py", "own"))
    found = histories(run(tmp_path, *start, "program.py"))
    assert len(found) == num_prints
    for one in found:
        compare(one, own)


ELASTIC = ("-m", "paceline", "run", "--workers", "2", "--plan", "replicas=1-2")


@pytest.mark.parametrize(
    ("start", "said"),
    [(TORCHRUN, "on worker 1 than on worker 0"), (ELASTIC, "on worker [01] than on the first worker")],
    ids=("fixed", "elastic"),
)
def test_samples_that_workers_draw_differently_are_refused(start: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = run(tmp_path, *start, "program.py", "unseeded")
    assert re.search(f"fit\\(\\) got other samples {said}", done.stdout + done.stderr), done.stdout + done.stderr
