"""Batch normalization over the batches of all workers, on the CPU as well."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.compat.horovod import session as sessions
from paceline.compat.horovod.differentiable import allreduce
from paceline.compat.horovod.requests import Reduction

__all__ = ["SyncBatchNorm"]

HALF = (torch.float16, torch.bfloat16)  # neither holds the sums, nor the count, of many numbers


class SyncBatchNorm(nn.BatchNorm1d):
    """`torch.nn.BatchNorm` of any number of dimensions, whose mean and variance are those of all workers' batches.

    Workers may have different numbers of samples. The sums travel in the forward and, for the gradients, in the
    backward; all workers must run both. Moments of half-precision inputs are computed in float32, as torch does.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        uses_batch = self.training or self.running_mean is None
        if not uses_batch or not sessions.is_open() or sessions.current_session().size == 1:
            return super().forward(input)
        mean, variance, count = _moments(input)
        if self.training and self.track_running_stats:
            self._take_moments(mean.detach(), variance.detach(), count)
        shape = (1, -1, *[1] * (input.dim() - 2))
        normal = (input - mean.view(shape)) * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(input.dtype)

    def _take_moments(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Move the running moments, as torch does: the variance without bias."""
        if self.num_batches_tracked is None or self.running_mean is None or self.running_var is None:
            return
        self.num_batches_tracked.add_(1)
        momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
            unbiased = variance * (count / (count - 1).clamp(min=1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


def _moments(input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and variance of each channel over all workers, and how many numbers there are of each."""
    rows = input.transpose(0, 1).flatten(1)
    if rows.dtype in HALF:
        rows = rows.float()
    count = rows.new_full((1,), rows.shape[1])
    sums = allreduce(torch.cat([rows.sum(1), count]), op=Reduction.SUM)
    total = sums[-1:].detach()
    mean = sums[:-1] / total
    squares = allreduce((rows - mean[:, None]).square().sum(1), op=Reduction.SUM)
    return mean, squares / total, total
