"""The collectives that scripts call (average, gather, wait), and their replay for newcomers.

All workers take part, between two steps. Inside a step the others may have more or fewer micro-batches, and would be
in another collective.

A newcomer of an elastic run executes the program from its first line, while the others are far beyond. It has missed
the gathers, averages and evaluations before their first loop over batches. Their results are kept in the
key-value store, and `SetupReplay` returns them to the newcomer's calls.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.group import WorkerGroup
from paceline.errors import SyncError
from paceline.worker.membership.consensus import Consensus

__all__ = ["SetupReplay", "WorkerCollectives"]

T = TypeVar("T")


class WorkerCollectives:
    """One worker's calls. `is_in_step()`: a gradient pass over a batch is running."""

    def __init__(
        self,
        *,
        group: WorkerGroup,
        consensus: Consensus,
        setup_replay: SetupReplay,
        device: torch.device,
        is_in_step: Callable[[], bool],
        is_apart: Callable[[], bool] = lambda: False,
        catch_up: Callable[[], None] = lambda: None,
    ) -> None:
        """`is_apart()`: workers are detached, and call different things at present. `catch_up()` gives all workers the
        same weights; all call it at the beginning of each operation."""
        self._is_apart, self._catch_up = is_apart, catch_up
        self._group, self._consensus, self._setup_replay = group, consensus, setup_replay
        self._device, self._is_in_step = device, is_in_step

    def begin_steps(self, *, keeps: bool) -> None:
        """The first loop over batches begins. A newcomer becomes a member here, and has a member's state then.

        `keeps`: this worker takes memory checkpoints, which outlive it.
        """
        if self._setup_replay.is_over:
            return
        self._consensus.begin_steps(keeps=keeps)
        self._setup_replay.end(self._group.index == 0)

    @property
    def has_begun(self) -> bool:
        """Whether the first loop over batches has begun: newcomers hear nothing of what is called later."""
        return self._setup_replay.is_over

    def together(self, operation: Callable[[], T]) -> T:
        """Do an operation of all workers. Before the first loop a newcomer gets the result that the others had."""
        self._consensus.rejoin_group()
        if self._consensus.is_newcomer:
            return self._setup_replay.next()

        def caught_up() -> T:
            self._catch_up()
            return operation()

        value = self._consensus.run(caught_up)
        self._setup_replay.note(value)
        return value

    def require_between_steps(self, what: str) -> None:
        """Raise RuntimeError inside a step."""
        if self._is_in_step():
            raise RuntimeError(f"{what} was called inside a step (a gradient pass over a batch); call it between steps")

    def require_together(self, what: str) -> None:
        """Raise RuntimeError where not all workers would take part: inside a step, or with asynchronous updates."""
        self.require_between_steps(what)
        if self._is_apart():
            raise RuntimeError(
                f"{what} was called in a loop over batches under ParameterServer(staleness=...) or (drop=...): "
                "replicas take different numbers of batches there, so not all would take part. Call it before or "
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

    def wait(self) -> None:
        """Return when all workers have called this."""
        self.require_together("worker.wait()")
        self.together(self._group.barrier)


KEY = "paceline/setup_replay"
MOST_BYTES = 4 << 20  # bytes, of all values together: they are sent in one message


class SetupReplay:
    """The results of one worker's calls, in their order; `store` is None where no worker can join later."""

    def __init__(self, store: dist.Store | None) -> None:
        self.is_over = False
        self._store = store
        self._values: list[Any] = []
        self._num_taken = 0
        self._is_read = False

    def note(self, value: Any) -> None:
        """Keep a result, until the first loop begins."""
        if self._store is not None and not self.is_over:
            self._values.append(value)

    def next(self) -> Any:
        """Return what this call returned to the others, for a newcomer."""
        if self._store is None:
            raise SyncError("there is no key-value store with the results of calls before this worker joined")
        if not self._is_read:
            self._store.wait([KEY])
            self._values = torch.load(io.BytesIO(base64.b64decode(self._store.get(KEY))), weights_only=False)
            self._is_read = True
        self._num_taken += 1
        if self._num_taken > len(self._values):
            raise SyncError(
                "this worker joins a run whose members exchanged more than "
                f"{MOST_BYTES >> 20} MiB by worker.gather() and the like before their first step, "
                "or fewer values than its own script needs: compute large values on each worker instead of sending them"
            )
        return self._values[self._num_taken - 1]

    def end(self, is_first: bool) -> None:
        """The first loop begins, or another worker has become the first: the first worker stores the results."""
        self.is_over = True
        if is_first and self._store is not None:
            stream = io.BytesIO()
            torch.save(self._values, stream)
            if stream.tell() > MOST_BYTES:
                stream = io.BytesIO()
                torch.save([], stream)
            self._store.set(KEY, base64.b64encode(stream.getvalue()).decode())
