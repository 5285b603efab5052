"""What `fit` refuses: each case's message, as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from paceline.compat.keras import fit, torch_optimizer

x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
y = (x[:, 0] > 0).astype("int32")
tensors = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))


def net(kind: Any = keras.Sequential, **settings: Any) -> Any:
    model = kind([keras.Input((4,)), keras.layers.Dense(2, activation="softmax")])
    model.compile(**{"optimizer": "adam", "loss": "sparse_categorical_crossentropy", **settings})
    return model


class OwnStep(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        return {}


class Running(keras.metrics.Metric):
    """A running mean, which does not add up."""

    def __init__(self) -> None:
        super().__init__(name="running")
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(0.9 * self.value + 0.1 * keras.ops.mean(y_pred[:, 0]))

    def result(self) -> Any:
        return self.value


def generator() -> Any:
    yield x, y


def half() -> Any:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return net()
    finally:
        keras.config.set_dtype_policy("float32")


def distributed() -> Any:
    mesh = keras.distribution.DeviceMesh((1,), ["batch"], ["cpu:0"])
    keras.distribution.set_distribution(keras.distribution.DataParallel(device_mesh=mesh))
    try:
        fit(net(), x, y)
    finally:
        keras.distribution.set_distribution(None)


def fit_twice() -> Any:
    model = net()
    fit(model, x, y, verbose=0)
    model.fit(x, y, verbose=0)


sampler = WeightedRandomSampler([1.0] * 16, 16)
CASES: dict[str, Callable[[], Any]] = {
    "generator": lambda: fit(net(), generator()),
    "sampler": lambda: fit(net(), DataLoader(tensors, batch_size=4, sampler=sampler)),
    "text": lambda: fit(net(), np.array(["a", "b"]), y[:2]),
    "rows": lambda: fit(net(), x, y[:3]),
    "both weights": lambda: fit(net(), x, y, class_weight={0: 2.0}, sample_weight=np.ones(16)),
    "targets beside a dataset": lambda: fit(net(), tensors, y),
    "split of a dataset": lambda: fit(net(), tensors, validation_split=0.5),
    "own step": lambda: fit(net(OwnStep), x, y),
    "metric": lambda: fit(net(metrics=[Running()]), x, y),
    "compiled": lambda: fit(net(jit_compile=True), x, y),
    "not compiled": lambda: fit(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]), x, y),
    "half precision": lambda: fit(half(), x, y),
    "no reduction": lambda: fit(net(loss=keras.losses.SparseCategoricalCrossentropy(reduction=None)), x, y),
    "backup": lambda: fit(net(), x, y, callbacks=[keras.callbacks.BackupAndRestore("backup")]),
    "distribution": distributed,
    "own fit afterwards": fit_twice,
    "optimizer of another model": lambda: torch_optimizer(keras.optimizers.Adam(), net()),
}


def main(out: str) -> None:
    found: dict[str, str] = {}
    for name, call in CASES.items():
        try:
            call()
        except Exception as error:  # its text is what is looked at
            found[name] = f"{type(error).__name__}: {error}"
    fit(net(), x, y, verbose=0)  # after all of that a model can be fitted
    with open(out, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1])
