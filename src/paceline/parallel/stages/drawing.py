"""Which torch functions draw random numbers."""

from __future__ import annotations

from typing import Any

__all__ = ["draws"]

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
        "exponential_",
        "geometric_",
        "cauchy_",
        "log_normal_",
        "random_",
        "poisson",
        "binomial",
        "gumbel_softmax",
    )
)
DROPOUTS = frozenset(
    (
        "dropout",
        "dropout_",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "alpha_dropout",
        "alpha_dropout_",
        "feature_dropout",
        "feature_dropout_",
        "feature_alpha_dropout",
        "feature_alpha_dropout_",
    )
)


def draws(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the torch function called `name` draws random numbers when it is called like this."""
    if name in DROPOUTS:
        given = dict(zip(("p", "training"), args[1:3], strict=False))
        return bool(given.get("training", kwargs.get("training", kwargs.get("train", True)))) and (
            given.get("p", kwargs.get("p", 0.5)) != 0
        )
    if name == "scaled_dot_product_attention":
        return (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0)) != 0
    return name in DRAWING
