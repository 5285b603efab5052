"""Seconds of an epoch of the same Keras program under `model.fit` and under Paceline, in turn.

Each round runs the program with Keras' own `fit` in one process, with Paceline on one worker, and on two. The figures
are medians over the rounds, of epochs after the first. It needs Keras 3 (`pip install -e .[compat]`).

python benchmarks/compat_keras.py [--rounds 5] [--epochs 3] [--samples 3000] [--width 256]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from driving.options import options_of

PROGRAM = """\
import json
import sys
import time

import keras
import numpy as np

samples, width, epochs, batch, out, how = *map(int, sys.argv[1:5]), *sys.argv[5:7]
rng = np.random.default_rng(0)
x = rng.normal(size=(samples, 16, 16, 1)).astype("float32")
y = rng.integers(0, 10, size=samples)
layers = keras.layers
model = keras.Sequential(
    [
        keras.Input((16, 16, 1)),
        layers.Conv2D(32, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(64, 3, activation="relu"),
        layers.Flatten(),
        layers.Dense(width, activation="relu"),
        layers.Dense(10, activation="softmax"),
    ]
)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])


class Clock(keras.callbacks.Callback):
    seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        self.began = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds.append(time.perf_counter() - self.began)


clock, given = Clock(), {"batch_size": batch, "epochs": epochs, "verbose": 0}
if how == "keras":
    model.fit(x, y, callbacks=[clock], **given)
else:
    from paceline.compat.keras import fit
    from paceline.runs.open_worker import open_worker

    fit(model, x, y, callbacks=[clock], **given)
if how == "keras" or open_worker().is_first:
    with open(out, "w") as file:
        json.dump(clock.seconds[1:], file)
"""


def seconds_of(words: list[str], folder: Path, options: argparse.Namespace, how: str) -> float:
    """Run the program once; returns the median seconds of an epoch."""
    out = folder / "seconds.json"
    sizes = [str(one) for one in (options.samples, options.width, options.epochs, options.batch)]
    env = {**os.environ, "KERAS_BACKEND": "torch"}
    done = subprocess.run([*words, *sizes, str(out), how], cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
    return statistics.median(json.loads(out.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=3000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=128)
    options = options_of(parser, takes="about 8 minutes", quick={"rounds": 1, "epochs": 2, "samples": 512, "width": 64})
    cores = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "program.py").write_text(PROGRAM)
        found: dict[str, list[float]] = {}
        for number in range(options.rounds):
            for name, workers, micro in (
                ("Keras' own fit", 0, 0),
                ("Paceline, 1 worker, one micro-batch", 1, options.batch),
                ("Paceline, 1 worker, 8 micro-batches", 1, -(-options.batch // 8)),
                ("Paceline, 2 workers, 2 micro-batches", 2, -(-options.batch // 2)),
            ):
                words = [sys.executable, "program.py"]
                if workers:
                    plan = f"batch(size={options.batch},micro={micro})"
                    words = [sys.executable, "-m", "paceline", "run", "program.py", "--workers", str(workers)]
                    words += ["--plan", plan, "--run-dir", f"run_{number}_{len(found)}_{workers}_{micro}", "--"]
                found.setdefault(name, []).append(
                    seconds_of(words, folder, options, "paceline" if workers else "keras")
                )
    own = statistics.median(found["Keras' own fit"])
    print(f"{cores} cores; batches of {options.batch} of {options.samples} samples\n")
    print("| way | seconds an epoch | of Keras' own |\n|---|---|---|")
    for name, seconds in found.items():
        print(f"| {name} | {statistics.median(seconds):.2f} | {statistics.median(seconds) / own:.2f} |")


if __name__ == "__main__":
    main()
