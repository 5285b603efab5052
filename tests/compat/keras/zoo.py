"""Keras models as their users write them, each with what it is fitted on: run by Paceline, or by Keras itself.

`python zoo.py NAMES OUT` fits them with `paceline.compat.keras.fit`, under whatever starts it. `--own` fits them with
`model.fit` on the same samples in the same order.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
from sklearn.datasets import load_digits

from paceline.plan import Batch
from paceline.schedule.sample_order import sample_indices
from paceline.worker.data.stream_position import stream_seed

layers = keras.layers
EPOCHS, BATCH = 2, 32


def digits(num: int = 150) -> tuple[np.ndarray, np.ndarray]:
    found = load_digits()
    return (found.images[:num] / 16.0).astype("float32"), found.target[:num]


def dense() -> dict[str, Any]:
    """Adam, metrics of several kinds, regularizers, validation, class weights."""
    x, y = digits()
    model = keras.Sequential(
        [
            keras.Input((8, 8)),
            layers.Flatten(),
            layers.Dense(24, activation="relu", kernel_regularizer=keras.regularizers.L2(1e-3)),
            layers.Dense(10, activation="softmax"),
        ]
    )
    top = keras.metrics.SparseTopKCategoricalAccuracy(k=3, name="top3")
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy", top], weighted_metrics=["accuracy"])
    weights = {number: 1.0 + number / 10 for number in range(10)}
    return {"model": model, "x": x[:120], "y": y[:120], "class_weight": weights, "validation": (x[120:], y[120:])}


def conv() -> dict[str, Any]:
    """A convolutional net with SGD, a schedule and clipping by the global norm."""
    x, y = digits()
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    rate = keras.optimizers.schedules.ExponentialDecay(0.2, decay_steps=2, decay_rate=0.8)
    optimizer = keras.optimizers.SGD(rate, momentum=0.9, nesterov=True, global_clipnorm=0.5)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return {"model": model, "x": x[..., None], "y": y}


def outputs() -> dict[str, Any]:
    """Two inputs by name and two outputs, with losses, weights of losses and metrics of their own; sample weights."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(90, 6)).astype("float32"), rng.normal(size=(90, 4)).astype("float32")
    left, right = keras.Input((6,), name="left"), keras.Input((4,), name="right")
    joined = layers.Dense(12, activation="tanh")(layers.Concatenate()([left, right]))
    price = layers.Dense(1, name="price")(joined)
    kind = layers.Dense(1, activation="sigmoid", name="kind")(joined)
    model = keras.Model([left, right], [price, kind])
    model.compile(
        keras.optimizers.RMSprop(1e-2),
        loss={"price": "mse", "kind": "binary_crossentropy"},
        loss_weights={"price": 0.3, "kind": 2.0},
        metrics={"price": ["mae"], "kind": ["accuracy", keras.metrics.AUC(name="auc")]},
    )
    y = [a[:, :1] - b[:, :1], (a[:, :1] > 0).astype("float32")]
    return {"model": model, "x": {"left": a, "right": b}, "y": y}


