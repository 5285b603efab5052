"""Whether an optimizer takes the same steps on fully sharded parameters (DTensors) as on whole ones: it is tried.

torch's DTensor stops some optimizers with an error of its own, and gives others numbers of a worker's rows alone where
they leave its operations (`.numpy()`, tensors of their own). All workers of a replica make the trial together.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.sharded_tensors import full_tensor, is_sharded
from paceline.parallel.check.optimizer_trial import Phase, Trial, preserved_randomness

__all__ = ["why_not_sharded"]

COLUMNS, ROWS_EACH, NUM_STEPS = 6, 2, 6
ROUNDING = 0.05  # some multiply in bfloat16


def why_not_sharded(optimizer: Optimizer, apart_from: Collection[Tensor] = ()) -> str | None:
    """Return why an optimizer cannot step on its sharded parameters; None if it can, or has none. It stays as it is.

    `apart_from`: parameters that do not matter.
    All workers that hold rows of the parameters must call it.
    """
    apart = {id(one) for one in apart_from}
    for group, options in enumerate(optimizer.param_groups):
        like: dict[int, Tensor] = {}
        for parameter in options["params"]:
            if is_sharded(parameter) and parameter.dim() in (1, 2) and id(parameter) not in apart:
                like.setdefault(parameter.dim(), parameter)
        for dim, parameter in sorted(like.items()):
            if (why := _why_not(optimizer, group, dim, parameter)) is not None:
                return why
    return None


def _why_not(optimizer: Optimizer, group: int, dim: int, like: Any) -> str | None:
    mesh = like.device_mesh
    shape = (ROWS_EACH * mesh.size(), COLUMNS)[:dim]
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(NUM_STEPS + 1, *shape, generator=generator).to(like.dtype)
    expected = _end(optimizer, group, list(numbers))
    if isinstance(expected, str):
        return None  # it cannot be tried at all
    found = _end(optimizer, group, [_rows_of(one, like) for one in numbers])
    if isinstance(found, str):
        return f"it cannot step on sharded parameters ({found})"
    size = float((expected - numbers[0]).abs().max())
    whole = full_tensor(found).cpu()
    if not torch.allclose(whole, expected, rtol=0.0, atol=ROUNDING * size + 1e-6, equal_nan=True):
        return "its steps on rows differ from those on whole parameters"
    return None


def _end(optimizer: Optimizer, group: int, numbers: list[Tensor]) -> Tensor | str:
    """Return the parameter after a trial's steps, or why there is none."""
    problem = ""
    for with_closure, with_state in itertools.product((False, True), (False, True)):
        try:
            with preserved_randomness():
                trial = Trial(optimizer, numbers[:1], group=group, with_closure=with_closure, with_state=with_state)
                for _ in trial.run([Phase([[one] for one in numbers[1:]])]):
                    pass
        except Exception as error:  # an optimizer may raise anything
            problem = problem or f"{type(error).__name__}: {error}".partition("\n")[0]
        else:
            return trial.parameters[0].detach()
    return problem


def _rows_of(whole: Tensor, like: Any) -> Tensor:
    from torch.distributed.tensor import DTensor, Shard

    index = like.device_mesh.get_local_rank()
    local = whole[index * ROWS_EACH : (index + 1) * ROWS_EACH].to(like.device)
    return DTensor.from_local(
        local, like.device_mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
