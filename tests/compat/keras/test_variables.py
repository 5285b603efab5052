"""A Keras model as torch knows it: parameters and buffers once, blocks in lists, seeds of the micro-batch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import pytest
import torch
from torch import nn

from paceline.compat.keras import bind_model
from paceline.compat.keras.variables import HeldVariable
from paceline.errors import PlanError
from paceline.parallel.recompute import repeated_blocks

keras.utils.set_random_seed(3)  # imports TensorFlow where that is installed, which changes the environment
layers = keras.layers


class Block(layers.Layer):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.inner = [layers.Dense(4, activation="relu"), layers.Dense(4)]
        self.norm = layers.BatchNormalization()

    def build(self, shape: Any) -> None:
        for one in (*self.inner, self.norm):
            one.build(shape)
        self.built = True

    def call(self, x: Any, training: bool = False) -> Any:
        return x + self.norm(self.inner[1](self.inner[0](x)), training=training)


def net() -> Any:
    keras.utils.set_random_seed(5)
    inputs = keras.Input((4,))
    hidden = inputs
    for _ in range(3):
        hidden = Block()(hidden)
    wrapped = layers.TorchModuleWrapper(nn.Linear(4, 4), output_shape=(None, 4))
    return keras.Model(inputs, layers.Dropout(0.5)(layers.Dense(2)(wrapped(hidden))))


def test_each_variable_is_one_parameter_or_buffer() -> None:
    model, x = net(), torch.randn(3, 4)
    before = model(x).detach()
    weights = [one.copy() for one in model.get_weights()]
    bind_model(model)
    bind_model(model)  # changes nothing
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    assert len(parameters) == len(model.trainable_variables)
    assert {id(one) for one in parameters.values()} == {id(one.place.registered()) for one in model.trainable_variables}
    assert len(buffers) == 3 * 2 + 1, "statistics, and the seed of the dropout"
    assert all(isinstance(one, HeldVariable) for one in model.variables)
    assert torch.equal(model(x), before)
    assert all(np.array_equal(one, other) for one, other in zip(model.get_weights(), weights, strict=True))
    assert [type(block) for _, block in repeated_blocks(model)] == [Block] * 3


def test_variables_follow_what_is_registered_at_their_place() -> None:
    model = net()
    bind_model(model)
    variable = model.trainable_variables[0]
    other = nn.Parameter(torch.full(tuple(variable.shape), 2.0))
    setattr(variable.place.module, variable.place.name, other)
    assert variable.value is other
    variable.assign(np.ones(variable.shape))
    assert float(other.sum()) == other.numel()


def test_files_of_bound_models_are_those_of_keras(tmp_path: Path) -> None:
    model, other = net(), net()
    bind_model(model)
    for one in model.trainable_variables:
        one.assign(one + 1.0)
    model.save_weights(tmp_path / "bound.weights.h5")
    other.load_weights(tmp_path / "bound.weights.h5")
    assert all(np.array_equal(one, two) for one, two in zip(model.get_weights(), other.get_weights(), strict=True))
    other.save_weights(tmp_path / "own.weights.h5")
    model.load_weights(tmp_path / "own.weights.h5")


def test_random_layers_draw_by_the_seed_of_the_micro_batch() -> None:
    model, ones = keras.Sequential([keras.Input((50,)), layers.Dropout(0.5)]), torch.ones(1, 50)
    bind_model(model)
    state = model.layers[0].seed_generator.state
    before = state.numpy().copy()

    def masks(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        return [model(ones, training=True), model(ones, training=True)]

    first, again, other = masks(1), masks(1), masks(2)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])
    assert np.array_equal(state.numpy(), before), "a forward writes nothing"


def test_only_layers_and_draws_without_a_seed_draw_by_the_micro_batch() -> None:
    bind_model(keras.Sequential([keras.Input((5,)), layers.Dropout(0.5)]))
    own = keras.random.SeedGenerator(7)
    assert [own.next().tolist(), own.next().tolist()] == [[7, 0], [7, 1]]

    def unseeded(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return keras.random.normal((4,))

    assert torch.equal(unseeded(1), unseeded(1))
    assert not torch.equal(unseeded(1), unseeded(2))


def test_model_that_is_not_built_is_refused() -> None:
    with pytest.raises(PlanError, match=r"is not built.*Begin the model with keras.Input"):
        bind_model(keras.Sequential([layers.Dense(2)]))


def test_variable_that_comes_later_is_refused() -> None:
    model = net()
    bind_model(model)
    layer = model.layers[1]
    layer._tracker.unlock()
    with pytest.raises(PlanError, match="was added to a layer of a prepared model"):
        layer.late = layer.add_weight(shape=(2,), name="late")
