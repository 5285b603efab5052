"""Adasum's weights follow from inner products alone, and say what its paper's tree of pairs says."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from adasum_reference import combined
from paceline.comm.group import CompletedTransfer, SingleWorkerGroup
from paceline.errors import PlanError
from paceline.plan import AllReduce, Plan, Raw
from paceline.sync.allreduce.adasum import AdasumBucket, coefficients


def drawn(count: int, size: int, seed: int = 0) -> Tensor:
    return torch.randn(count, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def weighted(gradients: Tensor) -> Tensor:
    return coefficients((gradients @ gradients.mT)[None])[0] @ gradients


@pytest.mark.parametrize("count", range(1, 10))
@pytest.mark.parametrize("empty", [(), (0,), (1, 2)], ids=str)
def test_the_weights_give_what_the_tree_of_pairs_gives(count: int, empty: tuple[int, ...]) -> None:
    gradients = drawn(count, 40) + 0.5  # neither orthogonal nor equal
    for number in empty:
        gradients[number % count] = 0.0  # a replica that had no micro-batch
    torch.testing.assert_close(weighted(gradients), combined(list(gradients)), rtol=1e-12, atol=1e-12)


@given(count=st.integers(1, 20), seed=st.integers(0, 1000), scale=st.floats(1e-12, 1e12))
def test_of_what_all_agree_on_there_is_one_and_of_what_is_orthogonal_all(count: int, seed: int, scale: float) -> None:
    one = drawn(1, 25, seed) * scale
    torch.testing.assert_close(weighted(one.expand(count, -1)), one[0], rtol=1e-9, atol=0.0)
    lengths = drawn(1, count, seed) * scale
    orthogonal = torch.eye(25, dtype=torch.float64)[:count] * lengths.mT
    torch.testing.assert_close(weighted(orthogonal), orthogonal.sum(0), rtol=1e-9, atol=0.0)


@given(count=st.integers(2, 9), seed=st.integers(0, 1000), factor=st.floats(0.01, 100))
def test_a_common_factor_comes_out_as_it_went_in(count: int, seed: int, factor: float) -> None:
    gradients = drawn(count, 12, seed)
    torch.testing.assert_close(weighted(gradients * factor), weighted(gradients) * factor, rtol=1e-9, atol=1e-12)


def test_each_parameter_is_combined_by_itself() -> None:
    gradients = [drawn(3, 6, seed) for seed in (1, 2)]
    both = coefficients(torch.stack([one @ one.mT for one in gradients]))
    for one, weights in zip(gradients, both, strict=True):
        torch.testing.assert_close(weights @ one, combined(list(one)))


def test_the_setting_is_text_and_goes_with_no_other_algorithm() -> None:
    plan = Plan(sync=AllReduce(op="adasum"))
    assert Plan.parse(str(plan)) == plan and "allreduce(op=adasum)" in str(plan)
    with pytest.raises(PlanError, match="Leave algorithm out"):
        AllReduce(op="adasum", algorithm="ring")


class SameGradients(SingleWorkerGroup):
    """Two replicas that give the same: this is the first. It looks at what a bucket holds when it sends."""

    size = 2

    def __init__(self) -> None:
        self.sent: Tensor | None = None
        self.shares: Callable[[], Tensor | None] = lambda: None
        self.is_freed = False

    def begin_all_to_all(self, rows: Tensor, out: Tensor, *, what: str) -> CompletedTransfer:
        self.sent, self.shares = rows, weakref.ref(out)
        out.copy_(rows[:1].expand_as(out))
        return CompletedTransfer()

    def begin_all_gather(self, tensor: Tensor, out: Tensor, *, what: str) -> CompletedTransfer:
        self.is_freed = self.shares() is None
        out.copy_(tensor.expand_as(out))
        return CompletedTransfer()


def test_gradients_are_sent_as_they_lie_and_their_shares_make_room_for_what_comes_of_them() -> None:
    parameter = Parameter(torch.zeros(5))  # no multiple of the replicas
    parameter.grad = torch.arange(1.0, 6.0)
    group = SameGradients()
    bucket = AdasumBucket([("w", parameter)], group=group, wire=Raw())
    bucket.depart()
    bucket.advance()
    bucket.combine([[0.5, 0.5]])
    bucket.land()
    assert group.sent is not None and group.sent.data_ptr() == parameter.grad.data_ptr()
    assert group.is_freed
    assert parameter.grad.tolist() == [1.0, 2.0, 3.0, 1.0, 2.0], "the first one's share, of both"
