"""Whether an optimizer can have a table by rows: tried on a small one, once whole and once by rows in two parts.

What it takes: sparse gradients, and that each row is treated by itself. What an optimizer keeps is stored by rows, too,
so it has to be dense, and to have the table's rows.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.away import sparse_rows

__all__ = ["why_not_by_rows"]

ROWS, COLUMNS = 5, 3
TOUCHED = ((0, 1, 4), (1, 2), (0, 3, 4))  # rows, in each of the steps: the first one may be a special one


def why_not_by_rows(optimizer: Optimizer, parameter: Tensor) -> str | None:
    """Return what stands against having `parameter`, one of the optimizer's, by rows; None: nothing. It stays as it
    is."""
    group = next(one for one in optimizer.param_groups if any(held is parameter for held in one["params"]))
    entries = dict(optimizer.state.get(parameter, {}))
    numbers = torch.randn(len(TOUCHED) + 1, ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng(devices=[]):
        try:
            whole = _stepped(optimizer, group, entries, numbers, slice(0, None, 1))
            parts = [_stepped(optimizer, group, entries, numbers, slice(first, None, 2)) for first in (0, 1)]
        except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
            return f"it cannot step with sparse gradients ({str(error).strip().partition(chr(10))[0]})"
    for value, state in (whole, *parts):
        for key, entry in state.items():
            if isinstance(entry, Tensor) and entry.dim() and (entry.is_sparse or len(entry) != len(value)):
                return (
                    f"what it keeps of a matrix ({key}) is not one row for each of the matrix's, and cannot be divided"
                )
    together = torch.empty_like(whole[0])
    for first, (value, _) in enumerate(parts):
        together[first::2] = value
    if not torch.allclose(together, whole[0], rtol=1e-3, atol=1e-6):
        return "it looks at a matrix as a whole (norms, products), and each server has some of the rows"
    return None


def _stepped(
    optimizer: Optimizer, group: dict[str, object], entries: dict[str, object], numbers: Tensor, rows: slice
) -> tuple[Tensor, dict[str, object]]:
    """What some rows become by steps of such an optimizer, and what it keeps of them."""
    torch.manual_seed(0)  # of the surroundings' fork
    parameter = torch.nn.Parameter(numbers[0][rows].clone())
    twin = type(optimizer).__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.update(
        {name: type(value)() for name, value in vars(optimizer).items() if isinstance(value, collections.OrderedDict)}
    )  # hooks of its step, which are about the real one
    twin.state = collections.defaultdict(dict)
    if entries:  # some are made with the optimizer
        twin.state[parameter] = {key: _alike(value, parameter) for key, value in entries.items()}
    rates = {"lr": 0.1} if "lr" in group else {}  # which may be 0 now, before a warm-up
    twin.param_groups = [{**group, **rates, "params": [parameter]}]
    for gradient, touched in zip(numbers[1:], TOUCHED, strict=True):
        parameter.grad = _sparse_rows(gradient, touched, range(ROWS)[rows])
        type(optimizer).step(twin)  # schedulers give the real one a step of its own
    return parameter.detach(), dict(twin.state[parameter])


def _alike(value: object, parameter: Tensor) -> object:
    """What an optimizer keeps from the beginning, for a small matrix."""
    if not isinstance(value, Tensor):
        return value
    shape = (len(parameter), *[COLUMNS] * (value.dim() - 1))
    return value.new_zeros(shape) if value.dim() else value.clone()


def _sparse_rows(gradient: Tensor, touched: Sequence[int], here: range) -> Tensor:
    """The gradient of the rows that are `here`, in which those that were touched are."""
    found = [row for row in here if row in touched]
    places = torch.tensor([here.index(row) for row in found], dtype=torch.long)
    return sparse_rows(places, gradient[found], (len(here), gradient.shape[1]))
