"""A fit whose worker of one rank kills itself once at a batch: `python resumed.py RANK|never NOTE OUT`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np

from paceline.compat.keras import fit
from paceline.runs.open_worker import open_worker

victim = sys.argv[1]
note, out = map(Path, sys.argv[2:])
layers = keras.layers
rng = np.random.default_rng(0)
x = rng.normal(size=(100, 6)).astype("float32")
y = x[:, :3].argmax(1)


class Kill(keras.callbacks.Callback):
    num_batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.num_batches += 1
        if self.num_batches == 10 and str(open_worker().rank) == victim and not note.exists():
            note.touch()
            os.kill(os.getpid(), signal.SIGKILL)


keras.utils.set_random_seed(5)
model = keras.Sequential(
    [
        keras.Input((6,)),
        layers.Dense(12, activation="tanh"),
        layers.BatchNormalization(),
        layers.Dropout(0.2),
        layers.Dense(3, activation="softmax"),
    ]
)
model.compile(keras.optimizers.Nadam(0.02), "sparse_categorical_crossentropy", metrics=["accuracy"])
history = fit(
    model,
    x,
    y,
    batch_size=16,
    epochs=4,
    verbose=0,
    validation_split=0.2,
    callbacks=[
        keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, factor=0.5, min_delta=0.5, min_lr=1e-4),
        keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True),
        keras.callbacks.CSVLogger(out.with_suffix(".csv")),
        Kill(),
    ],
)
if open_worker().is_first:
    weights = [float(abs(one).sum()) for one in model.get_weights()]
    out.write_text(json.dumps({**history.history, "weights": weights, "step": [open_worker().step]}))
