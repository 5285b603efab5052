"""`LocalSGD` of Accelerate: the plan says how replicas take steps by themselves, and this looks whether it does."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from paceline.errors import PlanError

__all__ = ["LocalSGD", "LocalSGDBlock"]


class LocalSGDBlock:
    """A `with` block around a loop, under a plan with local SGD; its `step()` does nothing, since the run counts.

    Raises PlanError on several workers whose plan averages gradients in every step.
    """

    def __init__(self, accelerator: Any, model: Any, local_sgd_steps: int, enabled: bool = True) -> None:
        plan = accelerator.worker.plan
        if enabled and plan.layout.replicas != 1 and not plan.is_local:
            raise PlanError(
                f"LocalSGD(local_sgd_steps={local_sgd_steps}): that replicas take steps by themselves is said by the "
                f"plan, and {plan} averages gradients in every step. Use --plan 'localsgd(every={local_sgd_steps})'."
            )

    def __enter__(self) -> LocalSGDBlock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        return None

    def step(self) -> None:
        """A step was taken."""


LocalSGD = LocalSGDBlock  # its name in Accelerate
