"""`DistributedOptimizer` on 2 and 3 workers: the weights of one process that has all samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import horovod_workers
import paceline.compat.horovod as hvd
import quick
from paceline.compat.horovod import progress
from paceline.compat.horovod.errors import HorovodInternalError

SIZES = [2, 3]
STEPS = 4
ROWS = 6  # of each step: divided by 2 and 3


def network() -> Any:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [
        (torch.randn(ROWS, 5, generator=generator), torch.randn(ROWS, 2, generator=generator)) for _ in range(STEPS)
    ]


def alone() -> list[Tensor]:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for x, y in batches():
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return [one.detach() for one in model.parameters()]


def own_rows(rank: int, size: int, *, passes: int = 1) -> list[list[tuple[Tensor, Tensor]]]:
    """Of each step, this worker's rows in so many parts."""
    parts = [(x.chunk(size)[rank], y.chunk(size)[rank]) for x, y in batches()]
    return [list(zip(x.chunk(passes), y.chunk(passes), strict=True)) for x, y in parts]


def train(
    rank: int, size: int, *, passes: int = 1, clips: bool = False, closure: bool = False, **more: Any
) -> list[Tensor]:
    hvd.init()
    model = network()
    if rank:  # weights come from rank 0, and so does the optimizer's state
        nn.init.zeros_(model[0].weight)
    plain = torch.optim.Adam(model.parameters(), lr=0.05 if rank == 0 else 0.3)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    groups: Any = more.pop("groups", None)
    chosen: Any = groups(model) if callable(groups) else groups
    optimizer = hvd.DistributedOptimizer(
        plain,
        named_parameters=model.named_parameters(),
        backward_passes_per_step=passes,
        groups=chosen,
        **more,
    )
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer.state.clear()  # a state of zero gradients counts as a step for Adam
    assert issubclass(type(optimizer), torch.optim.Adam)
    for parts in own_rows(rank, size, passes=passes):
        if closure:

            def compute(parts: Any = parts) -> Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(model(parts[0][0]), parts[0][1])
                loss.backward()
                return loss

            optimizer.step(compute)
            continue
        optimizer.zero_grad()
        for x, y in parts:
            (F.mse_loss(model(x), y) / passes).backward()
        if clips:
            with pytest.raises(AssertionError, match="race"):
                optimizer.zero_grad()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    return [one.detach() for one in model.parameters()]


WAYS: dict[str, Callable[[int, int], list[Tensor]]] = {
    "plain": lambda rank, size: train(rank, size),
    "two groups": lambda rank, size: train(rank, size, groups=2),
    "own groups": lambda rank, size: train(rank, size, groups=lambda model: [[model[0].bias, model[2].bias]]),
    "clipping": lambda rank, size: train(rank, size, clips=True),
    "closure": lambda rank, size: train(rank, size, closure=True),
    "predivide": lambda rank, size: train(rank, size, gradient_predivide_factor=2.0),
}


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.further)])
@pytest.mark.parametrize("way", WAYS)
def test_weights_are_those_of_one_process(tmp_path: Path, size: int, way: str) -> None:
    wanted = alone()
    for value in horovod_workers.start(tmp_path, size, WAYS[way]).values():
        for found, one in zip(value, wanted, strict=True):
            torch.testing.assert_close(found, one, rtol=1e-4, atol=1e-5)


def test_gradients_of_several_passes_travel_once(tmp_path: Path) -> None:
    wanted = alone()
    for value in horovod_workers.start(tmp_path, 2, lambda rank, size: train(rank, size, passes=3)).values():
        for found, one in zip(value, wanted, strict=True):
            torch.testing.assert_close(found, one, rtol=1e-4, atol=1e-5)


def one_branch(rank: int, size: int) -> list[float]:
    hvd.init()
    branches: Any = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(size)])
    for branch in branches:
        nn.init.ones_(branch.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(branches.parameters(), lr=1.0))
    branches[rank](torch.ones(1, 1)).sum().backward()  # the others have no gradient on this rank
    optimizer.step()
    return [branch.weight.item() for branch in branches]


@pytest.mark.parametrize("size", SIZES)
def test_a_gradient_that_only_one_rank_computes_counts_on_all(tmp_path: Path, size: int) -> None:
    for value in horovod_workers.start(tmp_path, size, one_branch).values():
        torch.testing.assert_close(torch.tensor(value), torch.full((size,), 1 - 1 / size))


