"""The norm of a replica of several workers, sent with the step metadata: that of the gradients of the step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline.comm.group import CompletedTransfer, SingleWorkerGroup
from paceline.plan import AllReduce, Raw
from paceline.sync.allreduce.gradient_buckets import CodecMemory
from paceline.sync.allreduce.gradient_reducer import GradientReducer


class Idle(SingleWorkerGroup):
    """A group of two; the other member adds nothing."""

    size = 2

    def __init__(self) -> None:
        self.sums: list[str] = []

    def all_reduce(self, tensor: Tensor, *, what: str) -> CompletedTransfer:
        self.sums.append(what)
        return CompletedTransfer()


def landed(gradients: GradientReducer, loss: Tensor, *, scale: float = 1.0) -> list[Tensor]:
    """The gradients that the optimizer sees."""
    gradients.begin(0)
    gradients.arm()
    loss.backward()
    gradients.flush([1.0])
    gradients.collect()
    gradients.land(scale=scale)
    return [parameter.grad for parameter in gradients.parameters if parameter.grad is not None]


def spread_over(model: nn.Module, all_workers: Idle) -> GradientReducer:
    """The sum of the only replica, which is spread over two workers."""
    return GradientReducer(
        model.named_parameters(),
        group=SingleWorkerGroup(),
        all_workers=all_workers,
        shard_group=all_workers,
        sync=AllReduce(),
        wire=Raw(),
    )


def test_it_counts_what_was_still_to_be_sent_when_there_were_other_replicas() -> None:
    model, all_workers = nn.Linear(3, 2), Idle()
    gradients = spread_over(model, all_workers)
    gradients.remember(CodecMemory({"weight": torch.full((2, 3), 10.0)}, {}))
    for is_told in (False, True):  # then nothing is left to be sent
        all_workers.sums.clear()
        expected = torch.nn.utils.get_total_norm(landed(gradients, model(torch.ones(1, 3)).sum(), scale=0.5))
        torch.testing.assert_close(gradients.norm(), expected)
        assert ("the norm of the gradients" not in all_workers.sums) == is_told
        gradients.settle()


def test_it_counts_rows_that_come_twice_in_a_sparse_gradient_once_as_their_sum() -> None:
    model = nn.Embedding(4, 3, sparse=True)
    gradients = spread_over(model, Idle())
    expected = torch.nn.utils.get_total_norm(landed(gradients, model(torch.tensor([1, 1, 2])).sum()))
    torch.testing.assert_close(gradients.norm(), expected)


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_gradients_that_overflow_when_they_land_are_not_finite(scale: float) -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(1, dtype=kind)) for kind in (torch.float16, torch.float32)])
    half, single = model
    gradients = spread_over(model, Idle())
    found = landed(gradients, (half * 40_000.0).sum() + single.sum(), scale=scale)
    is_finite = all(bool(torch.isfinite(gradient).all()) for gradient in found)
    assert gradients.is_finite() == is_finite == (scale == 1.0)
