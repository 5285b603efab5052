"""Which models have each worker's share as one micro-batch: those that are the same in any division of the batch."""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

from collections.abc import Callable
from typing import Any

import keras
import pytest
from keras import layers

from paceline.compat.keras.division import is_model_divisible


def sequential(*inner: Any, shape: tuple[int, ...] = (4,), loss: Any = "mse") -> keras.Model:
    model = keras.Sequential([keras.Input(shape), *inner])
    model.compile("sgd", loss)
    return model


def functional(join: Callable[[Any, Any], Any]) -> keras.Model:
    entry = keras.Input((4,))
    first = layers.Dense(4)(entry)
    model = keras.Model(entry, layers.Dense(1)(join(first, layers.Dense(4, activation="relu")(first))))
    model.compile("sgd", keras.losses.MeanSquaredError())
    return model


class OwnLayer(layers.Layer):
    def call(self, inputs: Any) -> Any:
        return inputs - keras.ops.mean(inputs, axis=0)


class OwnModel(keras.Model):
    def call(self, inputs: Any) -> Any:
        return inputs


def own_model() -> keras.Model:
    model = OwnModel()
    model.compile("sgd", "mse")
    return model


def own_loss(y: Any, y_pred: Any) -> Any:
    return keras.ops.mean(y_pred - keras.ops.mean(y_pred))


MODELS: dict[str, tuple[bool, Callable[[], keras.Model]]] = {
    "dense": (True, lambda: sequential(layers.Dense(3, activation="relu"), layers.LayerNormalization())),
    "not built": (True, lambda: compiled(keras.Sequential([layers.Dense(3), layers.Dense(1)]))),
    "dropout": (False, lambda: sequential(layers.Dropout(0.1))),
    "dropout of nothing": (True, lambda: sequential(layers.Dropout(0.0))),
    "batch norm": (False, lambda: sequential(layers.BatchNormalization())),
    "lstm": (True, lambda: sequential(layers.Bidirectional(layers.LSTM(3)), shape=(5, 2))),
    "lstm with dropout": (False, lambda: sequential(layers.LSTM(3, dropout=0.1), shape=(5, 2))),
    "inner dropout": (False, lambda: sequential(keras.Sequential([layers.Dense(3), layers.GaussianDropout(0.2)]))),
    "sum of layers": (True, lambda: functional(lambda one, other: one + other)),
    "attention": (True, lambda: sequential(layers.Reshape((2, 2)), SelfAttention.of(0.0))),
    "attention with dropout": (False, lambda: sequential(layers.Reshape((2, 2)), SelfAttention.of(0.1))),
    "mean over samples": (False, lambda: functional(lambda one, other: one - keras.ops.mean(other, axis=0))),
    "lambda": (False, lambda: sequential(layers.Lambda(lambda one: one))),
    "own activation": (False, lambda: sequential(layers.Dense(3, activation=lambda one: one))),
    "own layer": (False, lambda: sequential(OwnLayer())),
    "own model": (False, own_model),
    "own loss": (False, lambda: sequential(layers.Dense(1), loss=own_loss)),
    "loss function": (True, lambda: sequential(layers.Dense(1), loss=keras.losses.mean_squared_error)),
    "loss of pairs": (False, lambda: sequential(layers.Dense(3), loss=keras.losses.Circle())),
}


def compiled(model: keras.Model) -> keras.Model:
    model.compile("sgd", "mse")
    return model


class SelfAttention:
    """An attention of a sequence to itself, as a functional model that a sequential one holds."""

    @staticmethod
    def of(dropout: float) -> keras.Model:
        entry = keras.Input((2, 2))
        return keras.Model(entry, layers.MultiHeadAttention(1, 2, dropout=dropout)(entry, entry))


@pytest.mark.parametrize("name", list(MODELS))
def test_only_what_keras_computes_sample_by_sample_is_divisible(name: str) -> None:
    expected, make = MODELS[name]
    assert is_model_divisible(make()) is expected
