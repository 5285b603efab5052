"""What an optimizer needs to see of the parameters: whole ones, all of them, or only rows. Tried on small tensors.

Most optimizers treat each number by itself, so a worker that holds a part of a parameter can update that part. Some
look at a parameter as a whole: its norm (LARS, LAMB), its rows and columns (Adafactor), its singular values (Muon). On
the parts of a split layer they would silently take other steps. A few look at all parameters together: the norm of all
gradients (some forms of LAMB), or the overall progress (Prodigy). Where no worker has all parameters, each would
compute something else.

For embedding tables by rows (sparse gradients) each row must be treated by itself. The optimizer's state is then stored
by rows, too, so it must be dense and have the table's rows.
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
NUM_STEPS = 3  # the first step may be a special one
NUM_ALIKE = 20  # of similar gradients: estimates of overall progress need that many
APART = 30.0  # factor between the gradients of the two parameters


def needs_whole_parameters(optimizer: Optimizer) -> bool:
    """Return whether the update of a matrix differs from those of its halves; the optimizer stays as it is.

    It is taken to differ if the optimizer cannot step without a closure, which evaluates the model; if it contains
    other optimizers, since a trial would step these; or if it cannot step on such matrices, so nothing shows that it is
    right on halves.
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
        except Exception:  # an optimizer may raise anything
            return True
    return False


def needs_all_parameters(optimizer: Optimizer) -> bool:
    """Return whether the update of a parameter depends on the other parameters; the optimizer stays as it is.

    True for an optimizer that cannot step without a closure. False, because nothing is known, for one that contains
    other optimizers, draws random numbers, or cannot step on such parameters (sparse gradients, GPU only).
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
        except Exception:  # SparseAdam takes no dense gradients, others only those of a GPU
            return False
    if not torch.equal(alone, again):
        return False
    moved = alone - first[0]  # may be tiny compared with the parameter
    return not torch.allclose(together - first[0], moved, rtol=0.0, atol=1e-3 * float(moved.abs().max()))


def _has_others(optimizer: Optimizer) -> bool:
    return any(isinstance(value, Optimizer) for value in vars(optimizer).values())


def _wants_closure(optimizer: Optimizer) -> bool:
    step = inspect.signature(type(optimizer).step)
    return any(one.default is one.empty and one.name == "closure" for one in step.parameters.values())


def _stepped(optimizer: Optimizer, each: Sequence[Tensor], *, seed: int = 0) -> list[Tensor]:
    """Return parameters after steps of a copy of the optimizer; each tensor holds the value first, then the
    gradients.
    """
    torch.manual_seed(seed)  # within the caller's fork_rng
    parameters = [torch.nn.Parameter(numbers[0].clone()) for numbers in each]
    trial = type(optimizer).__new__(type(optimizer))
    trial.__dict__.update(optimizer.__dict__)
    trial.__dict__.update(
        {name: type(value)() for name, value in vars(optimizer).items() if isinstance(value, collections.OrderedDict)}
    )  # hooks are about the real optimizer's step
    trial.state = collections.defaultdict(dict)
    options = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    options = copy.deepcopy(options)  # some keep state there
    changes: dict[str, Any] = {"lr": 0.1} if "lr" in options else {}  # it may be 0 now, before a warm-up
    if options.get("capturable"):
        changes["capturable"] = False  # capturable works for GPU parameters only, and these are on the CPU
    trial.param_groups = [{**options, **changes, "params": parameters}]
    for gradients in zip(*(numbers[1:] for numbers in each), strict=True):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        type(optimizer).step(trial)  # schedulers replace the real optimizer's step
    return [parameter.detach() for parameter in parameters]


ROWS, COLUMNS = 5, 3
TOUCHED = ((0, 1, 4), (1, 2), (0, 3, 4))  # rows, in each step; the first step may be a special one


def why_not_by_rows(optimizer: Optimizer, parameter: Tensor) -> str | None:
    """Return why `parameter`, one of the optimizer's, cannot be updated by rows; None if it can. It stays as it is."""
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
        return "it looks at a matrix as a whole (norms, products), and each server has only some of the rows"
    return None


def _stepped_by_rows(
    optimizer: Optimizer, group: dict[str, object], entries: dict[str, object], numbers: Tensor, rows: slice
) -> tuple[Tensor, dict[str, object]]:
    """Return some rows after steps of a copy of the optimizer, and its state for them."""
    torch.manual_seed(0)  # within the caller's fork_rng
    parameter = torch.nn.Parameter(numbers[0][rows].clone())
    trial = type(optimizer).__new__(type(optimizer))
    trial.__dict__.update(optimizer.__dict__)
    trial.__dict__.update(
        {name: type(value)() for name, value in vars(optimizer).items() if isinstance(value, collections.OrderedDict)}
    )  # hooks are about the real optimizer's step
    trial.state = collections.defaultdict(dict)
    if entries:  # some optimizers make their state when they are created
        trial.state[parameter] = {key: _row_state_like(value, parameter) for key, value in entries.items()}
    rates = {"lr": 0.1} if "lr" in group else {}  # it may be 0 now, before a warm-up
    trial.param_groups = [{**group, **rates, "params": [parameter]}]
    for gradient, touched in zip(numbers[1:], TOUCHED, strict=True):
        parameter.grad = _sparse_rows(gradient, touched, range(ROWS)[rows])
        type(optimizer).step(trial)  # schedulers replace the real optimizer's step
    return parameter.detach(), dict(trial.state[parameter])


def _row_state_like(value: object, parameter: Tensor) -> object:
    """Return an optimizer's initial state, resized for a small matrix."""
    if not isinstance(value, Tensor):
        return value
    shape = (len(parameter), *[COLUMNS] * (value.dim() - 1))
    return value.new_zeros(shape) if value.dim() else value.clone()


def _sparse_rows(gradient: Tensor, touched: Sequence[int], here: range) -> Tensor:
    """Return the sparse gradient of the rows `here`, with those of them that were touched."""
    found = [row for row in here if row in touched]
    places = torch.tensor([here.index(row) for row in found], dtype=torch.long)
    return sparse_rows(places, gradient[found], (len(here), gradient.shape[1]))
