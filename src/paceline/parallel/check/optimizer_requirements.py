"""Whether an optimizer needs whole parameters, or all of them: tried on small ones, once together and once apart.

Most optimizers treat each number by itself, so whoever holds a part of a parameter updates that part. Some look at a
parameter as a whole: at its norm (LARS, LAMB), at its rows and columns (Adafactor), at its singular values (Muon). On
plain tensors that are parts of a cut layer they would take other steps, and say nothing. A few look at all parameters
together: at the norm of all gradients (some forms of LAMB), at how far all have come (Prodigy). Where nobody has all of
them, each would find something else.

Whether an optimizer can have a table by rows: tried on a small one, once whole and once by rows in two parts.

What it takes: sparse gradients, and that each row is treated by itself. What an optimizer keeps is stored by rows, too,
so it has to be dense, and to have the table's rows.
"""

from __future__ import annotations

import collections
import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.remote_tensors import sparse_rows

__all__ = ["needs_all_parameters", "needs_whole_parameters", "why_not_by_rows"]

SIZE = 6
NUM_STEPS = 3  # the first one may be a special one
NUM_ALIKE = 20  # of gradients that stay much the same: estimates of how far all have come need that
APART = 30.0  # times as large are the gradients of the second of two parameters


def needs_whole_parameters(optimizer: Optimizer) -> bool:
    """Whether its update of a matrix differs from those of the matrix's halves; the optimizer stays as it is.

    One that cannot be stepped without a closure, which evaluates the model, counts as one that does; and one that has
    others in it, since a trial would step these. So does one that cannot step on such matrices: nothing shows that it
    is right on halves.
    """
    if _has_others(optimizer) or _wants_closure(optimizer):
        return True
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(NUM_STEPS + 1, SIZE, SIZE, generator=generator)
    with torch.random.fork_rng(devices=[]):
        try:
            (whole,) = _stepped(optimizer, [numbers])
            for dim in (0, 1):
                halves = _stepped(optimizer, [half.contiguous() for half in numbers.chunk(2, dim + 1)])
                if not torch.allclose(torch.cat(halves, dim), whole, rtol=1e-3, atol=1e-6):
                    return True
        except Exception:  # of the optimizer's own, whatever it is
            return True
    return False


def needs_all_parameters(optimizer: Optimizer) -> bool:
    """Whether its update of a parameter depends on what else it holds; the optimizer stays as it is.

    One that cannot be stepped without a closure counts as one that does. Nothing is known of one that has others in it,
    draws random numbers, or cannot step on such parameters (sparse gradients, a GPU's): they count as ones that do not.
    """
    if _has_others(optimizer):
        return False
    if _wants_closure(optimizer):
        return True
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(2, 1 + NUM_ALIKE, SIZE, SIZE, generator=generator, dtype=torch.float64)
    numbers[:, 2:] = numbers[:, 1:2] + 0.1 * numbers[:, 2:]
    first, second = numbers
    second[1:] *= APART
    with torch.random.fork_rng(devices=[]):
        try:
            (alone,), (again,) = _stepped(optimizer, [first]), _stepped(optimizer, [first], seed=1)
            together = _stepped(optimizer, [first, second])[0]
        except Exception:  # of the optimizer's own: SparseAdam takes no dense gradients, others only a GPU's
            return False
    if not torch.equal(alone, again):
        return False
    moved = alone - first[0]  # which may be tiny beside the parameter
    return not torch.allclose(together - first[0], moved, rtol=0.0, atol=1e-3 * float(moved.abs().max()))


def _has_others(optimizer: Optimizer) -> bool:
    return any(isinstance(value, Optimizer) for value in vars(optimizer).values())


def _wants_closure(optimizer: Optimizer) -> bool:
    step = inspect.signature(type(optimizer).step)
    return any(one.default is one.empty and one.name == "closure" for one in step.parameters.values())


def _stepped(optimizer: Optimizer, each: Sequence[Tensor], *, seed: int = 0) -> list[Tensor]:
    """What parameters become by steps of such an optimizer: of each its value comes first, then its gradients."""
    torch.manual_seed(seed)  # of the surroundings' fork
    parameters = [torch.nn.Parameter(numbers[0].clone()) for numbers in each]
    twin = type(optimizer).__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.update(
        {name: type(value)() for name, value in vars(optimizer).items() if isinstance(value, collections.OrderedDict)}
    )  # hooks of its step, which are about the real one
    twin.state = collections.defaultdict(dict)
    options = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    options = copy.deepcopy(options)  # some keep what they have learnt there
    changes: dict[str, Any] = {"lr": 0.1} if "lr" in options else {}  # it may be 0 now, before a warm-up
    if options.get("capturable"):
        changes["capturable"] = False  # it is for a GPU's parameters only, and these are the CPU's
    twin.param_groups = [{**options, **changes, "params": parameters}]
    for gradients in zip(*(numbers[1:] for numbers in each), strict=True):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        type(optimizer).step(twin)  # schedulers give the real one a step of its own
    return [parameter.detach() for parameter in parameters]


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
            whole = _stepped_by_rows(optimizer, group, entries, numbers, slice(0, None, 1))
            parts = [_stepped_by_rows(optimizer, group, entries, numbers, slice(first, None, 2)) for first in (0, 1)]
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


def _stepped_by_rows(
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
        twin.state[parameter] = {key: _row_state_like(value, parameter) for key, value in entries.items()}
    rates = {"lr": 0.1} if "lr" in group else {}  # which may be 0 now, before a warm-up
    twin.param_groups = [{**group, **rates, "params": [parameter]}]
    for gradient, touched in zip(numbers[1:], TOUCHED, strict=True):
        parameter.grad = _sparse_rows(gradient, touched, range(ROWS)[rows])
        type(optimizer).step(twin)  # schedulers give the real one a step of its own
    return parameter.detach(), dict(twin.state[parameter])


def _row_state_like(value: object, parameter: Tensor) -> object:
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
