"""The epochs and steps of `fit`: what Keras does around a step, around Paceline's step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from paceline.compat.keras.callbacks import CallbackStates, WorkerCallbacks, decides_in_steps
from paceline.compat.keras.prepared import PreparedKeras
from paceline.worker.worker import Worker

__all__ = ["FitLoop", "FitProgress"]


class FitProgress:
    """How far one call of `fit` is, for checkpoints: `worker.prepare` takes it."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.start: int | None = None  # steps of the run before this call
        self.num_ended = 0  # epochs whose end is done
        self.is_stopped = False
        self.callbacks: WorkerCallbacks | None = None
        self._states = CallbackStates(keeps_weights=worker.plan.layout.workers_each == 1)
        self._waiting: list[Mapping[str, Any]] = []  # states of callbacks, until these have begun

    @property
    def is_resumed(self) -> bool:
        """Whether the call goes on from a checkpoint."""
        return self.start is not None

    def state_dict(self) -> dict[str, Any]:
        """The state, for a checkpoint or a newcomer."""
        states = self._waiting if self.callbacks is None else self._states.captured(self.callbacks.own())
        return {
            "start": self.start,
            "num_ended": self.num_ended,
            "is_stopped": self.is_stopped,
            "callbacks": list(states),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.start, self.num_ended, self.is_stopped = state["start"], state["num_ended"], state["is_stopped"]
        self._waiting = list(state["callbacks"])
        if self.callbacks is not None:
            self._give_back(self.callbacks)

    def begin(self, callbacks: WorkerCallbacks) -> None:
        """Have these callbacks begin, which resets them, and give them back what they remembered."""
        callbacks.begin(is_resumed=self.is_resumed)
        self._states.begin(callbacks.own())
        self.callbacks = callbacks
        self._give_back(callbacks)

    def _give_back(self, callbacks: WorkerCallbacks) -> None:
        if self._waiting:
            self._states.restore(callbacks.own(), self._waiting)
            self._waiting = []


class FitLoop:
    """One call of `fit`, once its model is prepared."""

    def __init__(
        self,
        prepared: PreparedKeras,
        progress: FitProgress,
        callbacks: WorkerCallbacks,
        *,
        steps: int,
        first_epoch: int,
        epochs: int,
        validate: Callable[[int], Mapping[str, float]],
    ) -> None:
        """`steps`: of an epoch. `validate(epoch)` returns what is added to the epoch's logs."""
        self._prepared, self._progress, self._callbacks = prepared, progress, callbacks
        self._steps, self._first_epoch, self._epochs = steps, first_epoch, epochs
        self._validate = validate
        self._asks_first = decides_in_steps(callbacks.callbacks)

    @property
    def num_steps(self) -> int:
        """All steps of the call."""
        return max(0, self._epochs - self._first_epoch) * self._steps

    def num_passes(self, steps_of_data: int) -> int:
        """How often the data is passed over."""
        return max(1, math.ceil(self.num_steps / steps_of_data))

    def run(self, batches: Any) -> None:
        """Take the steps that are left."""
        prepared, progress, model = self._prepared, self._progress, self._prepared.model
        worker, callbacks = prepared.worker, self._callbacks
        model.stop_training = False
        progress.begin(callbacks)
        if progress.start is None:
            progress.start = worker.step
        logs: Mapping[str, Any] = {}
        for batch in () if progress.is_stopped else batches:
            number = worker.step - progress.start
            if number >= self.num_steps:
                break
            epoch, index = divmod(number, self._steps)
            epoch += self._first_epoch
            if index == 0:
                model.reset_metrics()
                callbacks.on_epoch_begin(epoch)
            model.train()
            logs = self._take_step(batch, index)
            if index == self._steps - 1 or model.stop_training:
                logs = self._end_epoch(epoch)
            if model.stop_training or number == self.num_steps - 1:
                progress.is_stopped = True
                break
        model.eval()
        prepared.optimizer.finish()
        callbacks.on_train_end(logs=logs)

    def _take_step(self, batch: Any, index: int) -> Mapping[str, Any]:
        prepared, callbacks, model = self._prepared, self._callbacks, self._prepared.model
        callbacks.on_train_batch_begin(index)
        prepared.forward.num_step = batch.num_here
        loss = prepared.step(batch)
        model._loss_tracker.update_state(loss.float(), sample_weight=batch.num_samples)
        prepared.worker.report(loss=loss)
        logs: Mapping[str, Any] = model.get_metrics_result()
        callbacks.on_train_batch_end(index, logs)
        if self._asks_first:
            self._decide()
        return logs

    def _end_epoch(self, epoch: int) -> Mapping[str, Any]:
        model, progress = self._prepared.model, self._progress
        logs: dict[str, Any] = dict(model.get_metrics_result())
        model.eval()
        logs.update(self._validate(epoch))
        # A stop in a step's callback ends the epoch here, as in Keras.
        self._callbacks.on_epoch_end(epoch, logs)
        progress.num_ended = epoch + 1
        self._decide()
        return logs

    def _decide(self) -> None:
        """Have all workers stop, or use a learning rate, as the first one does."""
        model, optimizer = self._prepared.model, self._prepared.keras_optimizer
        is_fixed = not hasattr(optimizer._learning_rate, "assign")
        own = bool(model.stop_training), None if is_fixed else float(optimizer.learning_rate)
        stop, rate = self._prepared.worker.gather(own)[0]
        model.stop_training = stop
        if rate is not None and rate != own[1]:
            optimizer.learning_rate = rate
        self._prepared.optimizer.note_rate()  # a checkpoint may come before the next step
