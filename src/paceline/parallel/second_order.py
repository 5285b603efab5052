"""Gradients of gradients, and function transforms, are refused by name where a layout's exchange has none.

An exchange between workers is an autograd function, whose backward is another exchange. Of tensor parallel ones the
backward can be differentiated again; others compute numbers that autograd does not follow. torch's own check speaks of
`once_differentiable`, and only where the second backward is already on its way.
"""

from __future__ import annotations

import torch

from paceline.errors import PlanError

__all__ = ["refuse_second_order", "refuse_transforms"]


def refuse_second_order(layout: str) -> None:
    """Called in a backward; raises PlanError in one with create_graph=True."""
    if torch.is_grad_enabled():
        raise PlanError(
            f"a gradient of gradients (create_graph=True) under {layout}: what its workers exchange in backward cannot "
            "be differentiated again. Use Layout(replicas=n) or Layout(tensor=n), or a penalty without second "
            "derivatives"
        )


def refuse_transforms(layout: str) -> None:
    """Called before an exchange; raises PlanError within torch.func.grad, jvp, vmap and the like."""
    if torch._C._are_functorch_transforms_active():  # pyright: ignore[reportPrivateUsage]  # there is no public name for it
        raise PlanError(
            f"a transform of torch.func (grad, jvp, vmap) under {layout}: what its workers exchange cannot be "
            "transformed. Use torch.autograd.grad on the model's output instead, or Layout(replicas=n)"
        )
