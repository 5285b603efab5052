"""What the workers of a run tell each other on the script's behalf: means, values, and that all have come to a place.

Everybody takes part, between two steps: inside of one others may have more or fewer micro-batches, and would be in
another collective. Who comes later has not been there for what was told before the first loop over batches: it is given
the results, as the others had them (`Prelude`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from paceline.comm.group import WorkerGroup
from paceline.worker.agreement import Agreement
from paceline.worker.prelude import Prelude

__all__ = ["Talk"]

T = TypeVar("T")


class Talk:
    """One worker's part in it. `is_in_step()`: a walk over a batch is under way."""

    def __init__(
        self,
        *,
        group: WorkerGroup,
        agreement: Agreement,
        prelude: Prelude,
        device: torch.device,
        is_in_step: Callable[[], bool],
        is_apart: Callable[[], bool] = lambda: False,
        catch_up: Callable[[], None] = lambda: None,
    ) -> None:
        """`is_apart()`: workers do not do the same things in the same order at present. `catch_up()` is called by all
        at the beginning of each operation, and gives them the same weights."""
        self._is_apart, self._catch_up = is_apart, catch_up
        self._group, self._agreement, self._prelude = group, agreement, prelude
        self._device, self._is_in_step = device, is_in_step

    def begin_steps(self, *, keeps: bool) -> None:
        """The first loop over batches begins. A newcomer is taken in here, and has a member's state then.

        `keeps`: what this worker does is kept in memory that outlives it.
        """
        if self._prelude.is_over:
            return
        self._agreement.begin_steps(keeps=keeps)
        self._prelude.end(self._group.index == 0)

    def together(self, operation: Callable[[], T]) -> T:
        """Do an operation of all workers. Newcomers take the results of those before the first loop from the others."""
        self._agreement.come_together()
        if self._agreement.is_newcomer:
            return self._prelude.next()

        def caught_up() -> T:
            self._catch_up()
            return operation()

        value = self._agreement.run(caught_up)
        self._prelude.note(value)
        return value

    def require_between_steps(self, what: str) -> None:
        """Raise RuntimeError inside a step."""
        if self._is_in_step():
            raise RuntimeError(f"{what} was called inside a step (a walk over a batch); call it between steps")

    def require_together(self, what: str) -> None:
        """Raise RuntimeError where not all workers would come to it: inside a step, or where batches are dealt."""
        self.require_between_steps(what)
        if self._is_apart():
            raise RuntimeError(
                f"{what} was called in a loop over batches under ParameterServer(staleness=...) or (drop=...): "
                "replicas take different numbers of batches there, so not all would come to it. Call it before or "
                "after the loop"
            )

    def average(self, value: Tensor | float) -> Tensor:
        """Return the mean of a tensor or number over all workers."""
        self.require_together("worker.average()")
        if isinstance(value, Tensor):
            tensor = value.detach().clone()
        else:
            tensor = torch.tensor(value, dtype=torch.float64, device=self._device)

        def mean() -> Tensor:
            total = tensor.clone()
            self._group.all_reduce(total, what="worker.average").wait()
            return total / self._group.size

        return self.together(mean)

    def gather(self, value: T) -> list[T]:
        """Return every worker's value, in the order of their ranks."""
        self.require_together("worker.gather()")
        return self.together(lambda: self._group.gather_objects(value))

    def broadcast(self, value: T, *, source: int | None) -> T:
        """Return the value of the worker whose rank is `source` (None: of the first one). ValueError, on all workers,
        where there is no such worker (any more)."""
        self.require_together("worker.broadcast()")

        def send() -> T:
            ranks = self._agreement.ranks  # each time: when it is done again, the members are others
            if source is not None and source not in ranks:
                raise ValueError(
                    f"worker.broadcast(source={source}): there is no worker {source}; present are {_listed(ranks)}. "
                    "Without `source` the first of them sends"
                )
            return self._group.broadcast_object(value, source=0 if source is None else ranks.index(source))

        return self.together(send)

    def wait(self) -> None:
        """Return when all workers have come here."""
        self.require_together("worker.wait()")
        self.together(self._group.barrier)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
