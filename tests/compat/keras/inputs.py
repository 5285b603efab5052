"""One model, fitted on its data in each of the forms that `fit` takes, saved, evaluated and asked to predict."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from paceline.compat.keras import evaluate, fit, predict
from paceline.runs.open_worker import open_worker

rng = np.random.default_rng(0)
x = rng.normal(size=(100, 6)).astype("float32")
y = x[:, :3].argmax(1)


def net(**settings: Any) -> Any:
    keras.utils.set_random_seed(5)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(12, activation="tanh", kernel_regularizer="l2"),
            layers.Dropout(0.2),
            layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.05, clipnorm=0.3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> Any:
        return x[number * 32 : (number + 1) * 32], y[number * 32 : (number + 1) * 32]


class Whim(keras.callbacks.Callback):
    """Decides by something that differs between processes."""

    def __init__(self, wants_stop: bool) -> None:
        super().__init__()
        self.wants_stop = wants_stop

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = self.wants_stop


def numbers(values: Any) -> dict[str, list[float]]:
    return {"numbers": [float(one) for one in np.ravel(values)]}


def main(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = net()
    callbacks = [
        keras.callbacks.ModelCheckpoint(f"{folder}/each.weights.h5", save_weights_only=True),
        keras.callbacks.ModelCheckpoint(f"{folder}/best.keras", save_best_only=True),
        keras.callbacks.EarlyStopping(patience=1, restore_best_weights=True, min_delta=0.05),
        keras.callbacks.ReduceLROnPlateau(patience=1, min_delta=0.3),
        keras.callbacks.CSVLogger(f"{folder}/log.csv"),
        keras.callbacks.TerminateOnNaN(),
    ]
    history = fit(model, x, y, batch_size=32, epochs=6, verbose=0, validation_split=0.2, callbacks=callbacks)
    found["arrays"] = history.history
    found["evaluated"] = numbers(evaluate(model, x, y, verbose=0, batch_size=40))
    outputs = predict(model, x[:50], verbose=0, batch_size=8)
    found["predicted"] = numbers(outputs)
    model.save(f"{folder}/last.keras")
    tensors = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    found["batches"] = fit(net(), Batches(), epochs=2, verbose=0, validation_data=Batches()).history
    loader = DataLoader(tensors, batch_size=32, shuffle=True)
    found["loader"] = fit(net(), loader, epochs=2, verbose=0, validation_data=loader).history
    model = net()
    found["in order"] = fit(model, tensors, epochs=2, verbose=0, shuffle=False, steps_per_epoch=3).history
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
    found["again"] = fit(model, x, y, epochs=4, initial_epoch=2, verbose=0, callbacks=[schedule]).history
    model.compile("sgd", "sparse_categorical_crossentropy")
    found["recompiled"] = fit(model, x, y, epochs=1, verbose=0).history
    model.layers[0].trainable = False
    model.compile("rmsprop", "sparse_categorical_crossentropy")
    found["frozen"] = fit(model, x, y, epochs=1, verbose=0).history
    is_first = open_worker().is_first
    found["whim"] = fit(net(), x, y, epochs=3, verbose=0, callbacks=[Whim(wants_stop=is_first)]).history
    if is_first:
        loaded = keras.models.load_model(f"{folder}/last.keras")
        found["loaded"] = numbers(np.abs(loaded.predict(x[:50], verbose=0) - outputs).max())
        found["slots"] = numbers([np.abs(one.numpy()).sum() for one in loaded.optimizer.variables])
    return found


if __name__ == "__main__":
    out = sys.argv[1]
    result = main(os.path.dirname(out))
    if open_worker().is_first:
        with open(out, "w") as file:
            json.dump(result, file)