def weighted() -> dict[str, Any]:
    """Sample weights, AdamW with what is left out of its decay, and averages of weights at the end."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(70, 5)).astype("float64")
    y = x @ rng.normal(size=(5, 2))
    model = keras.Sequential([keras.Input((5,)), layers.Dense(8, activation="gelu"), layers.Dense(2)])
    optimizer = keras.optimizers.AdamW(3e-2, weight_decay=0.1, use_ema=True, ema_momentum=0.9, clipnorm=1.0)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    model.compile(optimizer, keras.losses.Huber(), weighted_metrics=["mae"])
    return {"model": model, "x": x, "y": y, "sample_weight": rng.uniform(0.2, 3.0, size=70)}


def masked() -> dict[str, Any]:
    """Padded sequences: an embedding that masks, an LSTM that gives a label for each token."""
    rng = np.random.default_rng(2)
    x = rng.integers(1, 20, size=(64, 7))
    for row, length in enumerate(rng.integers(2, 8, size=64)):
        x[row, length:] = 0
    y = (x % 3)[..., None]
    model = keras.Sequential(
        [
            keras.Input((7,), dtype="int32"),
            layers.Embedding(20, 8, mask_zero=True),
            layers.LSTM(8, return_sequences=True),
            layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Nadam(1e-2), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return {"model": model, "x": x, "y": y}


class Attention(layers.Layer):
    """A block of a transformer, as Keras' text classification example has it."""

    def __init__(self, width: int, heads: int, rate: float = 0.1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.att = layers.MultiHeadAttention(num_heads=heads, key_dim=width // heads)
        self.ffn = keras.Sequential([layers.Dense(2 * width, activation="relu"), layers.Dense(width)])
        self.norm1, self.norm2 = layers.LayerNormalization(epsilon=1e-6), layers.LayerNormalization(epsilon=1e-6)
        self.drop1, self.drop2 = layers.Dropout(rate), layers.Dropout(rate)

    def build(self, shape: Any) -> None:
        self.att.build(shape, shape)
        self.ffn.build(shape)
        for one in (self.norm1, self.norm2):
            one.build(shape)
        self.built = True

    def call(self, x: Any) -> Any:
        x = self.norm1(x + self.drop1(self.att(x, x)))
        return self.norm2(x + self.drop2(self.ffn(x)))


def transformer() -> dict[str, Any]:
    """Two blocks with dropout, on tokens."""
    rng = np.random.default_rng(3)
    x = rng.integers(0, 30, size=(64, 10))
    inputs = keras.Input((10,), dtype="int32")
    hidden = layers.Embedding(30, 16)(inputs)
    for number in range(2):
        hidden = Attention(16, 2, name=f"block_{number}")(hidden)
    outputs_ = layers.Dense(2, activation="softmax")(layers.Dropout(0.1)(layers.GlobalAveragePooling1D()(hidden)))
    model = keras.Model(inputs, outputs_)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return {"model": model, "x": x, "y": (x.sum(1) % 2), "is_random": True}


class Autoencoder(keras.Model):
    """A subclassed model with a loss of its own beside the compiled one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(6)])
        self.decoder = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(64)])

    def call(self, x: Any) -> Any:
        code = self.encoder(x)
        self.add_loss(1e-2 * keras.ops.mean(keras.ops.square(code)))
        return self.decoder(code)


def autoencoder() -> dict[str, Any]:
    x, _ = digits(96)
    model = Autoencoder()
    model.compile(keras.optimizers.Lion(1e-3), "mse", metrics=["mae"])
    x = x.reshape(-1, 64)
    return {"model": model, "x": x, "y": x}


def statistics() -> dict[str, Any]:
    """Batch normalization and dropout; the same micro-batches under every plan."""
    x, y = digits(96)
    model = keras.Sequential(
        [
            keras.Input((8, 8)),
            layers.Flatten(),
            layers.Dense(16),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.GaussianNoise(0.1),
            layers.Dropout(0.4),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adagrad(0.1), loss, metrics=["accuracy"])
    return {"model": model, "x": x, "y": y, "validation": (x[:40], y[:40]), "is_random": True}


ZOO = (dense, conv, outputs, weighted, masked, transformer, autoencoder, statistics)


class InOrder(keras.utils.PyDataset):
    """The batches of a call of `fit` in Paceline's order."""

    def __init__(self, arrays: Any, number: int) -> None:
        super().__init__()
        self.arrays, self.seed, self.epoch = arrays, stream_seed(Batch(size=BATCH), f"fit_{number}"), 0
        self.num = len(keras.tree.flatten(arrays)[0])

    def __len__(self) -> int:
        return -(-self.num // BATCH)

    def __getitem__(self, number: int) -> Any:
        positions = np.arange(number * BATCH, min((number + 1) * BATCH, self.num))
        rows = sample_indices(seed=self.seed, epoch=self.epoch, num_samples=self.num, positions=positions, shuffle=True)
        return keras.tree.map_structure(lambda one: one[rows], self.arrays)


def own_history(case: dict[str, Any], number: int) -> Any:
    """What Keras itself makes of a case."""
    weight = case.get("sample_weight")
    if "class_weight" in case:
        weight = np.array([case["class_weight"][int(one)] for one in case["y"]], dtype="float32")
    arrays = tuple(one for one in (case["x"], case["y"], weight) if one is not None)
    dataset = InOrder(arrays, number)
    begin = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, _: setattr(dataset, "epoch", epoch))
    return case["model"].fit(
        dataset,
        shuffle=False,
        callbacks=[begin],
        epochs=EPOCHS,
        verbose=0,
        validation_data=case.get("validation"),
    )


def main() -> None:
    names, out, *options = sys.argv[1:]
    is_own = "--own" in options
    found: dict[str, Any] = {}
    if is_own:
        fit = None
    else:
        from paceline.compat.keras import fit
    for number, make in enumerate((one for one in ZOO if one.__name__ in names.split(",")), 1):
        keras.utils.set_random_seed(7)
        case = make()
        if is_own:
            history = own_history(case, number)
        else:
            given = {key: case[key] for key in ("class_weight", "sample_weight") if key in case}
            history = fit(
                case["model"],
                case["x"],
                case["y"],
                batch_size=BATCH,
                epochs=EPOCHS,
                verbose=0,
                validation_data=case.get("validation"),
                **given,
            )
        found[make.__name__] = history.history
    with open(f"{out}.{os.getpid()}", "w") as file:
        json.dump(found, file)
    if not is_own:
        from paceline.runs.open_worker import open_worker

        if not open_worker().is_first:
            os.remove(f"{out}.{os.getpid()}")
            return
    os.replace(f"{out}.{os.getpid()}", out)


if __name__ == "__main__":
    main()
