"""Keras' callbacks on several workers: all take the same decisions, and files are written once.

Metrics and losses are equal on all workers, so what a callback computes from logs is, too. Callbacks run on every
worker, but for those that only write or show (ProgbarLogger, CSVLogger, TensorBoard, RemoteMonitor, and classes made of
them): they run on the first. What a callback of the user's decides by anything else, a clock for example, is the first
worker's decision.
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

FIRST_ONLY = (
    keras.callbacks.ProgbarLogger,
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
)
KNOWN = ("keras.", "paceline.")  # whose callbacks decide by logs alone
COMPARES = "compares"  # of a callback's state: whether it has chosen how it compares values
SETTINGS = ("verbose", "params", "filepath")  # of the process, or of the script
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
            self.callbacks = [one for one in self.callbacks if not isinstance(one, FIRST_ONLY)]
            for one in self.callbacks:
                if type(one).__module__.startswith("keras.") and hasattr(one, "verbose"):
                    one.verbose = 0
        self.on_train_begin()

    def own(self) -> list[Any]:
        """The callbacks whose state belongs to the run: those that run on all workers."""
        return [one for one in self.callbacks if not isinstance(one, FIRST_ONLY)]


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
    """What callbacks remember, for checkpoints: plain values and arrays among their attributes, by their order.

    An attribute that is as training began is a setting, not memory: it is what the script says now.
    """

    def __init__(self, *, keeps_weights: bool) -> None:
        """`keeps_weights`: lists of whole weights, too, which EarlyStopping keeps."""
        self._keeps_weights = keeps_weights
        self._begun: list[dict[str, Any]] = []

    def begin(self, callbacks: Sequence[Any]) -> None:
        """Training has begun with these callbacks: what they have now is no memory."""
        self._begun = [self._held(one) for one in callbacks]

    def captured(self, callbacks: Sequence[Any]) -> list[dict[str, Any]]:
        """The present state of each that has begun."""
        return [
            {"kind": type(one).__name__, COMPARES: getattr(one, "monitor_op", None) is not None}
            | {name: held for name, held in self._held(one).items() if not _are_equal(held, begun.get(name))}
            for one, begun in zip(callbacks, self._begun, strict=True)
        ]

    def restore(self, callbacks: Sequence[Any], states: Sequence[Mapping[str, Any]]) -> None:
        """Give begun callbacks back what `captured` returned. Callbacks that are others now begin anew."""
        for one, begun, state in zip(callbacks, self._begun, states, strict=False):
            if state["kind"] != type(one).__name__:
                continue
            if state.get(COMPARES) and one.monitor_op is None:
                one._set_monitor_op()  # which negates min_delta
            kept = {name: held for name, held in state.items() if name not in ("kind", COMPARES)}
            now = self._held(one)
            for name, (form, value) in ({name: held for name, held in begun.items() if name in now} | kept).items():
                setattr(one, name, _thawed(form, value))

    def _held(self, callback: Any) -> dict[str, Any]:
        """The attributes that can be kept, in the form in which they are."""
        settings = (*SETTINGS, "min_delta") if hasattr(callback, "_set_monitor_op") else SETTINGS
        found = {name: self._frozen(value) for name, value in vars(callback).items() if name not in settings}
        return {name: held for name, held in found.items() if held is not None and not name.startswith("__")}

    def _frozen(self, value: Any) -> Any:
        if isinstance(value, PLAIN):
            return ["plain", value]
        if isinstance(value, np.generic):
            return ["plain", value.item()]
        if isinstance(value, Tensor) and value.numel() == 1:
            return ["plain", value.item()]
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            return ["array", torch.from_numpy(value.copy())]  # the callback may go on to change it
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


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two attributes have the same form and value."""
    if other is None or one[0] != other[0]:
        return False
    if one[0] == "array":
        return torch.equal(one[1], other[1])
    if one[0] == "arrays":
        return len(one[1]) == len(other[1]) and all(map(torch.equal, one[1], other[1]))
    return type(one[1]) is type(other[1]) and one[1] == other[1]


def _are_plain(values: Sequence[Any]) -> bool:
    return all(isinstance(one, (*PLAIN, np.floating)) for one in values)


def _thawed(form: str, value: Any) -> Any:
    if form == "array":
        return value.numpy().copy()
    if form == "arrays":
        return [one.numpy() for one in value]
    if form == "lists":
        return {key: list(one) for key, one in value.items()}
    return list(value) if form == "list" else value
