"""What callbacks remember goes on after a restart, with the settings that the script has then."""

from __future__ import annotations

import os
import types
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import pytest

from paceline.compat.keras.callbacks import CallbackStates, WorkerCallbacks

keras.utils.set_random_seed(3)  # imports TensorFlow where that is installed, which changes the environment


class Counter(keras.callbacks.Callback):
    def __init__(self, every: int) -> None:
        super().__init__()
        self.every, self.num_epochs, self.losses = every, 0, np.zeros(3)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.num_epochs += 1
        self.losses[epoch] = logs["loss"]


def begun(patience: int, min_delta: float, every: int) -> tuple[CallbackStates, list[Any]]:
    stopping = keras.callbacks.EarlyStopping("loss", patience=patience, min_delta=min_delta)
    stopping.set_model(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
    callbacks, states = [stopping, Counter(every)], CallbackStates(keeps_weights=True)
    for one in callbacks:
        one.on_train_begin()
    states.begin(callbacks)
    return states, callbacks


def end_epoch(callbacks: list[Any], epoch: int, loss: float) -> None:
    for one in callbacks:
        one.on_epoch_end(epoch, {"loss": loss})


def test_memory_is_restored_and_settings_are_the_scripts() -> None:
    states, callbacks = begun(patience=3, min_delta=0.1, every=2)
    end_epoch(callbacks, 0, 1.0)
    end_epoch(callbacks, 1, 0.95)
    saved = states.captured(callbacks)
    states, (stopping, counter) = begun(patience=9, min_delta=0.5, every=7)
    states.restore([stopping, counter], saved)
    assert (stopping.wait, stopping.best) == (1, 1.0)
    assert (stopping.patience, stopping.min_delta) == (9, -0.5), "Keras negates it for a loss"
    assert (counter.num_epochs, counter.losses.tolist(), counter.every) == (2, [1.0, 0.95, 0.0], 7)


def test_callbacks_that_go_on_forget_what_came_after_the_state() -> None:
    states, callbacks = begun(patience=3, min_delta=0.1, every=2)
    first = states.captured(callbacks)
    end_epoch(callbacks, 0, 1.0)
    end_epoch(callbacks, 1, 1.0)
    states.restore(callbacks, first)
    stopping, counter = callbacks
    assert (stopping.wait, stopping.best, stopping.min_delta) == (0, None, -0.1)
    assert (counter.num_epochs, counter.losses.tolist()) == (0, [0.0, 0.0, 0.0])


@pytest.mark.parametrize("is_first", [True, False])
def test_classes_made_of_writers_run_on_the_first_worker(is_first: bool, tmp_path: Any) -> None:
    class OwnLogger(keras.callbacks.CSVLogger):
        pass

    layout = types.SimpleNamespace(workers_each=1)
    worker: Any = types.SimpleNamespace(is_first=is_first, plan=types.SimpleNamespace(layout=layout))
    given = [OwnLogger(str(tmp_path / "log.csv")), Counter(1)]
    callbacks = WorkerCallbacks(given, worker=worker)
    callbacks.begin(is_resumed=False)
    assert [type(one) for one in callbacks.callbacks] == ([OwnLogger, Counter] if is_first else [Counter])
    assert [type(one) for one in callbacks.own()] == [Counter]
    callbacks.on_train_end()
