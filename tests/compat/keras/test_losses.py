"""The micro-batches of a step have the loss of the whole batch, with their weights, or are refused."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import pytest
import torch

from paceline.compat.keras.losses import StepForward
from paceline.errors import PlanError

keras.utils.set_random_seed(3)  # imports TensorFlow where that is installed, which changes the environment
layers = keras.layers
NUM, CUT, LENGTH = 9, 4, 5
rng = np.random.default_rng(0)
tokens = rng.integers(1, 8, size=(NUM, LENGTH))
for row, length in enumerate((1, 2, 1, 2, 5, 4, 5, 5, 4)):  # the two micro-batches have other shares of padding
    tokens[row, length:] = 0
values = rng.normal(size=(NUM, 4)).astype("float32")
classes = tokens % 3
weights = rng.uniform(0.2, 3.0, size=NUM).astype("float32")
weights[:CUT] *= 5
of_each = weights[:, None] * rng.uniform(0.2, 3.0, size=(NUM, LENGTH)).astype("float32")


class Added(layers.Layer):
    """Adds a loss, which is a mean over the batch."""

    supports_masking = True

    def call(self, x: Any) -> Any:
        self.add_loss(0.7 * keras.ops.mean(keras.ops.square(x)))
        return x


def of_values(loss: Any, *, added: bool = False, num_outputs: int = 1) -> Any:
    inputs = keras.Input((4,))
    hidden = layers.Dense(4)(inputs)
    hidden = Added()(hidden) if added else hidden
    outputs = [layers.Dense(2)(hidden) for _ in range(num_outputs)]
    model = keras.Model(inputs, outputs[0] if num_outputs == 1 else outputs)
    model.compile("sgd", loss)
    return model


def of_tokens(loss: Any, *, added: bool = False, num_outputs: int = 1, mask_zero: bool = True) -> Any:
    inputs = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.Embedding(8, 4, mask_zero=mask_zero)(inputs)
    hidden = Added()(hidden) if added else hidden
    outputs = [layers.Dense(3)(hidden) for _ in range(num_outputs)]
    model = keras.Model(inputs, outputs[0] if num_outputs == 1 else outputs)
    model.compile("sgd", loss)
    return model


def step_loss(model: Any, micros: list[Any], num: int) -> float:
    """The loss of a step, as a stepper makes it of its micro-batches' means, or sums and counts."""
    forward = StepForward(model)
    forward.num_step = num
    value, weight = 0.0, 0.0
    for micro in micros:
        found = forward(model, micro)
        one, count = found if isinstance(found, tuple) else (found * len(micro[0]), len(micro[0]))
        value, weight = value + one.item(), weight + float(count)
    return value / weight


def parts_of_step(x: Any, y: Any, weight: Any) -> tuple[Any, list[Any]]:
    """The whole batch, and its two micro-batches, of unequal sizes."""

    def cut(rows: slice) -> Any:
        return keras.tree.map_structure(
            lambda one: None if one is None else torch.from_numpy(one[rows].copy()), (x, y, weight)
        )

    return cut(slice(None)), [cut(slice(CUT)), cut(slice(CUT, None))]


def entropy(**settings: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **settings)


def squares(reduction: str) -> Any:
    return keras.losses.MeanSquaredError(reduction=reduction)


EXACT: dict[str, Any] = {
    "sum beside an added loss": (lambda: of_values(squares("sum"), added=True), values, values[:, :2], None),
    "mean beside an added loss": (lambda: of_values("mse", added=True), values, values[:, :2], weights),
    "weighted mean": (lambda: of_values(squares("mean_with_sample_weight")), values, values[:, :2], weights),
    "sums of two outputs": (
        lambda: of_values([squares("sum"), squares("sum")], num_outputs=2),
        values,
        [values[:, :2], values[:, 2:]],
        None,
    ),
    "mask": (lambda: of_tokens(entropy()), tokens, classes, None),
    "mask without a compiled loss": (lambda: of_tokens(None, added=True), tokens, None, None),
    "mask and weights of tokens": (
        lambda: of_tokens(entropy(reduction="mean_with_sample_weight")),
        tokens,
        classes,
        of_each[..., None],
    ),
    "ignored class": (lambda: of_tokens(entropy(ignore_class=0), mask_zero=False), tokens, classes, None),
    "mask and ignored class": (lambda: of_tokens(entropy(ignore_class=1)), tokens, classes[..., None], None),
}


@pytest.mark.parametrize("name", EXACT)
def test_micro_batches_have_the_loss_of_the_batch(name: str) -> None:
    make, x, y, weight = EXACT[name]
    model = make()
    whole, micros = parts_of_step(x, y, weight)
    expected = model.compute_loss(whole[0], whole[1], model(whole[0], training=True), whole[2]).item()
    assert step_loss(model, micros, NUM) == pytest.approx(expected, rel=1e-5)


MIXED: dict[str, Any] = {
    "an added loss beside a mask": (lambda: of_tokens(entropy(), added=True), tokens, classes, None),
    "an added loss beside weights": (
        lambda: of_values(squares("mean_with_sample_weight"), added=True),
        values,
        values[:, :2],
        weights,
    ),
    "masked outputs": (
        lambda: of_tokens([entropy(), entropy()], num_outputs=2),
        tokens,
        [classes, classes],
        None,
    ),
    "weighted outputs": (
        lambda: of_values([squares("mean_with_sample_weight")] * 2, num_outputs=2),
        values,
        [values[:, :2], values[:, 2:]],
        [weights, weights],
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_parts_with_other_divisors_are_refused_unless_a_step_is_one_micro_batch(name: str) -> None:
    make, x, y, weight = MIXED[name]
    model = make()
    whole, micros = parts_of_step(x, y, weight)
    expected = model.compute_loss(whole[0], whole[1], model(whole[0], training=True), whole[2]).item()
    assert step_loss(model, [whole], NUM) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(PlanError, match=r"no common weight.*batch\(size=9,micro=9\)"):
        step_loss(model, micros, NUM)
