"""An exponential moving average of a model's weights (EMA), for evaluation and for export.

Each worker averages what it has of each parameter: rows, a slice, its own stages or experts. Averaging works place by
place, so nothing is sent. The averages are kept as the state of an optimizer that takes no steps. So they are saved by
the parameters' names, go from any layout to any other, and reach newcomers as optimizer state does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.sharded_tensors import local_part
from paceline.parallel.partial_parameter import on_parts

__all__ = ["AverageState", "ExponentialMovingAverage", "state_of"]

AVERAGE, COUNT = "average", "num_updates"  # keys in checkpoints


class AverageState(Optimizer):
    """Holds the average of each parameter as an optimizer's state; never steps."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {COUNT: 0})
        self.is_swapped = False
        self.close: Callable[[], None] = lambda: None  # frees rows that are gathered at present, which are copies
        self.begin()

    def begin(self) -> None:
        """Let the averages be the present weights."""
        with torch.no_grad(), on_parts():
            for parameter in self.held():
                self.state[parameter] = {AVERAGE: parameter.detach().clone(memory_format=torch.preserve_format)}
        self.num_updates = 0

    def held(self) -> list[nn.Parameter]:
        """The parameters of which this worker has something."""
        return [one for group in self.param_groups for one in group["params"] if not one.is_meta]

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """What is here of each average and of its parameter, both live."""
        return [(local_part(self.state[one][AVERAGE]), local_part(one)) for one in self.held()]

    @property
    def num_updates(self) -> int:
        return int(self.param_groups[0][COUNT])

    @num_updates.setter
    def num_updates(self, value: int) -> None:
        for group in self.param_groups:
            group[COUNT] = value

    def require_own_weights(self, what: str) -> None:
        """Raise RuntimeError while the averages are in the model."""
        if self.is_swapped:
            raise RuntimeError(
                f"{what} was called while the averages of ema.swapped_in() are in the model: the weights that are "
                "trained are elsewhere. Leave the `with` block first"
            )

    @torch.no_grad()
    def exchange(self) -> None:
        """Let averages and weights change places."""
        self.close()
        with on_parts():
            for average, weight in self.pairs():
                kept = weight.clone()
                weight.copy_(average)
                average.copy_(kept)

    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("an ExponentialMovingAverage takes no steps: call ema.update() after each step")


class ExponentialMovingAverage:
    """An exponential moving average (EMA) of the weights of a prepared model, right under every layout.

    Make it from a prepared model, and prepare it, too: then it is in checkpoints under the name "average". `update()`
    after each step moves each average: `average = decay * average + (1 - decay) * weight`. It begins with the weights
    at `worker.prepare(ema)`. With `warmup=True` the n-th update (from 0) uses `min(decay, (1 + n) / (10 + n))`, so the
    first weights are soon forgotten.

    Averages have the dtype of their parameters, and are on the same device. Buffers are not averaged: with
    `swapped_in()` the model has its present ones, such as running means. Raises ValueError for a decay that is not
    between 0 and 1. Under plans whose replicas have different weights, `worker.prepare(ema)` raises PlanError.

    Example::

        def train(worker):
            model = worker.prepare(torch.nn.Linear(8, 1))
            optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
            ema = worker.prepare(paceline.ExponentialMovingAverage(model, decay=0.999))
            step = worker.stepper(model, optim, torch.nn.functional.mse_loss)
            data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
            for batch in worker.batches(data, epochs=2):
                step(batch)
                ema.update()
            with ema.swapped_in():
                worker.save_model("average.safetensors")

        # paceline.run(train, workers=4, plan="batch(size=16)")
    """

    def __init__(self, model: nn.Module, *, decay: float = 0.999, warmup: bool = False) -> None:
        if not 0 <= decay <= 1:
            raise ValueError(f"ExponentialMovingAverage(decay={decay}): decay must be between 0 and 1, such as 0.999")
        self.decay, self.warmup = decay, warmup
        self._state = AverageState(list(model.parameters()))

    @property
    def num_updates(self) -> int:
        """How often `update()` was called, over all attempts."""
        return self._state.num_updates

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the present weights; call it after each step, on all workers.

        Raises RuntimeError while the averages are swapped in.
        """
        self._state.require_own_weights("ema.update()")
        num = self._state.num_updates
        decay = min(self.decay, (1 + num) / (10 + num)) if self.warmup else self.decay
        with on_parts():
            for average, weight in self._state.pairs():
                if average.is_floating_point() or average.is_complex():
                    average.lerp_(weight, 1 - decay)
                else:
                    average.copy_(weight)
        self._state.num_updates = num + 1

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """While it lasts, the model has the averages as its weights; its own come back however it ends.

        Evaluate, and save weights by `worker.save_model`, within it. Steps, `worker.save()` and `ema.update()` raise
        RuntimeError there. All workers enter it. It needs no memory beyond one parameter.

        Example::

            with ema.swapped_in():
                means = worker.evaluate(model, dataset, {"mse": torch.nn.functional.mse_loss})
        """
        self._state.require_own_weights("ema.swapped_in()")
        self._state.exchange()
        self._state.is_swapped = True
        try:
            yield
        finally:
            self._state.is_swapped = False
            self._state.exchange()


def state_of(average: ExponentialMovingAverage) -> AverageState:
    """Return what is registered for an average, and saved."""
    return average._state  # pyright: ignore[reportPrivateUsage]  # not for users
