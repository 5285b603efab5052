"""Compile a model with `torch.compile`: as a whole where its code sees plain tensors only, or region by region.

A region is a block, or a module that the user has made a unit. Between regions the model's own code runs as it is
written: there pipeline stages take values from each other. Within a region experts exchange tokens, which the compiler
leaves out (`torch.compiler.disable`). Blocks of one class share what was compiled.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack  # pyright: ignore[reportPrivateUsage]  # no public name

from paceline.parallel.model_units import blocks_of, find_units
from paceline.plan import Layout

__all__ = ["compile_regions", "compile_whole", "is_compiled_whole", "leave_out"]

BACKEND = "inductor"
# Compiled code draws the random numbers that the code as written draws, so dropout is the same under every layout.
OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"fallback_random": True}
SHAPES = 8  # kinds of calls that each region may have: training, evaluation, other lengths


def is_compiled_whole(layout: Layout) -> bool:
    """Whether a model is compiled as a whole under a layout; otherwise region by region."""
    return layout.stages == layout.experts == 1


def compile_whole(model: nn.Module) -> None:
    """Compile a model's own call, in place; torch does it at the first forward."""
    model.compile(**_how())


def compile_regions(model: nn.Module, units: Sequence[str] = ()) -> None:
    """Compile the forward of each block, in place: the modules named `units`, or else the repeated blocks; where there
    are none, all units (`find_units`). Calls of torch functions on the meta device run as written."""
    regions = [module for _, module in blocks_of(model, units)] or [one.module for one in find_units(model)]
    from torch._dynamo import config  # it takes a second to import

    # Torch counts what it compiles by code, which all blocks of a class share, and goes on uncompiled after 8 kinds.
    config.recompile_limit = max(config.recompile_limit, SHAPES * len(regions))
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 4 * SHAPES * len(regions))
    for module in regions:
        module.forward = _compiled(module)


def leave_out(module: nn.Module) -> None:
    """Have compiled code call a module as written. Its forward must be a method of it, and stays one."""
    forward: Any = module.forward
    module.forward = types.MethodType(torch.compiler.disable(forward.__func__), module)


def _is_recorded() -> bool:
    """Whether each torch function is being looked at, as when a pipeline's forward is recorded."""
    return any(type(mode).__module__.startswith("paceline.") for mode in _get_current_function_mode_stack())


def _how() -> dict[str, Any]:
    return {"backend": BACKEND, **({"options": OPTIONS} if BACKEND == "inductor" else {})}


def _compiled(module: nn.Module) -> Callable[..., Any]:
    """A module's forward, compiled, as a method: `copy.deepcopy` binds a method to the copy."""
    forward: Any = module.forward
    is_method = isinstance(forward, types.MethodType) and forward.__self__ is module
    function: Callable[..., Any] = (
        forward.__func__ if is_method else lambda _, *args, **kwargs: forward(*args, **kwargs)
    )
    compiled: Callable[..., Any] = torch.compile(function, **_how())

    @functools.wraps(forward)
    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_meta = any(isinstance(one, Tensor) and one.is_meta for one in (*args, *kwargs.values()))
        return (function if is_meta or _is_recorded() else compiled)(module, *args, **kwargs)

    return types.MethodType(run, module)
