"""Whether an optimizer needs whole parameters: tried on a small one, once whole and once in parts.

Most optimizers treat each number by itself, so whoever holds a part of a parameter updates that part. Some look at a
parameter as a whole: at its norm (LARS, LAMB), at its rows and columns (Adafactor), at its singular values (Muon). On
plain tensors that are parts of a cut layer they would take other steps, and say nothing.
"""

from __future__ import annotations

import collections
import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["needs_whole_parameters"]

SIZE = 6
NUM_STEPS = 3  # the first one may be a special one


def needs_whole_parameters(optimizer: Optimizer) -> bool:
    """Whether its update of a matrix differs from those of the matrix's halves; the optimizer stays as it is.

    One that cannot be stepped without a closure, which evaluates the model, counts as one that does; and one that has
    others in it, since a trial would step these.
    """
    if any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
        return True
    step = inspect.signature(type(optimizer).step)
    if any(one.default is one.empty and one.name == "closure" for one in step.parameters.values()):
        return True
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(NUM_STEPS + 1, SIZE, SIZE, generator=generator)
    with torch.random.fork_rng(devices=[]):
        (whole,) = _stepped(optimizer, [numbers])
        for dim in (0, 1):
            halves = _stepped(optimizer, [half.contiguous() for half in numbers.chunk(2, dim + 1)])
            if not torch.allclose(torch.cat(halves, dim), whole, rtol=1e-3, atol=1e-6):
                return True
    return False


def _stepped(optimizer: Optimizer, each: Sequence[Tensor]) -> list[Tensor]:
    """What parameters become by steps of such an optimizer: of each its value comes first, then its gradients."""
    torch.manual_seed(0)  # of the surroundings' fork
    parameters = [torch.nn.Parameter(numbers[0].clone()) for numbers in each]
    twin = type(optimizer).__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.update(
        {name: type(value)() for name, value in vars(optimizer).items() if isinstance(value, collections.OrderedDict)}
    )  # hooks of its step, which are about the real one
    twin.state = collections.defaultdict(dict)
    rates = {"lr": 0.1} if "lr" in optimizer.param_groups[0] else {}  # which may be 0 now, before a warm-up
    twin.param_groups = [{**optimizer.param_groups[0], **rates, "params": parameters}]
    for gradients in zip(*(numbers[1:] for numbers in each), strict=True):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        type(optimizer).step(twin)  # schedulers give the real one a step of its own
    return [parameter.detach() for parameter in parameters]
