"""Which torch functions draw random numbers, and whether a generator was used.

On tensors without contents nothing is drawn, so functions are recognized by their names. Elsewhere a draw moves a
generator.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.meta.meta_device import unseen

__all__ = ["GeneratorState", "draws", "may_draw"]

DRAWING = frozenset(
    (
        "rand",
        "rand_like",
        "randn",
        "randn_like",
        "randint",
        "randint_like",
        "randperm",
        "bernoulli",
        "bernoulli_",
        "multinomial",
        "normal",
        "normal_",
        "uniform_",
        "kaiming_uniform_",
        "exponential_",
        "geometric_",
        "cauchy_",
        "log_normal_",
        "random_",
        "poisson",
        "binomial",
        "gumbel_softmax",
        "_standard_gamma",  # Gamma, Chi2, StudentT of torch.distributions
        "_sample_dirichlet",  # Beta and Dirichlet
        "fractional_max_pool2d",
        "fractional_max_pool2d_with_indices",
        "fractional_max_pool3d",
        "fractional_max_pool3d_with_indices",
        "svd_lowrank",
        "pca_lowrank",
        "lobpcg",
    )
)

Switch = tuple[int, str, Any]  # an argument's place, its name and its default; if it is 0, nothing is drawn

DROPOUT: tuple[Switch, ...] = ((1, "p", 0.5), (2, "training", True))
NOISE: tuple[Switch, ...] = ((3, "training", False),)
RECURRENT: tuple[Switch, ...] = ((5, "dropout", 0.0), (6, "training", False))
SWITCHED: dict[str, tuple[Switch, ...]] = {
    "dropout": DROPOUT,
    "dropout_": DROPOUT,
    "dropout1d": DROPOUT,
    "dropout2d": DROPOUT,
    "dropout3d": DROPOUT,
    "alpha_dropout": DROPOUT,
    "alpha_dropout_": DROPOUT,
    "feature_dropout": DROPOUT,
    "feature_dropout_": DROPOUT,
    "feature_alpha_dropout": DROPOUT,
    "feature_alpha_dropout_": DROPOUT,
    "native_dropout": DROPOUT,
    "rrelu": NOISE,
    "rrelu_": NOISE,
    "lstm": RECURRENT,
    "gru": RECURRENT,
    "rnn_tanh": RECURRENT,
    "rnn_relu": RECURRENT,
    "scaled_dot_product_attention": ((4, "dropout_p", 0.0),),
    "multi_head_attention_forward": ((10, "dropout_p", 0.0), (13, "training", True)),
}


def draws(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the torch function called `name` draws random numbers when it is called with these arguments."""
    if name not in SWITCHED:
        return name in DRAWING
    if SWITCHED[name] is RECURRENT and len(args) > 3 and not isinstance(args[3], bool):
        args = args[1:]  # for packed sequences the lengths come second
    if "train" in kwargs:  # torch.dropout's own name for it
        kwargs = {**kwargs, "training": kwargs["train"]}
    return all(args[place] if place < len(args) else kwargs.get(key, default) for place, key, default in SWITCHED[name])


def may_draw(name: str) -> bool:
    """Return whether it can draw: when called like this, with another strength, or in training."""
    return name in DRAWING or name in SWITCHED


class GeneratorState:
    """The states of Python's generator and of torch's, on the CPU and on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._python, self._torch = device, random.getstate(), _torch_states(device)

    def has_moved(self) -> bool:
        """Return whether one of the generators was used since this object was made."""
        pairs = zip(self._torch, _torch_states(self._device), strict=True)
        with unseen():
            return random.getstate() != self._python or not all(torch.equal(one, now) for one, now in pairs)

    def put_back(self) -> None:
        """Restore the states."""
        random.setstate(self._python)
        with unseen():
            torch.set_rng_state(self._torch[0])
            for one in self._torch[1:]:
                torch.cuda.set_rng_state(one, self._device)


def _torch_states(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
