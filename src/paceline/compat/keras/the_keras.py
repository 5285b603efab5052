"""Keras itself: version 3 on the torch back end. Others are refused when this is imported, with the way."""

from __future__ import annotations

import importlib
from typing import Any

from paceline.errors import PlanError

__all__ = ["keras", "refuse_distribution"]

WAY = (
    'Set KERAS_BACKEND=torch before keras is imported: in the shell, or os.environ["KERAS_BACKEND"] = "torch" in the '
    'program\'s first lines, or "backend": "torch" in ~/.keras/keras.json'
)


def _loaded() -> Any:
    """Return the module; raises PlanError where it is not there, too old, or on another back end."""
    try:
        found: Any = importlib.import_module("keras")
    except ImportError as error:
        raise PlanError(
            f"Keras cannot be imported ({error}). It takes the back end that is set, TensorFlow if none is. {WAY}. "
            "Where Keras is missing: pip install 'keras>=3.15,<4'."
        ) from error
    if int(found.__version__.partition(".")[0]) < 3:
        raise PlanError(
            f"keras {found.__version__} computes with TensorFlow alone; Paceline trains torch models. Use Keras 3: pip "
            "install 'keras>=3.15,<4'."
        )
    if (backend := found.backend.backend()) != "torch":
        raise PlanError(
            f"Keras computes with {backend} here, and Paceline trains torch models. {WAY}. A program that stays on "
            "TensorFlow can be started and watched by Paceline, but not trained: see "
            "docs/how-to/bring-your-keras-program.md."
        )
    return found


def refuse_distribution() -> None:
    """Raise PlanError where the program has set a `keras.distribution`: on torch Keras takes it, and does nothing."""
    found = keras.distribution.distribution()
    if found is not None:
        raise PlanError(
            f"keras.distribution has a {type(found).__name__} set, which does nothing on the torch back end: each "
            "process would train the whole model on all data by itself. Leave out keras.distribution.set_distribution, "
            "and give the layout to Paceline: paceline run train.py --workers 4 --plan replicas=4 (DataParallel), "
            "--plan shard=4 or tensor=4 (ModelParallel)."
        )


keras: Any = _loaded()
