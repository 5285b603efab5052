"""Sums and moves in shared memory: the members of a group as threads, with a stand-in for torch's group."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import quick
from memory_members import CPU, LIMIT_S, Members
from paceline.comm.shared_memory.arena import NUM_FINGERPRINTS, why_unsupported
from paceline.comm.shared_memory.collectives import COPY_BYTES, NUM_COPY, PIECE_BYTES, SMALL_BYTES
from paceline.comm.shared_memory.shared_group import SharedGroup
from paceline.comm.shared_memory.summation import AVERAGED, SUMMED
from paceline.errors import SyncError

pytestmark = pytest.mark.skipif(why_unsupported() is not None, reason=str(why_unsupported()))


@pytest.fixture
def members() -> Iterator[Callable[..., Members]]:
    made: list[Members] = []

    def make(size: int, **settings: Any) -> Members:
        made.append(Members(size, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def numbers(numel: int, dtype: torch.dtype, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * numel + index)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 100, (numel,), generator=generator).to(dtype)


def summed(numel: int, dtype: torch.dtype, size: int) -> Tensor:
    """The oracle: one member after the other, 16 bits in 32."""
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = numbers(numel, dtype, 0).to(wide)
    for index in range(1, size):
        total = total + numbers(numel, dtype, index).to(wide)
    return total.to(dtype)


@pytest.mark.parametrize("is_placed", [True, False], ids=["in_place", "copied"])
@pytest.mark.parametrize("dtype", quick.some(SUMMED, step=3), ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_all_members_get_the_bits_of_the_sum_in_their_order(
    members: Callable[..., Members], size: int, dtype: torch.dtype, is_placed: bool
) -> None:
    lengths = [1, 3, 64, 129, SMALL_BYTES // dtype.itemsize + 1, 300_001]

    def work(group: SharedGroup) -> list[Tensor]:
        tensors = []
        for numel in lengths:
            tensor = torch.empty(numel, dtype=dtype)
            if is_placed:
                tensor = group.allocate(numel, dtype=dtype, device=CPU)
            tensor.copy_(numbers(numel, dtype, group.index))
            tensors.append(tensor)
        for tensor in tensors:
            group.all_reduce(tensor, what="a sum").wait()
        return [tensor.clone() for tensor in tensors]

    for found in members(size).each(work):
        for tensor, numel in zip(found, lengths, strict=True):
            assert torch.equal(tensor, summed(numel, dtype, size))


@pytest.mark.thorough
@pytest.mark.parametrize("is_placed", [True, False], ids=["in_place", "copied"])
@pytest.mark.parametrize("dtype", AVERAGED, ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_a_mean_has_the_bits_of_the_sum_that_is_divided_behind_it(
    members: Callable[..., Members], size: int, dtype: torch.dtype, is_placed: bool
) -> None:
    lengths = [1, 129, SMALL_BYTES // dtype.itemsize + 1, PIECE_BYTES // dtype.itemsize + 77]

    def work(group: SharedGroup) -> list[Tensor]:
        found = []
        for numel in lengths:
            tensor = torch.empty(2, numel, dtype=dtype).t()[:, 0]  # with holes
            if is_placed:
                tensor = group.allocate(numel, dtype=dtype, device=CPU)
            tensor.copy_(numbers(numel, dtype, group.index))
            group.all_reduce(tensor, what="a mean", mean=True).wait()
            found.append(tensor.clone())
        return found

    for found in members(size).each(work):
        for tensor, numel in zip(found, lengths, strict=True):
            assert torch.equal(tensor, summed(numel, dtype, size) / size)


def test_sixteen_bits_are_rounded_once(members: Callable[..., Members]) -> None:
    """1 + 3 x 1/512: each addend alone is less than half a unit of bf16 at 1, all three together are more."""

    def work(group: SharedGroup) -> float:
        tensor = torch.tensor([1.0 if group.index == 0 else 1 / 512], dtype=torch.bfloat16)
        group.all_reduce(tensor, what="a sum").wait()
        return float(tensor)

    assert members(4).each(work) == [1 + 1 / 128] * 4


def test_more_sums_may_be_under_way_than_there_are_marks_and_buffers(members: Callable[..., Members]) -> None:
    count = 2 * NUM_FINGERPRINTS + 7

    def work(group: SharedGroup) -> bool:
        tensors = [torch.full((1 + place % 5,), float(place + group.index)) for place in range(count)]
        transfers = [group.all_reduce(tensor, what="a sum") for tensor in tensors]
        for transfer in reversed(transfers):
            transfer.wait()
        return all(bool((tensor == 2 * place + 1).all()) for place, tensor in enumerate(tensors))

    assert members(2).each(work) == [True, True]


def test_a_slot_may_be_filled_again_as_soon_as_its_sum_is_there(members: Callable[..., Members]) -> None:
    def work(group: SharedGroup) -> list[float]:
        placed = group.allocate(5000, dtype=torch.float32, device=CPU)
        wrong = []
        for turn in range(200):
            placed.fill_(turn * 10 + group.index)
            group.all_reduce(placed[: 1 + turn * 20], what="a sum").wait()
            wanted = 3 * turn * 10 + 3.0
            if not bool((placed[: 1 + turn * 20] == wanted).all()):
                wrong.append(wanted)
        return wrong

    assert members(3).each(work) == [[], [], []]


def test_tensors_with_holes_of_many_dims_and_of_inference_are_summed(members: Callable[..., Members]) -> None:
    def work(group: SharedGroup) -> list[Tensor]:
        with torch.inference_mode():  # the first copied sum makes the buffers for all later ones
            evaluated = torch.ones(2, 3)
            group.all_reduce(evaluated, what="inside").wait()
        group.all_reduce(evaluated, what="outside").wait()
        holes = torch.arange(12.0).view(3, 4).t()[::2]
        group.all_reduce(holes, what="holes").wait()
        leaf = torch.ones(3, requires_grad=True)
        group.all_reduce(leaf, what="leaf").wait()
        group.all_reduce(torch.empty(0), what="nothing").wait()
        return [evaluated, holes, leaf.detach()]

    for evaluated, holes, leaf in members(2).each(work):
        assert evaluated.tolist() == [[4.0] * 3] * 2
        assert torch.equal(holes, 2 * torch.arange(12.0).view(3, 4).t()[::2])
        assert leaf.tolist() == [2.0] * 3


MANY = NUM_COPY * COPY_BYTES // 8 + 77  # float64: more than all places there hold


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("numel", [1, 3000, MANY])
def test_each_gets_what_all_gather(members: Callable[..., Members], size: int, numel: int) -> None:
    def work(group: SharedGroup) -> list[bool]:
        right = []
        for dtype in (torch.float64, torch.int8, torch.bool):
            out = [torch.empty(numel, 1, dtype=dtype) for _ in range(size)]
            group.all_gather(numbers(numel, dtype, group.index).view(numel, 1), out, what="rows")
            right += [torch.equal(one.view(-1), numbers(numel, dtype, index)) for index, one in enumerate(out)]
        return right

    assert members(size).each(work) == [[True] * 3 * size] * size


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("numel", [1, 3000, pytest.param(MANY, marks=pytest.mark.thorough)])
def test_each_gets_the_bits_of_the_sum_of_its_own_part(members: Callable[..., Members], size: int, numel: int) -> None:
    def work(group: SharedGroup) -> list[bool]:
        right = []
        for dtype in (torch.float64, torch.bfloat16):
            whole = numbers(size * numel, dtype, group.index).view(size, numel)
            out = torch.empty(numel, dtype=dtype)
            group.reduce_scatter(whole.unbind(), out, what="gradients")
            right.append(torch.equal(out, summed(size * numel, dtype, size).view(size, numel)[group.index]))
        return right

    assert members(size).each(work) == [[True, True]] * size


@pytest.mark.parametrize("most", [1, 40, 70_000])
def test_each_gets_what_everybody_has_for_it_of_whatever_length(members: Callable[..., Members], most: int) -> None:
    lengths = [[0, most, 1], [most // 3, 0, most], [2, most, most // 2]]

    def work(group: SharedGroup) -> list[bool]:
        parts = [numbers(length, torch.float64, 10 * group.index + k) for k, length in enumerate(lengths[group.index])]
        out = [torch.empty(row[group.index], dtype=torch.float64) for row in lengths]
        group.all_to_all(parts, out, what="tokens")
        wanted = [numbers(one.numel(), torch.float64, 10 * k + group.index) for k, one in enumerate(out)]
        return [torch.equal(one, want) for one, want in zip(out, wanted, strict=True)]

    assert members(3).each(work) == [[True] * 3] * 3


@pytest.mark.parametrize("source", [0, 2])
def test_all_get_what_the_source_has_of_any_type_and_layout(members: Callable[..., Members], source: int) -> None:
    def made(index: int) -> list[Tensor]:
        grid = numbers(6, torch.float64, index).view(2, 3)
        return [grid.t(), grid.to(torch.complex64), grid > 0, torch.tensor(7 + index), numbers(MANY, torch.int8, index)]

    def work(group: SharedGroup) -> list[bool]:
        tensors = made(group.index)
        for tensor in tensors:
            group.broadcast(tensor, source=source, what="weights")
        return [torch.equal(one, wanted) for one, wanted in zip(tensors, made(source), strict=True)]

    assert members(3).each(work) == [[True] * 5] * 3


def test_moves_and_sums_under_way_keep_their_order(members: Callable[..., Members]) -> None:
    def work(group: SharedGroup) -> bool:
        bucket, right = group.allocate(9000, dtype=torch.float32, device=CPU), True
        for turn in range(100):
            bucket.fill_(turn + group.index)
            begun = group.all_reduce(bucket, what="a bucket")
            out = torch.empty(2, 500)
            group.all_gather(torch.full((500,), float(turn * 7 + group.index)), out.unbind(), what="rows")
            begun.wait()
            right = right and bool((bucket == 2 * turn + 1).all()) and out.mean(1).tolist() == [turn * 7, turn * 7 + 1]
        return right

    assert members(2).each(work) == [True, True]


def test_what_was_moved_is_not_kept_alive(members: Callable[..., Members]) -> None:
    def work(group: SharedGroup) -> bool:
        out = torch.empty(2, 500)
        group.all_gather(torch.ones(500), out.unbind(), what="rows")
        kept = weakref.ref(out.untyped_storage())
        del out
        return kept() is None

    assert members(2).each(work) == [True, True]


@pytest.mark.thorough
def test_who_moves_something_else_is_named(members: Callable[..., Members]) -> None:
    def kinds(group: SharedGroup) -> None:
        out = torch.empty(2, 4)
        if group.index:
            group.reduce_scatter(torch.ones(2, 2).unbind(), out[0, :2], what="gradients")
        else:
            group.all_gather(torch.ones(4), out.unbind(), what="rows")

    first, second = members(2).each(kinds)
    assert "in rows worker 0 gathers 4 numbers of float32, while worker 1 sums and scatters 4 numbers" in str(first)
    assert "in gradients worker 1 sums and scatters 4 numbers of float32, while worker 0 gathers 4" in str(second)

    def lengths(group: SharedGroup) -> None:
        out = [torch.empty(3 + group.index) for _ in range(2)]
        group.all_to_all([torch.ones(3), torch.ones(3)], out, what="tokens")

    first, second = members(2, timeout_s=2.0).each(lengths)
    assert "in tokens: worker 1 expects [4, 4] numbers and gets [3, 3]" in str(second)
    assert isinstance(first, SyncError)


def test_what_memory_cannot_sum_goes_to_the_group_underneath(members: Callable[..., Members]) -> None:
    group_of = members(2)

    def work(group: SharedGroup) -> None:
        group.all_reduce(torch.ones(2, dtype=torch.complex64), what="complex")
        group.allocate(2, dtype=torch.complex64, device=CPU)
        group.reduce_scatter([torch.ones(2, dtype=torch.bool)] * 2, torch.ones(2, dtype=torch.bool), what="booleans")
        group.gather_objects(1)
        group.broadcast_object(2)
        group.broadcast(torch.ones(2), what="weights")  # not this one
        group.barrier()  # and not this one

    group_of.each(work)
    for under in group_of.under:
        assert under.calls == ["complex", "allocate", "booleans", "gather_objects", "broadcast_object"]


def test_before_the_group_underneath_blocks_a_member_does_its_part(members: Callable[..., Members]) -> None:
    """Otherwise one would wait for the sum of another that waits for it elsewhere."""
    group_of = members(2)
    tensors = [torch.ones(100_000) for _ in range(2)]
    first, second = group_of.groups
    begun = first.all_reduce(tensors[0], what="a sum")
    asked = threading.Thread(target=first.broadcast_object, args=(1,))
    asked.start()
    second.all_reduce(tensors[1], what="a sum").wait()  # comes back only when the first one has summed its half
    asked.join(LIMIT_S)
    begun.wait()
    assert [float(tensor.sum()) for tensor in tensors] == [200_000.0] * 2


def test_other_numbers_or_another_bucket_are_named_not_summed(members: Callable[..., Members]) -> None:
    def differ(group: SharedGroup) -> None:
        group.all_reduce(torch.ones(3 + group.index), what="loss").wait()

    for index, error in enumerate(members(2).each(differ)):
        assert isinstance(error, SyncError)
        assert f"worker {index} sums {3 + index} numbers of float32, while worker {1 - index} sums" in str(error)

    def wait(group: SharedGroup) -> None:
        group.barrier() if group.index == 1 else group.all_reduce(torch.ones(1), what="loss").wait()

    first, second = members(2).each(wait)
    assert "worker 0 sums 1 numbers of float32, while worker 1 waits in a barrier" in str(first)
    assert str(second) == "lost contact with a peer during barrier: worker 0 sums 1 numbers of float32"

    def swap(group: SharedGroup) -> None:
        buckets = [group.allocate(10, dtype=torch.float32, device=CPU) for _ in range(2)]
        group.all_reduce(buckets[group.index], what="gradients").wait()

    for error in members(2).each(swap):
        assert isinstance(error, SyncError) and "bucket at page" in str(error)
