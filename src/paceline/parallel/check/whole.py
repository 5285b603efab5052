"""Whether an optimizer needs whole parameters, or all of them: tried on small ones, once together and once apart.

Most optimizers treat each number by itself, so whoever holds a part of a parameter updates that part. Some look at a
parameter as a whole: at its norm (LARS, LAMB), at its rows and columns (Adafactor), at its singular values (Muon). On
plain tensors that are parts of a cut layer they would take other steps, and say nothing. A few look at all parameters
together: at the norm of all gradients (some forms of LAMB), at how far all have come (Prodigy). Where nobody has all of
them, each would find something else.
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

__all__ = ["needs_all_parameters", "needs_whole_parameters"]

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
