"""Keras' callbacks on several workers: all take the same decisions, and files are written once.

Metrics and losses are equal on all workers, so what a callback computes from logs is, too. Callbacks run on every
worker, but for those that only write or show (ProgbarLogger, CSVLogger, TensorBoard, RemoteMonitor): they run on the
first. What a callback of the user's decides by anything else, a clock for example, is the first worker's decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.compat.keras.saving import PartWeights
from paceline.compat.keras.the_keras import keras
from paceline.errors import PlanError
from paceline.worker.worker import Worker

__all__ = ["CallbackStates", "WorkerCallbacks", "decides_in_steps", "refuse_callbacks"]

FIRST_ONLY = ("ProgbarLogger", "CSVLogger", "TensorBoard", "RemoteMonitor")
KNOWN = ("keras.", "paceline.")  # whose callbacks decide by logs alone
COMPARES = "compares"  # of a callback's state: whether it has chosen how it compares values
PLAIN = (bool, int, float, str, type(None))
REFUSED = {
    "BackupAndRestore": "Paceline saves the whole run by itself, and the same command goes on: leave it out",
    "OrbaxCheckpoint": "it writes from every process: use ModelCheckpoint, which is written once with whole weights",
}


class WorkerCallbacks(keras.callbacks.CallbackList):
    """The callbacks of one worker. Calls are made at once, not by a thread."""

    def __init__(self, callbacks: Any, *, worker: Worker, **params: Any) -> None:
        given = [] if callbacks is None else keras.tree.flatten(callbacks)
        refuse_callbacks(given, worker)
        self._worker = worker
        super().__init__(list(given), **params)

    def _configure_async_dispatch(self, callbacks: Any) -> None:
        """None is dispatched to a thread: all workers do the same, in the same order."""

    def set_model(self, model: Any) -> None:
        """Let all callbacks know the model; those that keep weights get this worker's parts."""
        super().set_model(model)
        if model is None or self._worker.plan.layout.workers_each == 1:
            return
        for one in self.callbacks:
            if isinstance(one, keras.callbacks.EarlyStopping):
                one.set_model(PartWeights(model))

    def begin(self, *, is_resumed: bool) -> None:
        """Training begins. `is_resumed`: in the middle, so that files go on."""
        for one in self.callbacks if is_resumed else ():
            if isinstance(one, keras.callbacks.CSVLogger):
                one.append = True
        if not self._worker.is_first:
            self.callbacks = [one for one in self.callbacks if type(one).__name__ not in FIRST_ONLY]
            for one in self.callbacks:
                if type(one).__module__.startswith("keras.") and hasattr(one, "verbose"):
                    one.verbose = 0
        self.on_train_begin()

    def own(self) -> list[Any]:
        """The callbacks whose state belongs to the run: those that run on all workers."""
        return [one for one in self.callbacks if type(one).__name__ not in FIRST_ONLY]


def refuse_callbacks(callbacks: Sequence[Any], worker: Worker) -> None:
    """Raise PlanError for callbacks that would do something else than on one process."""
    for one in callbacks:
        name = type(one).__name__
        if name in REFUSED and type(one).__module__.startswith("keras."):
            raise PlanError(f"the callback {name} under Paceline: {REFUSED[name]}.")
        if isinstance(one, keras.callbacks.SwapEMAWeights) and worker.plan.layout.workers_each > 1:
            raise PlanError(
                f"the callback {name} under {worker.plan.layout!r}: it exchanges whole weights, and each worker has a "
                "part. Use replicas, or the optimizer's ema_overwrite_frequency."
            )


def decides_in_steps(callbacks: Sequence[Any]) -> bool:
    """Whether a callback of the user's is called at each batch, and may decide there."""
    names = ("on_batch_end", "on_train_batch_end", "on_batch_begin", "on_train_batch_begin")
    return any(
        getattr(type(one), name) is not getattr(keras.callbacks.Callback, name)
        for one in callbacks
        if not type(one).__module__.startswith(KNOWN)
        for name in names
    )


class CallbackStates:
    """What callbacks remember, for checkpoints: plain values and arrays among their attributes, by their order."""

    def __init__(self, *, keeps_weights: bool) -> None:
        """`keeps_weights`: lists of whole weights, too, which EarlyStopping keeps."""
        self._keeps_weights = keeps_weights

    def captured(self, callbacks: Sequence[Any]) -> list[dict[str, Any]]:
        """The present state of each."""
        return [
            {"kind": type(one).__name__, COMPARES: getattr(one, "monitor_op", None) is not None}
            | {name: frozen for name, value in vars(one).items() if (frozen := self._frozen(name, value)) is not None}
            for one in callbacks
        ]

    def restore(self, callbacks: Sequence[Any], states: Sequence[Mapping[str, Any]]) -> None:
        """Give back what `captured` returned. Callbacks that are others now begin anew."""
        for one, state in zip(callbacks, states, strict=False):
            if state["kind"] != type(one).__name__:
                continue
            if state.get(COMPARES) and one.monitor_op is None:
                one._set_monitor_op()  # which negates min_delta, of which the state has what came of that
            for name, (form, value) in ((key, held) for key, held in state.items() if key not in ("kind", COMPARES)):
                setattr(one, name, _thawed(form, value))

    def _frozen(self, name: str, value: Any) -> Any:
        if name.startswith("__") or name in ("verbose", "params", "filepath"):
            return None
        if isinstance(value, PLAIN):
            return ["plain", value]
        if isinstance(value, np.generic):
            return ["plain", value.item()]
        if isinstance(value, Tensor) and value.numel() == 1:
            return ["plain", value.item()]
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            return ["array", torch.from_numpy(np.ascontiguousarray(value))]
        if isinstance(value, dict) and all(isinstance(one, list) and _are_plain(one) for one in value.values()):
            return [
                "lists",
                {str(key): [float(x) if isinstance(x, np.floating) else x for x in one] for key, one in value.items()},
            ]
        if isinstance(value, list) and _are_plain(value):
            return ["list", list(value)]
        if self._keeps_weights and isinstance(value, list) and all(isinstance(one, np.ndarray) for one in value):
            return ["arrays", [torch.from_numpy(np.ascontiguousarray(one)) for one in value]]
        return None


def _are_plain(values: Sequence[Any]) -> bool:
    return all(isinstance(one, (*PLAIN, np.floating)) for one in values)


def _thawed(form: str, value: Any) -> Any:
    if form == "array":
        return value.numpy()
    if form == "arrays":
        return [one.numpy() for one in value]
    if form == "lists":
        return {key: list(one) for key, one in value.items()}
    return list(value) if form == "list" else value
