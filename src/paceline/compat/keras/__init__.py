"""Keras 3 on the torch back end: `fit`, `evaluate` and `predict` under any plan that the model can have."""

from paceline.compat.keras.fit import evaluate, fit, predict
from paceline.compat.keras.optimizer import torch_optimizer
from paceline.compat.keras.variables import bind_model

__all__ = ["bind_model", "evaluate", "fit", "predict", "torch_optimizer"]
