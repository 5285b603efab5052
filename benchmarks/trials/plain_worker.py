"""The reference: the calls of a worker, in plain torch, in one process, without any code of Paceline's steps.

Only the order of samples is Paceline's (a pure function), so that both see the same micro-batches.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from paceline.plan import Batch
from paceline.schedule.micro_batches import micro_batches, step_ranges
from paceline.schedule.sample_order import sample_indices

__all__ = ["PlainWorker"]


class PlainBatch:
    """The micro-batches of one step; when all were seen, gradients of sums are divided by the count."""

    def __init__(self, micros: Sequence[Any], sizes: Sequence[int], parameters: Callable[[], list[Tensor]]) -> None:
        self.micros, self.sizes, self._parameters = micros, sizes, parameters
        self.size = 0  # of the micro-batch that is being run
        self.weight, self.total = 0.0, 0.0
        self.ends_epoch = False

    def __iter__(self) -> Iterator[Any]:
        self.weight = self.total = 0.0  # a second pass over the batch is a step of its own
        for micro, size in zip(self.micros, self.sizes, strict=True):
            self.size = size
            yield micro
        for parameter in self._parameters():
            if parameter.grad is not None:
                parameter.grad.div_(self.weight or 1.0)

    @property
    def loss(self) -> float:
        return self.total / (self.weight or 1.0)


class PlainWorker:
    """What a training function is given in place of a worker."""

    rank, workers, is_first, device, step = 0, 1, True, torch.device("cpu"), 0

    def __init__(self, batch: Batch, *, is_still: bool = False) -> None:
        """`is_still`: gradients are 0, and prepared optimizers take no steps, which shows what steps change."""
        self._sizes, self._is_still = batch, is_still
        self._models: list[nn.Module] = []
        self._batch: PlainBatch | None = None

    def prepare(self, prepared: Any, **_: Any) -> Any:
        if isinstance(prepared, nn.Module):
            self._models.append(prepared)
        if self._is_still and isinstance(prepared, torch.optim.Optimizer):
            prepared.step = types.MethodType(_no_step, prepared)  # schedulers ask for a method
        return prepared

    def batches(
        self, dataset: Any, *, epochs: int = 1, collate: Callable[[Sequence[Any]], Any] | None = None, **_: Any
    ) -> Iterator[PlainBatch]:
        sizes, samples = self._sizes, len(dataset)
        for epoch in range(epochs):
            order = sample_indices(
                seed=sizes.seed, epoch=epoch, num_samples=samples, positions=np.arange(samples), shuffle=True
            ).tolist()
            for start, stop in step_ranges(num_samples=samples, size=sizes.size or 0, drop_last=False):
                parts = [order[one.start : one.stop] for one in micro_batches(start, stop, sizes.micro or 0)]
                micros = [(collate or default_collate)([dataset[one] for one in part]) for part in parts]
                self._batch = PlainBatch(micros, [len(part) for part in parts], self._parameters)
                self._batch.ends_epoch = stop == samples
                yield self._batch
                self.step += 1

    def backward(self, loss: Any) -> None:
        """A mean counts as its samples' share of the step; a sum is divided by the count of all when all are in."""
        if self._batch is None:
            raise RuntimeError("backward outside of a loop over a batch")
        batch = self._batch
        total, weight = loss if isinstance(loss, tuple) else (loss * (batch.size / sum(batch.sizes)), None)
        (total * 0.0 if self._is_still else total).backward()
        batch.total += float(total)
        batch.weight += 0.0 if weight is None else float(weight)

    def clip_gradients(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self._parameters(), max_norm)

    def stepper(
        self, model: Any, optimizer: Any, loss: Any = None, *, forward: Any = None, clip_norm: float | None = None
    ) -> Callable[[PlainBatch], float]:
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)

        def step(batch: PlainBatch) -> float:
            for micro in batch:
                self.backward(forward(model, micro) if forward is not None else loss(model(micro[0]), micro[1]))
            if clip_norm is not None:
                self.clip_gradients(clip_norm)
            for one in optimizers:
                one.step()
                one.zero_grad()
            return batch.loss

        return step

    def evaluate(
        self,
        model: nn.Module,
        dataset: Any,
        measures: Mapping[str, Callable[[Any, Any], Any]],
        *,
        forward: Callable[[Any, Any], Any] | None = None,
        collate: Callable[[Sequence[Any]], Any] | None = None,
        **_: Any,
    ) -> dict[str, float]:
        """As `worker.evaluate`; nothing for models with buffers, which the micro-batches of a step update together."""
        if any(buffer.is_floating_point() for one in self._models for buffer in one.buffers()):
            return {}
        sums = dict.fromkeys(measures, 0.0)
        weights = dict.fromkeys(measures, 0.0)
        was_training = model.training
        model.eval()
        with torch.no_grad():
            for part in micro_batches(0, len(dataset), self._sizes.micro or 1):
                micro = (collate or default_collate)([dataset[one] for one in range(part.start, part.stop)])
                output, target = forward(model, micro) if forward is not None else (model(micro[0]), micro[1])
                for name, measure in measures.items():
                    found = measure(output, target)
                    total, weight = found if isinstance(found, tuple) else (found * part.num_samples, part.num_samples)
                    sums[name] += float(total)
                    weights[name] += float(weight)
        model.train(was_training)
        return {name: sums[name] / weights[name] for name in measures}

    def report(self, **_: Any) -> None:
        pass

    def _parameters(self) -> list[Tensor]:
        found = {id(p): p for model in self._models for p in model.parameters() if p.requires_grad}
        return list(found.values())


def _no_step(_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """What an optimizer does in place of a step; a closure is called once, for its loss."""
    return closure() if closure is not None else None
