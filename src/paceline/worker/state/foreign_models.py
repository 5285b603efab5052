"""Models of frameworks on top of torch that keep lists of weights of their own, which layouts would pass by.

The frameworks' packages in `paceline.compat`, which nothing here imports, put that right.
"""

from __future__ import annotations

import importlib
import sys

from torch import nn

__all__ = ["settle_foreign_model"]

# By the module of which a class is that all of a framework's models have: the package, and what it calls for them.
FOREIGN = {"keras": ("Layer", "paceline.compat.keras.variables", "bind_model")}


def settle_foreign_model(model: nn.Module) -> None:
    """Have the package of the framework of which this model is, if it is of any, put it right in place.

    Raises PlanError for a model that cannot be prepared.
    """
    for name, (kind, package, function) in FOREIGN.items():
        framework = sys.modules.get(name)  # a model of it has imported it
        if framework is not None and isinstance(model, getattr(framework, kind, ())):
            getattr(importlib.import_module(package), function)(model)
