"""`fit`, `evaluate` and `predict`: in the place of the methods of a compiled Keras model, on all workers of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline import environment
from paceline.compat.keras.callbacks import WorkerCallbacks
from paceline.compat.keras.data import SampleSource, have_same_samples, ordered, sample_source, split_arrays
from paceline.compat.keras.evaluation import evaluate_source, predict_source
from paceline.compat.keras.prepared import PreparedKeras, prepare_compiled
from paceline.compat.keras.the_keras import keras, refuse_distribution
from paceline.compat.keras.training import FitLoop, FitProgress
from paceline.errors import PlanError
from paceline.events import Warned
from paceline.plan import Batch, CommandPlan, Plan
from paceline.runs.open_worker import open_worker
from paceline.worker.data.random_state import capture_random_state
from paceline.worker.run_member import parts_of
from paceline.worker.session import present_worker
from paceline.worker.worker import Worker

__all__ = ["evaluate", "fit", "merged_batch", "predict"]

BATCH = 32  # Keras' default

_calls = itertools.count(1)  # of fit in this process
_compared = itertools.count(1)  # of fit in this process, whose samples were compared in the store


def fit(
    model: Any,
    x: Any = None,
    y: Any = None,
    *,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: str | int = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool = True,
    class_weight: dict[int, float] | None = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: int | Sequence[int] = 1,
    worker: Worker | None = None,
) -> Any:
    """Train a compiled Keras model on all workers of the run, and return its `History`; an operation of all workers.

    Takes what `model.fit` takes. The batch is global, `batch_size` that of the plan, unless the plan says one. In a
    program without a worker yet it joins the run that started it (`paceline run`, torchrun, srun, mpirun), or makes one
    of this process. A run that goes on from a checkpoint goes on in the middle of the epoch.

    :param worker: the training function's; None: that, or the program's own.
    :raises PlanError: what would not be right on several workers, with the way.
    :raises ValueError: arguments that do not fit together, as in Keras.
    """
    refuse_distribution()
    random_state = capture_random_state()  # before the run seeds
    if epochs < 0 or initial_epoch < 0:
        raise ValueError(f"epochs={epochs}, initial_epoch={initial_epoch}: both are 0 or more")
    if validation_split and validation_data is None:
        (x, y, sample_weight), validation_data = split_arrays(x, y, sample_weight, validation_split)
    source = sample_source(x, y, sample_weight, class_weight)
    wanted = batch_size or source.batch_size or (math.ceil(len(source) / steps_per_epoch) if steps_per_epoch else None)
    worker = _worker(worker, wanted, source, shuffle=bool(shuffle))
    _require_same_samples(worker, source)
    validation = _validation_source(validation_data, validation_steps, validation_batch_size or wanted or BATCH)
    with _on_device(worker):
        prepared = prepare_compiled(worker, model, source, random_state=random_state)
        number = next(_calls)
        progress = worker.prepare(FitProgress(worker), name=f"fit_{number}")
        batch = worker.plan.batch
        steps_of_data = _num_steps(len(source), batch)
        loop = FitLoop(
            prepared,
            progress,
            _callbacks(callbacks, worker, model, verbose, epochs=epochs, steps=steps_per_epoch or steps_of_data),
            steps=steps_per_epoch or steps_of_data,
            first_epoch=initial_epoch,
            epochs=epochs,
            validate=lambda epoch: _validated(
                prepared, validation, epoch, validation_batch_size or wanted or BATCH, validation_freq
            ),
        )
        if loop.num_steps == 0:
            return model.history
        dataset, collate = ordered(source, shuffles=bool(shuffle), plan_shuffles=batch.shuffle, seed=batch.seed)
        epochs_of_data, name = loop.num_passes(steps_of_data), f"fit_{number}"
        if progress.is_stopped:  # before the checkpoint: a later call goes on
            loop.run(())
        else:
            loop.run(worker.batches(dataset, epochs=epochs_of_data, collate=collate, loaders=source.loaders, name=name))
    return model.history


def evaluate(
    model: Any,
    x: Any = None,
    y: Any = None,
    *,
    batch_size: int | None = None,
    verbose: str | int = "auto",
    sample_weight: Any = None,
    steps: int | None = None,
    callbacks: Any = None,
    return_dict: bool = False,
    worker: Worker | None = None,
) -> Any:
    """Return a compiled model's loss and metrics over all samples, equal on all workers, which all call it.

    Takes what `model.evaluate` takes. Raises as `fit`.
    """
    random_state = capture_random_state()
    source = _limited(sample_source(x, y, sample_weight), steps, batch_size)
    worker = _worker(worker, None, source, shuffle=True)
    size = batch_size or source.batch_size or BATCH
    with _on_device(worker):
        prepared = prepare_compiled(worker, model, source, random_state=random_state)
        shown = _callbacks(callbacks, worker, model, verbose, epochs=1, steps=math.ceil(len(source) / size))
        shown.on_test_begin()
        logs = evaluate_source(worker, model, source, batch_size=size, penalties=prepared.penalties)
        shown.on_test_end(logs)
    return logs if return_dict else model._flatten_metrics_in_order(logs)


def predict(
    model: Any,
    x: Any,
    *,
    batch_size: int | None = None,
    verbose: str | int = "auto",
    steps: int | None = None,
    callbacks: Any = None,
    worker: Worker | None = None,
) -> Any:
    """Return a compiled model's outputs for all samples, in their order, on every worker; all call it.

    Takes what `model.predict` takes. Raises as `fit`.
    """
    random_state = capture_random_state()
    source = _limited(sample_source(x), steps, batch_size)
    worker = _worker(worker, None, source, shuffle=True)
    with _on_device(worker):
        prepare_compiled(worker, model, source, random_state=random_state)
        shown = _callbacks(callbacks, worker, model, verbose, epochs=1, steps=None)
        shown.on_predict_begin()
        found = predict_source(worker, model, source, batch_size=batch_size or source.batch_size or BATCH)
        shown.on_predict_end()
    return found


def _worker(worker: Worker | None, batch_size: int | None, source: SampleSource, *, shuffle: bool) -> Worker:
    """The worker of this call: a given one, the training function's, or that of the program."""
    found = worker or present_worker()
    if found is None:
        size = batch_size or BATCH
        batch = Batch(size=size, shuffle=shuffle, drop_last=source.drop_last)
        found = open_worker(plan=_plan(batch))
    size = found.plan.batch.size
    if batch_size is not None and batch_size != size and found.is_first:
        parts_of(found).files.emit(
            Warned(
                text=f"fit() is given batches of {batch_size} samples, and the plan's batch has {size}, which counts. "
                f"Say it in the plan: batch(size={batch_size})"
            )
        )
    return found


