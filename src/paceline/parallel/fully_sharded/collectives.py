"""The two collectives of sharded models, in the form that `fully_shard` calls, recorded in the flight recorder.

Also sums of sharded gradients that come *late*, when `fully_shard` has already finished with their unit. A schedule
that computes gradients of weights after those of inputs (`parallel/pipeline/split_backward.py`) accumulates them whole
in the parameters that autograd sees. Afterwards each worker gets its rows of the sum over all workers, as `fully_shard`
would have given it. Dims are split along their rows, equally for each worker, rounded up.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from paceline.comm.flight_recorder import FlightRecorder
from paceline.comm.group import WorkerGroup
from paceline.comm.sharded_tensors import local_part

__all__ = ["ShardAllGather", "ShardCollectives", "ShardReduceScatter", "reduce_late_gradients"]


class ShardCollectives:
    """Traffic of one worker's sharded models with the other workers of its replica."""

    def __init__(self) -> None:
        self.trail = 0  # a hash of the units that were gathered, in their order; its readers reset it
        self.waited_s = 0.0  # total wait for the other workers; on a GPU nothing is waited for
        self.num_bytes_sent = 0  # total bytes handed to the transport


class ShardCollective:
    """A collective of one unit of a model.

    `group` is the name of the workers in the flight recorder. CPU tensors use the transport `over`, a group of the same
    workers, if there is one; it records its calls itself. `stages`: CUDA tensors do so, too, through the host.
    """

    def __init__(
        self,
        recorder: FlightRecorder,
        *,
        group: str,
        unit: str,
        traffic: ShardCollectives,
        over: WorkerGroup | None = None,
        stages: bool = False,
    ) -> None:
        self._recorder, self._group, self._unit, self._traffic = recorder, group, unit, traffic
        self._over, self._stages = over, stages

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what is sent or received."""
        return torch.empty(size, dtype=dtype, device=device)

    def _shared(self, tensor: Tensor) -> WorkerGroup | None:
        return None if tensor.is_cuda and not self._stages else self._over

    @contextlib.contextmanager
    def _noted(self, kind: str, tensor: Tensor, *, is_async: bool) -> Iterator[str]:
        """Enter a collective that sends `tensor`, and yield its description.

        After an error the flight recorder still shows it, because it may be the cause.
        """
        what = f"{kind} of {self._unit}"
        self._traffic.num_bytes_sent += tensor.numel() * tensor.element_size()
        is_noted = self._shared(tensor) is None
        call = -1
        if is_noted:
            call = self._recorder.enter(kind, what, dtype=tensor.dtype, numel=tensor.numel(), group=self._group)
            if is_async or tensor.is_cuda:  # torch waits later, or in a stream
                yield what
                return
            self._recorder.wait(call)
        began = time.perf_counter()
        yield what
        self._traffic.waited_s += time.perf_counter() - began
        if is_noted:
            self._recorder.leave()


class ShardAllGather(ShardCollective):
    """Gathers a unit's parameters: each worker gets the rows of all workers."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._traffic.trail = zlib.crc32(self._unit.encode(), self._traffic.trail)
        with self._noted("all_gather", input_tensor, is_async=async_op) as what:
            if (over := self._shared(input_tensor)) is not None:
                return over.all_gather(input_tensor, output_tensor.view(over.size, -1).unbind(), what=what)
            # Its name from torch 2.13 on, which warns of the other name.
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            return gather(output_tensor, input_tensor, group=group, async_op=async_op)


class ShardReduceScatter(ShardCollective):
    """Sums a unit's gradients: each worker gets the sum of its own rows."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        with self._noted("reduce_scatter", input_tensor, is_async=async_op) as what:
            if (over := self._shared(input_tensor)) is not None:
                return over.reduce_scatter(input_tensor.view(over.size, -1).unbind(), output_tensor, what=what)
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # as above
            return scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def reduce_late_gradients(
    pairs: Sequence[tuple[Parameter, Parameter | None]], scatter: ShardReduceScatter, group: dist.ProcessGroup
) -> None:
    """Add this worker's rows of the sum of all workers' whole gradients to the gradients of one unit's sharded
    parameters.

    `pairs`: (sharded, whole), the same on all workers of `group`, which must all call it. The whole parameter is None,
    or has no gradient, if this worker's runs did not use it. Whole gradients are freed.
    """
    if not pairs:
        return
    size = group.size()
    sent = torch.cat([_by_worker(split, whole, size) for split, whole in pairs], 1)
    came = sent.new_empty(sent.shape[1])
    scatter(came, sent.view(-1), group, dist.ReduceOp.SUM)
    start = 0
    for split, whole in pairs:
        own = local_part(split)
        rows = came[start : start + own.numel()].view(own.shape)
        start += _num_sent(split, size)
        if split.grad is None:
            split.grad = _split_alike(split, rows.clone())
        else:
            local_part(split.grad).add_(rows)
        if whole is not None:
            whole.grad = None


def _by_worker(split: Parameter, whole: Parameter | None, size: int) -> Tensor:
    """Return the whole gradient as (worker, numbers), with zeros for missing rows or a missing gradient."""
    out = local_part(split).new_zeros(size, _num_sent(split, size))
    if whole is not None and whole.grad is not None:
        out.view(-1)[: split.numel()].copy_(whole.grad.reshape(-1))
    return out


def _num_sent(split: Parameter, size: int) -> int:
    """Return how many numbers each worker gets of a parameter, including the padding behind its last row."""
    return -(-split.shape[0] // size) * split.shape[1:].numel()


def _split_alike(split: Any, rows: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        rows, split.device_mesh, split.placements, run_check=False, shape=split.shape, stride=split.stride()
    )
