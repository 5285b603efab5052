"""How gradients are divided into buckets, and how views lie in them."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from paceline.codec.raw import RawCodec
from paceline.comm.group import Alone
from paceline.sync.buckets import Bucket, assign


def named(sizes: list[int], dtypes: list[torch.dtype] | None = None) -> list[tuple[str, Parameter]]:
    kinds = dtypes or [torch.float32] * len(sizes)
    return [
        (f"p{i}", Parameter(torch.zeros(n, dtype=kind))) for i, (n, kind) in enumerate(zip(sizes, kinds, strict=True))
    ]


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(1, 800))
def test_buckets_hold_every_parameter_once_last_first_and_keep_their_size(sizes: list[int], limit: int) -> None:
    parameters = named(sizes)
    runs = assign(parameters, bucket_bytes=limit)
    assert [name for run in runs for name, _ in run] == [name for name, _ in reversed(parameters)]
    for run in runs:
        assert len(run) == 1 or sum(4 * parameter.numel() for _, parameter in run) <= limit
    for one, following in itertools.pairwise(runs):
        assert sum(4 * p.numel() for _, p in [*one, following[0]]) > limit  # no bucket could have taken one more


def test_a_bucket_has_one_type() -> None:
    parameters = named([1, 1, 1, 1], [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32])
    runs = assign(parameters, bucket_bytes=1000)
    assert [[name for name, _ in run] for run in runs] == [["p3", "p0"], ["p2", "p1"]]


def test_gradients_keep_their_parameters_strides_and_missing_ones_count_as_zero() -> None:
    columns = Parameter(torch.zeros(3, 4).t())
    pictures = Parameter(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last))
    expanded = Parameter(torch.zeros(1, 5))
    wanted = [torch.randn_like(columns), torch.randn_like(pictures)]
    columns.grad, pictures.grad = (gradient.clone() for gradient in wanted)
    bucket = Bucket([("a", columns), ("b", pictures), ("c", expanded)], group=Alone(), codec=RawCodec())
    bucket.depart()
    bucket.land()
    for parameter, gradient in zip((columns, pictures), wanted, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)
        assert parameter.grad.stride() == parameter.stride()
    assert expanded.grad is not None and not expanded.grad.any()
    assert bucket.num_bytes_sent == 4 * (12 + 96 + 5)
