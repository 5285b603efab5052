"""Keras' optimizers on parameters of torch take the steps of Keras itself, and go on from what was saved of them."""

from __future__ import annotations

import copy
import os
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import pytest
import torch

from paceline.compat.keras import bind_model, torch_optimizer
from paceline.errors import PlanError
from paceline.parallel.check.optimizer_requirements import needs_all_parameters, needs_whole_parameters

keras.utils.set_random_seed(3)  # imports TensorFlow where that is installed, which changes the environment
rates = keras.optimizers.schedules
MAKERS: dict[str, Any] = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda: keras.optimizers.Adam(0.01, amsgrad=True, clipvalue=0.3),
    "adamw": lambda: keras.optimizers.AdamW(rates.CosineDecay(0.05, 5), weight_decay=0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, centered=True, momentum=0.5),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "adamax": lambda: keras.optimizers.Adamax(0.01),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1, l1_regularization_strength=0.01),
    "lion": lambda: keras.optimizers.Lion(0.01),
    "ema": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3),
    "accumulated": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
}
BY_NUMBER = [name for name in MAKERS if name not in ("lamb", "adafactor")]


def net() -> Any:
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(2)])


def gradients(step: int, model: Any) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(one.shape, generator=generator) for one in model.trainable_variables]


def take(steps: range, optimizer: Any, model: Any) -> None:
    for step in steps:
        for variable, gradient in zip(model.trainable_variables, gradients(step, model), strict=True):
            variable.place.registered().grad = gradient
        optimizer.step()


@pytest.mark.parametrize("name", MAKERS)
def test_steps_are_those_of_keras_also_after_a_restart(name: str) -> None:
    own, model = net(), net()
    optimizer = MAKERS[name]()
    for step in range(7):
        optimizer.apply(gradients(step, own), own.trainable_variables)
    bind_model(model)
    first = torch_optimizer(MAKERS[name](), model)
    take(range(4), first, model)
    saved = copy.deepcopy(first.state_dict())
    second = torch_optimizer(MAKERS[name](), model)
    second.load_state_dict(saved)
    second.take_over()
    assert int(second.rule.optimizer._iterations) == 4
    take(range(4, 7), second, model)
    for one, other in zip(model.get_weights(), own.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", MAKERS)
def test_trials_know_which_look_at_more_than_single_numbers(name: str) -> None:
    model = net()
    bind_model(model)
    optimizer = torch_optimizer(MAKERS[name](), model)
    before = copy.deepcopy(optimizer.state_dict())
    assert needs_whole_parameters(optimizer) is (name not in BY_NUMBER)
    assert not needs_all_parameters(optimizer)
    assert optimizer.state_dict() == before  # a trial leaves no trace


def test_rates_may_be_set_on_either_side() -> None:
    model = net()
    bind_model(model)
    optimizer = torch_optimizer(keras.optimizers.SGD(0.1), model)
    optimizer.rule.optimizer.learning_rate = 0.2
    take(range(1), optimizer, model)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)
    optimizer.param_groups[0]["lr"] = 0.05  # as a scheduler of torch, or a checkpoint
    take(range(1), optimizer, model)
    assert float(optimizer.rule.optimizer.learning_rate) == pytest.approx(0.05)


def test_scaled_losses_are_refused() -> None:
    model = net()
    bind_model(model)
    with pytest.raises(PlanError, match="mixed_bfloat16"):
        torch_optimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), model)
    with pytest.raises(ValueError, match="was not prepared"):
        torch_optimizer(keras.optimizers.Adam(), net())
