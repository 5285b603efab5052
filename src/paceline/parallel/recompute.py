"""Recompute activations in backward instead of keeping them.

"blocks": each of a model's repeated blocks (the members of a ModuleList or Sequential of two or more modules of one
class) keeps only its inputs (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016). Random state is kept,
so dropout repeats exactly.
"""

from __future__ import annotations

import functools
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
        block.forward = _recomputed(block.forward, block)


def _recomputed(forward: Any, block: nn.Module) -> Any:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not block.training:
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run
