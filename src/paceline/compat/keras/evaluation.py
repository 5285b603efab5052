"""Exact evaluation and prediction of a Keras model: each worker runs its share of the batches.

A batch is run as a whole on one worker, so losses and metrics are what Keras' own `evaluate` has of the same batches.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.compat.keras.data import SampleSource
from paceline.compat.keras.losses import num_samples_of
from paceline.compat.keras.metrics import add_over_workers
from paceline.compat.keras.the_keras import keras
from paceline.events import Evaluated
from paceline.worker.data.evaluation_data import EvaluationData
from paceline.worker.run_member import parts_of
from paceline.worker.step.evaluation import evaluate
from paceline.worker.worker import Worker

__all__ = ["evaluate_source", "predict_source"]


def evaluate_source(
    worker: Worker, model: Any, source: SampleSource, *, batch_size: int, penalties: dict[str, Any]
) -> dict[str, float]:
    """Return loss and metrics over all samples, equal on all workers, which all call it. The model's metrics hold them
    afterwards. `penalties`: regularizers, by torch's names of their weights."""
    parts, began = parts_of(worker), time.perf_counter()
    has_own_metrics = type(model).compute_metrics is not keras.Model.compute_metrics

    def measure(y_pred: Any, rest: Any, penalty: float) -> tuple[float, float]:
        x, y, weight, _ = rest
        num = num_samples_of(x)
        loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weight, training=False) + penalty
        model._loss_tracker.update_state(loss, sample_weight=num)
        if has_own_metrics:
            model.compute_metrics(x, y, y_pred, sample_weight=weight)
        elif model._compile_metrics is not None:
            model._compile_metrics.update_state(y, y_pred, weight)
        return float(loss) * num, float(num)

    def run() -> None:
        model.reset_metrics()
        penalty = _penalty_of(worker, model, penalties)
        _through(worker, model, source, batch_size, lambda y_pred, rest: measure(y_pred, rest, penalty))
        add_over_workers(model.metrics, parts.scope.place.group, device=worker.device)

    parts.collectives.require_together("evaluate()")
    parts.place.recorder.begin("evaluation", worker.step)
    parts.collectives.together(run)
    logs = {name: float(value) for name, value in _flat(model.get_metrics_result()).items()}
    took_s = time.perf_counter() - began
    parts.files.emit(Evaluated(step=worker.step, num_samples=len(source), metrics=logs, duration_s=took_s))
    return logs


def predict_source(worker: Worker, model: Any, source: SampleSource, *, batch_size: int) -> Any:
    """Return the model's outputs for all samples, in their order, as arrays on every worker; all call it."""
    parts, found = parts_of(worker), dict[int, Any]()

    def keep(y_pred: Any, rest: Any) -> tuple[float, float]:
        found[int(rest[3])] = keras.tree.map_structure(keras.ops.convert_to_numpy, y_pred)
        return 0.0, 1.0

    def run() -> list[dict[int, Any]]:
        found.clear()
        _through(worker, model, source, batch_size, keep)
        return parts.scope.place.group.gather_objects(found)

    parts.collectives.require_together("predict()")
    parts.place.recorder.begin("evaluation", worker.step)
    each = parts.collectives.together(run)
    by_number = {number: value for some in each for number, value in some.items()}
    batches = [by_number[number] for number in sorted(by_number)]
    return keras.tree.map_structure(lambda *arrays: np.concatenate(arrays), *batches)


def _through(worker: Worker, model: nn.Module, source: SampleSource, batch_size: int, measure: Any) -> None:
    """Have each worker run its share of the batches, and `measure(y_pred, (x, y, sample_weight, first))` them, where
    `first` is the number of the batch's first sample."""
    parts = parts_of(worker)
    numbered = NumberedSamples(source)

    def forward(_: nn.Module, micro: Any) -> tuple[Any, Any]:
        first, (x, y, weight) = micro
        called: Any = model
        y_pred = called(x, training=False) if called._call_has_training_arg else called(x)
        return y_pred, (x, y, weight, first)

    evaluate(
        model,
        EvaluationData(dataset=numbered, collate=numbered.collate, micro=batch_size),
        {"loss": measure},
        group=parts.scope.place.group,
        device=worker.device,
        precision=worker.plan.compute.precision,
        seeds=(worker.plan.batch.seed, 4, worker.step),
        forward=forward,
        axes=parts.scope.place.axes,
        shards=parts.executor.shards,
    )


class NumberedSamples:
    """Samples of a source; a batch comes with the number of its first one."""

    def __init__(self, source: SampleSource) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        samples = self._source.samples
        if hasattr(samples, "__getitems__"):
            return [(numbers[0], samples.__getitems__(numbers))]
        return [(numbers[0], [samples[number] for number in numbers])]

    def collate(self, items: list[Any]) -> Any:
        """As the source collates, with the number."""
        [(first, samples)] = items
        return torch.tensor(first), self._source.collate(list(samples))


def _penalty_of(worker: Worker, model: nn.Module, penalties: dict[str, Any]) -> float:
    """The regularizers' sum over whole weights."""
    if not penalties:
        return 0.0
    parts = parts_of(worker)
    parts.executor.shards.close()
    found = parts.models.penalty([model], lambda name, whole: penalties[name](whole) if name in penalties else None)
    return found.compute()[0]


def _flat(logs: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in logs.items():
        found.update(_flat(value) if isinstance(value, dict) else {name: value})
    return {name: value for name, value in found.items() if not isinstance(value, Tensor) or value.numel() == 1}
