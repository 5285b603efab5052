"""Recompute activations in backward instead of keeping them.

"blocks": each of a model's repeated blocks (the members of a ModuleList or Sequential of two or more modules of one
class) keeps only its inputs (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016). Random state is kept,
so dropout repeats exactly.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.errors import PlanError

__all__ = ["recompute_blocks", "repeated_blocks"]


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the outermost repeated blocks, with their names."""
    found: list[tuple[str, nn.Module]] = []
    inside: set[nn.Module] = set()
    for name, parent in model.named_modules():
        if parent in inside or not isinstance(parent, (nn.ModuleList, nn.Sequential)):
            continue
        children = list(parent.named_children())
        kinds = {type(child) for _, child in children}
        has_parameters = all(any(True for _ in child.parameters()) for _, child in children)
        if len(children) > 1 and len(kinds) == 1 and has_parameters:
            for child_name, child in children:
                found.append((f"{name}.{child_name}" if name else child_name, child))
                inside.update(child.modules())
    return found


def recompute_blocks(model: nn.Module) -> None:
    """Make every repeated block recompute in backward, in place; raises PlanError where there is none."""
    blocks = repeated_blocks(model)
    if not blocks:
        raise PlanError(
            f"Compute(recompute='blocks') found no repeated blocks in {type(model).__name__}: it looks for a "
            "ModuleList or Sequential "
            "of two or more modules of one class. Use recompute='none', or put the model's layers into a ModuleList."
        )
    for _, block in blocks:
        block.forward = _recomputed(block)


def _recomputed(block: nn.Module) -> Callable[..., Any]:
    """The block's forward with recomputation, as a method: `copy.deepcopy` binds a method to the copy."""
    forward: Any = block.forward
    if not isinstance(forward, types.MethodType) or forward.__self__ is not block:
        function = functools.partial(_call_unbound, forward)  # the user's own replacement, which copies share anyway
    else:
        function = forward.__func__

    @functools.wraps(forward)
    def run(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not block.training:
            return function(block, *args, **kwargs)
        return checkpoint(function, block, *args, use_reentrant=False, **kwargs)

    return types.MethodType(run, block)


def _call_unbound(forward: Callable[..., Any], _: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)
