"""How gradients are split_by_server into buckets, and how views lie in them."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from paceline.comm.group import SingleWorkerGroup
from paceline.plan import Raw
from paceline.sync.allreduce.buckets import Bucket, LocalBucket, assign


def named(sizes: list[int], dtypes: list[torch.dtype] | None = None) -> list[tuple[str, Parameter]]:
    kinds = dtypes or [torch.float32] * len(sizes)
    return [
        (f"p{i}", Parameter(torch.zeros(n, dtype=kind))) for i, (n, kind) in enumerate(zip(sizes, kinds, strict=True))
    ]


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(1, 800))
def test_buckets_hold_every_parameter_once_last_first_and_keep_their_size(sizes: list[int], limit: int) -> None:
    parameters, group = named(sizes), SingleWorkerGroup()
    runs = [run for _, run in assign(parameters, bucket_bytes=limit, group_of=lambda _: group)]
    assert [name for run in runs for name, _ in run] == [name for name, _ in reversed(parameters)]
    for run in runs:
        assert len(run) == 1 or sum(4 * parameter.numel() for _, parameter in run) <= limit
    for one, following in itertools.pairwise(runs):
        assert sum(4 * p.numel() for _, p in [*one, following[0]]) > limit  # no bucket could have taken one more


def test_a_bucket_has_one_type() -> None:
    parameters = named([1, 1, 1, 1], [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32])
    group = SingleWorkerGroup()
    runs = [run for _, run in assign(parameters, bucket_bytes=1000, group_of=lambda _: group)]
    assert [[name for name, _ in run] for run in runs] == [["p2", "p1"], ["p3", "p0"]]


def test_a_bucket_goes_to_one_group() -> None:
    parameters = named([1, 1, 1, 1])
    everybody, experts = SingleWorkerGroup(), SingleWorkerGroup()
    runs = assign(parameters, bucket_bytes=1000, group_of=lambda one: experts if one is parameters[2][1] else everybody)
    assert [([name for name, _ in run], group is experts) for group, run in runs] == [
        (["p2"], True),
        (["p3", "p1", "p0"], False),
    ]


def test_a_bucket_has_one_kind_and_waits_for_none_that_comes_later() -> None:
    parameters, group = named([1, 1, 1, 1, 1]), SingleWorkerGroup()
    some = {id(parameters[place][1]) for place in (0, 4)}
    runs = assign(parameters, bucket_bytes=8, group_of=lambda _: group, kind_of=lambda one: id(one) in some)
    assert [[name for name, _ in run] for _, run in runs] == [["p3", "p2"], ["p1"], ["p4", "p0"]]


def test_gradients_keep_their_parameters_strides_and_missing_ones_count_as_zero() -> None:
    columns = Parameter(torch.zeros(3, 4).t())
    pictures = Parameter(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last))
    expanded = Parameter(torch.zeros(1, 5))
    wanted = [torch.randn_like(columns), torch.randn_like(pictures)]
    columns.grad, pictures.grad = (gradient.clone() for gradient in wanted)
    bucket = Bucket([("a", columns), ("b", pictures), ("c", expanded)], group=SingleWorkerGroup(), wire=Raw())
    bucket.depart()
    bucket.land()
    for parameter, gradient in zip((columns, pictures), wanted, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)
        assert parameter.grad.stride() == parameter.stride()
    assert expanded.grad is not None and not expanded.grad.any()
    assert bucket.bytes.num_sent == 0  # there is nobody else


def test_a_gradient_that_user_code_has_moved_elsewhere_is_summed_in_the_next_step() -> None:
    parameter = Parameter(torch.zeros(3))
    bucket = Bucket([("a", parameter)], group=SingleWorkerGroup(), wire=Raw())
    for number in (1.0, 2.0):
        parameter.grad = torch.full((3,), number)
        bucket.depart()
        bucket.land()
        bucket.scale(2.0)
        assert parameter.grad.tolist() == [2 * number] * 3
        parameter.grad.data = parameter.grad.double().float()  # as model.double() and model.float() do
    parameter.data = parameter.data.double()
    with pytest.raises(RuntimeError, match=r"a is torch.float64, but was torch.float32 when it was prepared"):
        bucket.depart()


def test_who_is_alone_takes_what_it_had_still_to_send_into_the_first_step_that_counts() -> None:
    parameter = Parameter(torch.zeros(3))
    bucket = LocalBucket([("a", parameter), ("b", Parameter(torch.zeros(2)))])
    bucket.fill({"a": torch.ones(3), "b": torch.ones(2)}, {})
    for _ in range(2):  # the first one does not count
        bucket.drop()
        parameter.grad = torch.full((3,), 2.0)
        bucket.depart()
        assert parameter.grad.tolist() == [3.0, 3.0, 3.0]
    bucket.settle(lambda one: one is parameter)
    assert list(bucket.own()) == ["b"], "nobody has used b"
    parameter.grad = torch.full((3,), 2.0)
    bucket.depart()
    assert parameter.grad.tolist() == [2.0, 2.0, 2.0]
