"""Closures of `optim.step(closure)`: they return the loss of the whole global batch, equal on all workers.

Optimizers such as LBFGS decide by the loss whether they go on. A worker's own loss would let replicas take other
branches, and drift apart. The gradients are those of the global batch already, since the closure loops over the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.worker.data.step_batch import StepBatch
from paceline.worker.step.gradient_pass import StepExecutor

__all__ = ["closure_in", "global_closure", "replaced_closure"]

HOW = (
    "Write: def closure(): optim.zero_grad()   then   for x, y in batch: loss = ...; worker.backward(loss)   then   "
    "return loss   and, in the loop over batches, optim.step(closure)"
)


def closure_in(args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Return the closure among the arguments of an optimizer's step, which begin with the optimizer."""
    found = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return found if callable(found) else None


def replaced_closure(
    args: Sequence[Any], kwargs: dict[str, Any], closure: Callable[[], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with another closure."""
    if "closure" in kwargs:
        return tuple(args), {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs


def global_closure(
    closure: Callable[[], Any],
    *,
    batch: StepBatch,
    executor: StepExecutor,
    parameters: Sequence[Tensor],
    check_unchanged: Callable[[], None],
) -> Callable[[], Any]:
    """Return a closure that calls the user's, and returns the global loss of its pass over the batch.

    Calling it raises RuntimeError where the user's makes no pass over the batch, but gradients; or none at all.
    """

    def evaluate() -> Any:
        passes, before = batch.num_passes, _versions(parameters)
        own = closure()
        if executor.outcome is None or not batch.num_passes:
            raise RuntimeError(
                "the closure given to optim.step() made no complete pass over the batch, so its gradients are not "
                f"those of the global batch. {HOW}"
            )
        if batch.num_passes == passes and _versions(parameters) != before:
            raise RuntimeError(
                "the closure given to optim.step() made gradients without a pass over the batch (loss.backward()?), so "
                f"they would differ between workers. {HOW}"
            )
        check_unchanged()
        loss = executor.outcome.loss
        if isinstance(own, Tensor):
            return torch.full_like(own.detach(), loss) if own.is_floating_point() else torch.tensor(loss)
        return loss if own is not None else torch.tensor(loss)

    return evaluate


def _versions(parameters: Sequence[Tensor]) -> list[tuple[int, int]]:
    gradients = [parameter.grad for parameter in parameters]
    return [(id(one), -1 if one is None else one._version) for one in gradients]
