"""Sums of split gradients that come late, when `fully_shard` has passed their unit already.

A schedule that forms gradients of weights after those of inputs (`parallel/stages/halves.py`) lets them add up whole,
in what autograd has seen. When they are there, each worker gets its rows of the sum of everybody's, as `fully_shard`
would have done: dims are cut along their rows, as many for each worker, rounded up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from paceline.comm.split import local_part
from paceline.parallel.exchange import Scatter

__all__ = ["sum_rows"]


def sum_rows(pairs: Sequence[tuple[Parameter, Parameter | None]], scatter: Scatter, group: dist.ProcessGroup) -> None:
    """Add its rows of the sum of everybody's whole gradients to the gradient of each split parameter of one unit.

    `pairs`: (split, whole), the same on all workers of `group`, which must all call it; the whole one is None, or has
    no gradient, where a worker's runs did not use it. Whole gradients are let go of.
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
    """The whole gradient as (worker, numbers), with noughts where there are no rows for a worker, or none at all."""
    out = local_part(split).new_zeros(size, _num_sent(split, size))
    if whole is not None and whole.grad is not None:
        out.view(-1)[: split.numel()].copy_(whole.grad.reshape(-1))
    return out


def _num_sent(split: Parameter, size: int) -> int:
    """How many numbers each worker gets of a parameter, those behind its last row included."""
    return -(-split.shape[0] // size) * split.shape[1:].numel()


def _split_alike(split: Any, rows: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        rows, split.device_mesh, split.placements, run_check=False, shape=split.shape, stride=split.stride()
    )