def _require_same_samples(worker: Worker, source: SampleSource) -> None:
    """Raise ValueError where workers have made other samples: all find it together. The workers of an elastic run come
    and go, so each compares its own with what the first one to come here has left in the run's store."""
    own, first = source.fingerprint(), "worker 0"
    if worker.plan.layout.is_elastic:
        first = "the first worker"
        other = None if have_same_samples(own, _first_fingerprint(worker, own)) else worker.rank
    else:
        found = worker.gather(own)
        other = next((rank for rank, one in enumerate(found) if not have_same_samples(one, found[0])), None)
    if other is not None:
        raise ValueError(
            f"fit() got other samples on worker {other} than on {first} (their number or some sums differ), and "
            "the workers share the samples by their numbers. Seed before the data is made or shuffled, for example by "
            "keras.utils.set_random_seed(0), or read the same files on all workers."
        )


def _first_fingerprint(worker: Worker, own: Sequence[float]) -> list[float]:
    """Return the fingerprint of the worker that was the first to come to this call of `fit`, perhaps this one."""
    parts = parts_of(worker)
    key = f"paceline/fit/{parts.files.attempt}/{next(_compared)}"
    return json.loads(parts.place.shared.compare_set(key, "", json.dumps(own)))


def _plan(batch: Batch) -> Plan:
    """The program's plan: that of the command, with the batch of `fit` in what the command leaves open."""
    own = environment.assignment()
    whole = None if own is None else own.plan.whole
    if own is None or whole is None:
        return Plan(batch=batch)
    found = dataclasses.replace(whole, batch=merged_batch(own.plan, batch))
    environment.enter(dataclasses.replace(own, plan=dataclasses.replace(own.plan, whole=found)))
    return found


def merged_batch(command: CommandPlan, program: Batch) -> Batch:
    """Return the program's batch with those values that the command's whole plan gives."""
    whole = command.over(None).batch
    names = [one.name for one in dataclasses.fields(Batch)]
    return dataclasses.replace(
        program, **{name: getattr(whole, name) for name in names if command.gives("batch", name)}
    )


@contextlib.contextmanager
def _on_device(worker: Worker) -> Iterator[None]:
    """Have Keras make tensors on the worker's device."""
    with keras.device(str(worker.device)):
        yield


def _num_steps(num_samples: int, batch: Batch) -> int:
    """Steps of an epoch over so many samples."""
    steps = num_samples // batch.size if batch.drop_last else math.ceil(num_samples / batch.size)
    if steps == 0:
        raise PlanError(
            f"{num_samples} samples make no step of {batch.size} with drop_last: use a smaller batch, or leave it out."
        )
    return steps


def _callbacks(
    given: Any, worker: Worker, model: Any, verbose: str | int, *, epochs: int, steps: int | None
) -> WorkerCallbacks:
    if isinstance(given, WorkerCallbacks):
        return given
    if isinstance(given, keras.callbacks.CallbackList):
        given = given.callbacks
    level = verbose if verbose != "auto" else 1 if sys.stdout.isatty() else 2
    return WorkerCallbacks(
        given,
        worker=worker,
        add_history=True,
        add_progbar=level != 0 and worker.is_first,
        verbose=level if worker.is_first else 0,
        epochs=epochs,
        steps=steps,
        model=model,
    )


def _validation_source(data: Any, steps: int | None, batch_size: int) -> SampleSource | None:
    if data is None:
        return None
    if isinstance(data, (tuple, list)):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        return _limited(sample_source(x, y, weight), steps, batch_size)
    return _limited(sample_source(data), steps, batch_size)


def _limited(source: SampleSource, steps: int | None, batch_size: int | None) -> SampleSource:
    """The first so many batches of a source."""
    if steps is None:
        return source
    return source.limited(steps * (batch_size or source.batch_size or BATCH))


def _validated(
    prepared: PreparedKeras,
    source: SampleSource | None,
    epoch: int,
    batch_size: int,
    every: int | Sequence[int],
) -> Mapping[str, float]:
    """What an epoch's validation adds to its logs."""
    if source is None or not prepared.model._should_eval(epoch, every if isinstance(every, int) else list(every)):
        return {}
    logs = evaluate_source(
        prepared.worker,
        prepared.model,
        source,
        batch_size=source.batch_size or batch_size,
        penalties=prepared.penalties,
    )
    return {f"val_{name}": value for name, value in logs.items()}
