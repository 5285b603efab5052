"""What the Accelerate package computes without a run: weights of micro-batches, orders of loaders, nested values."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

import quick
from paceline.compat.accelerate.exchange import gather_values, pad_values, part_of_values, reduce_values
from paceline.compat.accelerate.flat_loop import StepShape
from paceline.compat.accelerate.loader_order import (
    OrderedDataset,
    batches_of,
    checksum_of,
    order_generator,
    require_whole_batches,
    restore_order,
    seed_order,
)
from paceline.compat.accelerate.program_member import ProgramMember
from paceline.errors import PlanError
from paceline.schedule.micro_batches import micro_batches
from paceline.worker.data.step_batch import StepBatch


class FakeWorld:
    """Workers of which each gives what a list says."""

    def __init__(self, *others: Any) -> None:
        self.size, self.num_same, self._others = 1 + len(others), 1, others

    def everywhere(self, value: Any) -> list[Any]:
        return [value, *self._others]


def batch_of(start: int, stop: int, micro: int) -> StepBatch:
    return StepBatch(
        stream="train",
        step=1,
        epoch=0,
        start=start,
        stop=stop,
        micros=micro_batches(start, stop, micro, is_even=False),
        ends_epoch=True,
        fetch=lambda: None,
        run_pass=lambda _: iter(()),
    )


@pytest.mark.parametrize("last", quick.some(range(1, 65), step=6))
def test_gradients_of_a_short_step_are_those_of_one_process_that_adds_up_slots(last: int) -> None:
    shape = StepShape(micro=8, slot=16, slots=4)  # two processes, four batches of each
    batch = batch_of(128, 128 + last, 8)
    losses = torch.rand(last, generator=torch.Generator().manual_seed(last), dtype=torch.float64)
    slots = [part.mean() for part in losses.split(16)]
    expected = sum(slots) / 4  # as `loss / gradient_accumulation_steps` of each slot, whichever are there

    total = weight_sum = 0.0
    for micro in batch.micros:
        weight = shape.weight(batch, micro)
        count = micro.num_samples if weight is None else weight
        total += float(losses[micro.start - 128 : micro.stop - 128].mean()) * count
        weight_sum += count
    assert total / weight_sum * shape.factor(batch) == pytest.approx(float(expected), rel=1e-12)


def test_micro_batches_of_a_loader_are_its_own_batches() -> None:
    sizes = [micro.num_samples for micro in micro_batches(0, 20, 8, is_even=False)]
    assert sizes == [8, 8, 4]
    assert [micro.num_samples for micro in micro_batches(0, 20, 8)] == [7, 7, 6]


def test_the_order_is_what_the_loader_itself_would_draw() -> None:
    data = TensorDataset(torch.arange(23))
    loader = DataLoader(data, batch_size=4, shuffle=True)
    torch.manual_seed(5)
    theirs = [[int(one) for one in batch[0]] for _ in range(2) for batch in loader]
    torch.manual_seed(5)
    batches = [*batches_of(loader), *batches_of(loader)]
    assert batches == theirs
    ordered = OrderedDataset(data, batches[0])
    assert [int(ordered[place][0]) for place in range(4)] == batches[0]


def test_an_order_has_the_checksum_of_its_numbers() -> None:
    assert checksum_of([1, 2, 3]) == checksum_of((1, 2, 3)) != checksum_of([3, 2, 1])
    assert checksum_of(["a", "b"]) != checksum_of(["b", "a"])


def test_batches_of_different_sizes_are_refused() -> None:
    class Odd(BatchSampler):
        def __iter__(self) -> Any:
            yield [0, 1]
            yield [2]
            yield [3, 4]

    loader = DataLoader(TensorDataset(torch.arange(5)), batch_sampler=Odd(SequentialSampler(range(5)), 2, False))
    with pytest.raises(PlanError, match="a batch of 1 samples, and its batch_size is 2"):
        require_whole_batches(batches_of(loader), 2)


def test_a_loader_without_batches_is_refused() -> None:
    loader = DataLoader(TensorDataset(torch.arange(5)), batch_size=None, sampler=RandomSampler(range(5)))
    with pytest.raises(PlanError, match="batch_size=None"):
        batches_of(loader)


def test_uneven_tensors_are_joined_and_repeated_ones_left_out() -> None:
    here = {"guess": torch.arange(4), "loss": torch.tensor(0.5)}
    there = [torch.tensor([7]), torch.tensor(1.5)]
    found = gather_values(here, FakeWorld(there), keep=(4, 4))  # pyright: ignore[reportArgumentType]
    assert found["guess"].tolist() == [0, 1, 2, 3, 7]
    assert found["loss"].tolist() == [0.5, 1.5]
    only_there = gather_values((torch.arange(4),), FakeWorld([torch.tensor([7])]), keep=(4, 0))  # pyright: ignore[reportArgumentType]
    assert only_there[0].tolist() == [7]


def test_objects_are_joined() -> None:
    world: Any = FakeWorld(["c"])
    assert gather_values(["a", "b"], world, is_object=True) == ["a", "b", "c"]
    assert gather_values(["a", "b"], world, is_object=True, keep=(2, 0)) == ["c"]


@pytest.mark.parametrize(("reduction", "expected"), [("sum", 6.0), ("mean", 3.0), ("none", 4.0)])
def test_sums_and_means(reduction: str, expected: float) -> None:
    world: Any = FakeWorld([torch.tensor([2.0])])
    own = torch.tensor([4.0])
    assert reduce_values([own], world, reduction=reduction, scale=1.0)[0].item() == expected
    assert reduce_values([own], world, reduction=reduction, scale=0.5)[0].item() == expected / 2
    assert own.item() == 4.0


def test_tensors_become_as_long_as_the_longest() -> None:
    world: Any = FakeWorld([3])
    assert pad_values(torch.tensor([1]), world, dim=0, pad_index=9, pad_first=False).tolist() == [1, 9, 9]
    assert pad_values(torch.tensor([1]), world, dim=0, pad_index=9, pad_first=True).tolist() == [9, 9, 1]


def test_other_values_are_refused() -> None:
    with pytest.raises(TypeError, match="a str was to be exchanged"):
        gather_values({"text": "a"}, FakeWorld())  # pyright: ignore[reportArgumentType]


def parts_over(size: int, value: Any, *, is_padded: bool = False) -> list[Any]:
    worlds: list[Any] = [types.SimpleNamespace(index=index, size=size) for index in range(size)]
    return [part_of_values(value, world, is_padded=is_padded) for world in worlds]


@pytest.mark.parametrize("size", range(1, 7))
def test_parts_of_all_workers_are_the_whole(size: int) -> None:
    values = list(range(5))
    assert [one for part in parts_over(size, values) for one in part] == values
    assert torch.cat(parts_over(size, torch.arange(5))).tolist() == values
    padded = parts_over(size, values, is_padded=True)
    assert {len(part) for part in padded} == {-(-5 // size)}
    assert [part.tolist() for part in parts_over(size, torch.arange(5), is_padded=True)] == padded


def test_a_mapping_is_split_by_its_values() -> None:
    found = parts_over(2, {"text": ["a", "b", "c"], "length": torch.arange(3)})
    assert [part["text"] for part in found] == [["a", "b"], ["c"]]
    assert [part["length"].tolist() for part in found] == [[0, 1], [2]]
    with pytest.raises(ValueError, match=r"\[1, 2\] elements"):
        parts_over(2, {"text": ["a"], "length": [1, 2]})


class ToldMember(ProgramMember):
    """A worker of four, whose replica is two of them; notes are kept."""

    def __init__(self, rank: int, processes: int) -> None:
        worker: Any = types.SimpleNamespace(rank=rank, workers=4, is_first=rank == 0, device="cpu", plan="tensor=2")
        world: Any = types.SimpleNamespace(index=rank // 2, size=2, num_same=2, processes=processes)
        flat: Any = None
        super().__init__(worker, flat, world)
        self.notes: list[str] = []

    def _tell(self, text: str) -> None:
        self.notes.append(text)


def test_an_index_is_one_of_the_processes() -> None:
    members = [ToldMember(rank, 2) for rank in range(4)]
    assert [(one.process_index, one.num_processes) for one in members] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [one.is_main_process for one in members] == [True, False, False, False]
    with members[3].split_between_processes(["a", "b", "c"]) as part:
        assert part == ["c"]
    assert not members[0].notes


def test_more_processes_than_run_are_told() -> None:
    member = ToldMember(0, 3)
    assert member.num_processes == 3
    assert member.notes[0].startswith("num_processes is 3, and 2 run")


def test_the_state_says_which_process_it_is_of() -> None:
    member = ToldMember(2, 2)
    assert str(member.state) == "Accelerator(process 1 of 2, on cpu, plan tensor=2)"
    assert member.state.fp8_recipe_handler is None
    assert not member.notes


def test_a_shuffling_loader_of_several_processes_has_a_generator_seeded_from_torchs() -> None:
    data = TensorDataset(torch.arange(20))
    torch.manual_seed(5)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    assert seed_order(loader)
    torch.manual_seed(5)
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    expected = torch.randperm(20, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(torch.tensor(batches_of(loader)).flatten(), expected)

    own = torch.Generator()
    chosen, plain = DataLoader(data, shuffle=True, generator=own), DataLoader(data)
    for one in (chosen, plain):
        assert not seed_order(one)
    assert order_generator(chosen) is own and order_generator(plain) is None


def test_a_state_without_an_order_is_of_a_loader_that_drew_from_torchs_generator() -> None:
    data = TensorDataset(torch.arange(20))

    def drawn(loader: DataLoader[Any]) -> list[list[Any]]:
        torch.manual_seed(6)
        return batches_of(loader)

    former = drawn(DataLoader(data, batch_size=4, shuffle=True))
    loader = DataLoader(data, batch_size=4, shuffle=True)
    assert seed_order(loader)
    generator = order_generator(loader)
    assert generator is not None
    state = generator.get_state()
    first = drawn(loader)
    assert first != former
    restore_order(loader, state, is_seeded=True)
    assert drawn(loader) == first
    restore_order(loader, None, is_seeded=True)
    assert drawn(loader) == former

    own = torch.Generator()
    chosen = DataLoader(data, shuffle=True, generator=own)
    restore_order(chosen, None, is_seeded=False)
    assert order_generator(chosen) is own  # the program's
