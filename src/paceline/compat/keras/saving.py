"""`model.save` and the like of a prepared model: whole weights, written once, whatever the layout.

All workers call them, as they do in a program that knows of no workers. Where workers have parts, these are put
together on the first worker, which writes; the others wait until the file is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from paceline.comm.sharded_tensors import local_part
from paceline.compat.keras.optimizer import KerasOptimizer
from paceline.compat.keras.variables import lent, places_of
from paceline.errors import PacelineError, PlanError
from paceline.worker.run_member import parts_of
from paceline.worker.worker import Worker

__all__ = ["PartWeights", "save_from_first"]

WRITERS = ("save", "save_weights", "export")
WEIGHTS = ("get_weights", "set_weights", "load_weights")
RUNS = ("evaluate", "predict", "test_on_batch", "predict_on_batch")
TRAINS = ("fit", "train_on_batch")


def save_from_first(worker: Worker, model: Any, optimizer: KerasOptimizer) -> None:
    """Have a prepared model's methods that write files write whole weights once; from now on all workers call them.

    Those that would train this worker's weights alone are refused with the way. So are, under a layout with parts of
    weights, those that need whole ones.
    """
    fields = vars(model)
    for name in TRAINS:
        fields[name] = _refused(
            f"model.{name}() of a model that is trained by Paceline: each worker would train its own weights alone. "
            "Use paceline.compat.keras.fit(model, ...)."
        )
    for name in WRITERS:
        fields[name] = _writing_once(worker, model, optimizer, getattr(type(model), name).__get__(model))
    if worker.plan.layout.workers_each > 1:
        for name in WEIGHTS:
            fields[name] = _refused(
                f"model.{name}() under {worker.plan.layout!r}: each worker has a part of the weights. Save whole ones, "
                "on all workers: model.save('model.keras'), or worker.state_dict(model). Load weights before fit()."
            )
        for name in RUNS:
            fields[name] = _refused(
                f"model.{name}() under {worker.plan.layout!r}: each worker has a part of the weights. Use "
                "evaluate(model, ...) and predict(model, ...) of paceline.compat.keras, on all workers."
            )


def _writing_once(worker: Worker, model: Any, optimizer: KerasOptimizer, write: Any) -> Any:
    def write_once(*args: Any, **kwargs: Any) -> None:
        error: Exception | None = None
        with _whole(worker, model, optimizer):
            if worker.is_first:
                try:
                    write(*args, **kwargs)
                except Exception as problem:  # of all workers, then: the others would go on without the file
                    error = problem
        told = worker.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        failed = [text for text in told if text is not None]
        if failed:
            raise PacelineError(f"the first worker could not save the model: {failed[0]}")

    return write_once


def _refused(text: str) -> Any:
    def refuse(*_: Any, **__: Any) -> None:
        raise PlanError(text)

    return refuse


@contextlib.contextmanager
def _whole(worker: Worker, model: Any, optimizer: KerasOptimizer) -> Iterator[None]:
    """Meanwhile the first worker's variables, and what its optimizer remembers, are whole; all workers call it."""
    if worker.plan.layout.workers_each == 1:
        yield
        return
    weights: dict[str, Tensor] = worker.state_dict(model)
    slots = _whole_slots(worker, optimizer)
    named = places_of(model)
    values = [(variable, weights[name]) for name, variable in named.items() if name in weights]
    former = [(slot, slot._value, slot._shape) for slot, _ in slots]
    with lent(values), _own_classes(model):
        for slot, value in slots:
            slot._value, slot._shape = value, tuple(value.shape)
        try:
            yield
        finally:
            for slot, value, shape in former:
                slot._value, slot._shape = value, shape


@contextlib.contextmanager
def _own_classes(model: Any) -> Iterator[None]:
    """Meanwhile modules whose rows are sharded have their own classes: torch gives each a class with FSDP in its name,
    which a saved model would name."""
    changed = [(one, type(one)) for one in model.modules() if isinstance(one, FSDPModule)]
    for one, kind in changed:
        one.__class__ = kind.__bases__[-1]
    try:
        yield
    finally:
        for one, kind in changed:
            one.__class__ = kind


def _whole_slots(worker: Worker, optimizer: KerasOptimizer) -> list[tuple[Any, Tensor]]:
    """What the Keras optimizer keeps of each parameter, whole; all workers call it."""
    parts = parts_of(worker)
    names = parts.prepared.registry.parameter_names()
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    found: list[tuple[Any, Tensor]] = []

    def gather() -> None:
        found.clear()
        for number, key, slot in optimizer.rule.slots():
            parameter = parameters[number]
            value = optimizer.state.get(parameter, {}).get(key)
            whole = parts.models.whole_state(names[id(parameter)], value)
            if slot is not None and whole is not None and worker.is_first:
                found.append((slot, local_part(whole).cpu()))

    parts.collectives.require_together("model.save()")
    parts.collectives.together(gather)
    return found


class PartWeights:
    """A model as a callback sees it that keeps its best weights and puts them back: this worker's own parts."""

    def __init__(self, model: Any) -> None:
        self.__dict__["_model"] = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value)

    def get_weights(self) -> list[Tensor]:
        """A copy of what this worker has."""
        return [local_part(one.place.registered()).clone() for one in self._model.weights]

    def set_weights(self, weights: list[Tensor]) -> None:
        """Put such a copy back."""
        for one, value in zip(self._model.weights, weights, strict=True):
            local_part(one.place.registered()).copy_(value)