def sparse(rank: int, size: int) -> list[Tensor]:
    hvd.init()
    found: list[Tensor] = []
    for is_dense in (False, True):
        table = nn.Embedding(6, 2, sparse=True)
        nn.init.zeros_(table.weight)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), sparse_as_dense=is_dense)
        table(torch.tensor([rank, 4, 4])).sum().backward()
        optimizer.step()
        found.append(table.weight.detach())
    return found


@pytest.mark.parametrize("size", SIZES)
def test_sparse_gradients_are_averaged(tmp_path: Path, size: int) -> None:
    wanted = torch.zeros(6, 2)
    wanted[:size], wanted[4] = -1 / size, -2.0
    for value in horovod_workers.start(tmp_path, size, sparse).values():
        for found in value:
            torch.testing.assert_close(found, wanted)


def adasum(rank: int, size: int) -> list[Tensor]:
    hvd.init()
    one, other = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([1.0, 3.0, 0.0])
    combined = hvd.allreduce(one if rank == 0 else other, op=hvd.Adasum)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), op=hvd.Adasum)
    model(torch.ones(1, 1)).sum().backward()  # the same on both: it counts once
    optimizer.step()
    assert progress.count() == 1
    return [combined, model.weight.detach()]


def test_adasum_adds_what_differs_and_counts_once_what_agrees(tmp_path: Path) -> None:
    one, other = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([1.0, 3.0, 0.0])
    product = one @ other
    wanted = one * (1 - product / (2 * one @ one)) + other * (1 - product / (2 * other @ other))
    for combined, weight in horovod_workers.start(tmp_path, 2, adasum).values():
        torch.testing.assert_close(combined, wanted)
        torch.testing.assert_close(weight, torch.tensor([[-0.5]]))


def refused(rank: int, size: int) -> None:
    hvd.init()
    model = nn.Linear(2, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters())
    cases: list[tuple[str, dict[str, Any]]] = [
        ("not named", {"named_parameters": named[:1]}),
        ("duplicates: bias, weight", {"named_parameters": named + named}),
        ("tuples", {"named_parameters": list(model.parameters())}),
        ("must be > 0", {"backward_passes_per_step": 0}),
        ("op != Average", {"gradient_predivide_factor": 2.0, "op": hvd.Sum}),
        ("once in groups", {"groups": [[model.weight], [model.weight]]}),
        ("non-negative", {"groups": 0}),
    ]
    for message, arguments in cases:
        with pytest.raises(ValueError, match=message):
            hvd.DistributedOptimizer(plain, **arguments)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=named)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        model(torch.ones(1, 2)).sum().backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    horovod_workers.start(tmp_path, 2, refused).values()


def other_kinds(rank: int, size: int) -> list[tuple[str, list[float]]]:
    """Gradients of one parameter that change their type, also on one rank alone, and the session they are sent in."""
    found: list[tuple[str, list[float]]] = []
    weight = nn.Parameter(torch.zeros(2))
    hvd.init()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), named_parameters=[("weight", weight)])
    alike = [torch.float32, torch.float64, torch.float32]
    for dtype in (*alike, torch.float64 if rank == 0 else torch.float32, torch.float32):
        weight.data, weight.grad = torch.zeros(2, dtype=dtype), None
        (weight * (rank + 1 / 3)).sum().backward()
        try:
            optimizer.step()
        except HorovodInternalError as error:
            assert "Mismatched data types" in str(error)
            hvd.shutdown()
            hvd.init()
            continue
        found.append((str(weight.dtype), weight.tolist()))
    hvd.shutdown()
    return found


@pytest.mark.parametrize("size", [2, quick.further(3)])
def test_a_gradient_is_described_anew_where_its_type_is_another(tmp_path: Path, size: int) -> None:
    mean = sum(rank + 1 / 3 for rank in range(size)) / size
    for found in horovod_workers.start(tmp_path, size, other_kinds).values():
        for (name, values), dtype in zip(found, ("float32", "float64", "float32", "float32"), strict=True):
            assert name == f"torch.{dtype}"
            assert values == pytest.approx([-mean] * 2, rel=1e-6 if dtype == "float32" else 1e-14)
