"""Whether a Keras model is the same in any division of its batch into micro-batches.

Then the fewest micro-batches serve best. It is so where no layer draws, no layer looks at several samples at once, and
the loss is a mean over samples. Only layers and losses of Keras are known to be such: all others may do anything.
"""

from __future__ import annotations

from typing import Any

from paceline.compat.keras.the_keras import keras

__all__ = ["is_model_divisible"]

# Layers of Keras that look at several samples at once, remember samples, or hold code of the user's.
NOT_KNOWN = ("BatchNormalization", "SpectralNormalization", "Lambda", "TorchModuleWrapper", "JaxLayer", "FlaxLayer")
OF_BATCHES = ("Circle", "circle")  # losses that compare the samples of a batch
BETWEEN_LAYERS = ("Add", "Subtract", "Multiply", "Divide", "TrueDivide", "Negative")  # operations on each number
CALLS = ("activation", "recurrent_activation", "activity_regularizer")
RATES = ("rate", "dropout", "recurrent_dropout", "_dropout")


def is_model_divisible(model: Any) -> bool:
    """Return whether losses and gradients of a compiled model are means over its samples, whatever these are with."""
    return _is_known_container(model) and all(map(_is_known_layer, _operations(model))) and _has_known_losses(model)


def _is_known_container(model: Any) -> bool:
    """Whether the model is only made of its layers, and does nothing by itself."""
    kind = type(model)
    return kind.__name__ in ("Sequential", "Functional") and _is_of_keras(kind)


def _operations(model: Any) -> list[Any]:
    """All layers and operations, inner ones and cells included."""
    found: list[Any] = []
    for one in getattr(model, "operations", model.layers):
        inner = [one] if isinstance(one, keras.layers.Layer) else []
        found += [one, *(each for layer in inner for each in layer._flatten_layers(include_self=False))]
    models = [one for one in found if isinstance(one, keras.Model)]
    return [*found, *(each for one in models for each in _operations(one))]


def _is_known_layer(layer: Any) -> bool:
    kind = type(layer)
    if not _is_of_keras(kind):
        return False
    if not isinstance(layer, keras.layers.Layer):
        return kind.__name__ in BETWEEN_LAYERS
    if isinstance(layer, keras.Model) and not _is_known_container(layer):
        return False
    if kind.__name__ in NOT_KNOWN or getattr(layer, "stateful", False):
        return False
    calls = [value for name in CALLS if (value := getattr(layer, name, None)) is not None]
    if not all(_is_of_keras(_definition(one)) for one in calls):
        return False
    draws = [value for name in RATES if (value := getattr(layer, name, None)) is not None]
    return not layer._seed_generators or (bool(draws) and not any(draws))


def _has_known_losses(model: Any) -> bool:
    """Whether all losses are Keras' own, given by name, as functions or as objects, and of single samples."""
    losses = [one for one in keras.tree.flatten(model.loss) if one is not None]
    return all(isinstance(one, str) or _is_of_keras(_definition(one)) for one in losses) and not any(
        (one if isinstance(one, str) else _definition(one).__name__) in OF_BATCHES for one in losses
    )


def _definition(one: Any) -> Any:
    """A function, or the class of an object."""
    return one if hasattr(one, "__qualname__") else type(one)


def _is_of_keras(definition: Any) -> bool:
    return definition.__module__.partition(".")[0] == "keras"
