"""A compiled Keras model as part of a run: what `fit` prepares once for each model and each `compile`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from paceline.compat.keras.data import SampleSource
from paceline.compat.keras.losses import StepForward, weight_penalties
from paceline.compat.keras.metrics import MetricBuffers, leaf_metrics, require_additive
from paceline.compat.keras.optimizer import KerasOptimizer, require_possible_rule, torch_optimizer
from paceline.compat.keras.saving import save_from_first
from paceline.compat.keras.the_keras import keras
from paceline.compat.keras.variables import bind_model, places_of
from paceline.errors import PlanError
from paceline.worker.data.random_state import capture_random_state, restore_random_state
from paceline.worker.run_member import parts_of
from paceline.worker.worker import Worker

__all__ = ["PreparedKeras", "build_model", "prepare_compiled"]

SAMPLE = 2  # samples of a trial batch
_prepared: list[PreparedKeras] = []  # of this process, which is one worker


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class PreparedKeras:
    """A model, its optimizer and its metrics, as they were prepared."""

    worker: Worker
    model: Any
    keras_optimizer: Any
    optimizer: KerasOptimizer
    metrics: MetricBuffers
    watched: list[Any]  # the metrics whose variables these are
    penalties: dict[str, Any]  # regularizers, by torch's names of their weights
    forward: StepForward
    step: Any = None  # the stepper


def build_model(model: Any, source: SampleSource) -> None:
    """Have a compiled model know its variables, loss and metrics, by a symbolic forward of the first samples. Its
    optimizer is built later: in the size of what a worker has."""
    optimizer = model.optimizer
    was_built = optimizer.built
    optimizer.built = True
    try:
        x, y, weight = source.first(SAMPLE)
        model._symbolic_build(data_batch=(x, y) if weight is None else (x, y, weight))
    finally:
        optimizer.built = was_built


def prepare_compiled(
    worker: Worker, model: Any, source: SampleSource, *, random_state: dict[str, Any]
) -> PreparedKeras:
    """Prepare a compiled model, or return what was prepared of it; all workers call it. `random_state`: the program's,
    by which a model that is not built yet draws its first weights, as in Keras.

    Raises PlanError for what cannot be right on several workers, with the way.
    """
    for known in _prepared:
        is_same = known.model is model and known.keras_optimizer is model.optimizer and known.worker is worker
        if is_same and known.watched == leaf_metrics(model.metrics):
            return known
    _require_known_steps(worker, model)
    is_new = all(known.model is not model for known in _prepared)
    if is_new:
        own = capture_random_state()
        restore_random_state(random_state)
        build_model(model, source)
        restore_random_state(own)
        bind_model(model)
        _require_additive_metrics(model, source)
        worker.prepare(model)
    else:
        build_model(model, source)
        _require_additive_metrics(model, source)
    require_possible_rule(model.optimizer, model, worker.plan)
    parts_of(worker).executor.shards.close()  # a forward may have left gathered weights in the places of rows
    optimizer = worker.prepare(torch_optimizer(model.optimizer, model))
    optimizer.take_over()
    watched = leaf_metrics(model.metrics)
    # Losses of several outputs are told by metrics, too.
    metrics = worker.prepare(MetricBuffers(watched), buffers={"*": "sum"})
    found = PreparedKeras(
        worker=worker,
        model=model,
        keras_optimizer=model.optimizer,
        optimizer=optimizer,
        metrics=metrics,
        watched=watched,
        penalties=weight_penalties(places_of(model)) if is_new else _known_penalties(model),
        forward=StepForward(model),
    )
    found.step = worker.stepper(
        model,
        optimizer,
        forward=found.forward,
        penalty=_penalty(found.penalties) if found.penalties else None,
    )
    optimizer.rule.norm = lambda: found.step.grad_norm
    save_from_first(worker, model, optimizer)
    _prepared.append(found)
    return found


def _known_penalties(model: Any) -> dict[str, Any]:
    return next(known.penalties for known in _prepared if known.model is model)


def _penalty(penalties: dict[str, Any]) -> Any:
    def penalty(name: str, weight: torch.Tensor) -> Any:
        return penalties[name](weight) if name in penalties else None

    return penalty


def _require_additive_metrics(model: Any, source: SampleSource) -> None:
    """Try the metrics of the user's own on some samples."""
    own = [one for one in leaf_metrics(model.metrics) if not type(one).__module__.startswith("keras.")]
    if not own:
        return
    x, y, _ = source.first(8)
    with torch.no_grad():
        y_pred = model(x, training=False) if model._call_has_training_arg else model(x)
    for one in own:
        require_additive(one, y, y_pred)


def _require_known_steps(worker: Worker, model: Any) -> None:
    """Raise PlanError for what `fit` would do otherwise than Keras."""
    kind = type(model)
    if not model.compiled or model.optimizer is None:
        raise ValueError("fit() got a model that is not compiled, or has no optimizer: call model.compile(...) first")
    for method in ("train_step", "test_step"):
        if getattr(kind, method) is not getattr(keras.Model, method):
            raise PlanError(
                f"{kind.__name__} has a {method} of its own, which makes gradients and steps by itself, of this "
                "worker's samples alone. Override compute_loss in its place, or write the loop: model = "
                "worker.prepare(model), worker.stepper(model, optim, forward=...), for which "
                "paceline.compat.keras.torch_optimizer(model.optimizer, model) is the optimizer."
            )
    if model.jit_compile:
        raise PlanError(
            "compile(jit_compile=True): Paceline runs the model within its own step. Leave it out, and give "
            "--plan 'compute(compile=true)', which compiles the model's forward with torch.compile."
        )
    if model.steps_per_execution != 1:
        raise ValueError(
            f"compile(steps_per_execution={model.steps_per_execution}): it is 1 on the torch back end, as in Keras"
        )
    layout = worker.plan.layout
    if layout.workers_each != layout.shard:
        raise PlanError(
            f"fit() under {layout!r}: Keras' layers are none of torch's, so Paceline does not know how they could be "
            "split (tensor, context, experts), and loss and metrics are made of inputs and outputs at one place "
            "(stages). Use shard=n, which splits the weights of any model (with zero=1 or zero=2 their updates), or "
            "replicas=n."
        )
    if worker.plan.is_local or worker.plan.is_asynchronous:
        raise PlanError(
            f"fit() under {worker.plan.sync!r}: replicas take steps by themselves, so metrics and callbacks' decisions "
            "would differ between them. Use sync=AllReduce(), or a loop of your own: worker.prepare(model)."
        )
