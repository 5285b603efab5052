"""`deepspeed.zero`: what of it has a meaning where a model is whole until `initialize` has it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm.sharded_tensors import is_sharded
from paceline.errors import PlanError

__all__ = ["GatheredParameters", "Init", "register_external_parameter"]


class Init(contextlib.ContextDecorator):
    """A model that is made within it is made as always: whole, in the host's memory, until `initialize` shards it.

    Arguments are taken for compatibility, and do nothing. `torch.device("meta")` and a checkpoint make a model that
    does not fit.
    """

    def __init__(self, module: nn.Module | None = None, **options: Any) -> None:
        self.module = module

    def __enter__(self) -> Init:
        return self

    def __exit__(self, *_: object) -> None:
        return None


@contextlib.contextmanager
def GatheredParameters(
    params: Any, modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True
) -> Iterator[None]:
    """Within it parameters are whole. What worker `modifier_rank` changes, all have afterwards.

    Raises PlanError for a parameter that is sharded already: it is whole before `initialize`, and in
    `engine.module_state_dict()`.
    """
    held = _parameters(params) if enabled else []
    if any(is_sharded(one) for one in held):
        raise PlanError(
            "deepspeed.zero.GatheredParameters(...) of sharded parameters: change weights before initialize(), and "
            "read them by engine.module_state_dict()."
        )
    yield
    if modifier_rank is not None and dist.is_initialized() and dist.get_world_size() > 1:
        for one in held:
            dist.broadcast(one.data, src=modifier_rank)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Parameters of other modules are gathered where they are used: there is nothing to register."""


def _parameters(given: Any) -> list[Tensor]:
    if isinstance(given, nn.Module):
        return list(given.parameters())
    return list(given) if isinstance(given, Iterable) and not isinstance(given, Tensor) else [given]
