"""Makes the optimizer and the schedule of a configuration, and the names that DeepSpeed's own optimizers have."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.compat.deepspeed import schedules
from paceline.compat.deepspeed_files.optimizer_names import OptimizerChoice
from paceline.compat.deepspeed_files.schedule_names import OPTIONS, ScheduleChoice
from paceline.errors import PlanError

__all__ = ["DeepSpeedCPUAdam", "FusedAdam", "make_optimizer", "make_schedule"]


class FusedAdam(torch.optim.AdamW):
    """torch's AdamW under the name, and with the options, of DeepSpeed's: no weight decay by default."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        """Raises PlanError for `bias_correction=False`, which torch's has not, and for `adam_w_mode=False`."""
        if not bias_correction or not adam_w_mode:
            raise PlanError(
                f"FusedAdam(bias_correction={bias_correction}, adam_w_mode={adam_w_mode}): torch's own "
                "optimizer stands for it, which corrects its bias, and decays weights apart from the gradient. "
                "Use torch.optim.Adam for adam_w_mode=False."
            )
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)


class DeepSpeedCPUAdam(FusedAdam):
    """torch's AdamW under DeepSpeed's name for the optimizer of state that lies in the host's memory."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            adam_w_mode=adamw_mode,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
        )


def make_optimizer(choice: OptimizerChoice, parameters: Iterable[Any]) -> Optimizer:
    """Make an optimizer of a configuration. Raises PlanError where torch refuses its options."""
    made: Any = getattr(torch.optim, choice.name)
    try:
        return made(list(parameters), **choice.options)
    except (TypeError, ValueError) as error:
        known = ", ".join(list(inspect.signature(made).parameters)[1:])
        raise PlanError(f"optimizer.params: torch refuses {choice}: {error}. It takes {known}.") from error


def make_schedule(choice: ScheduleChoice, optimizer: Optimizer) -> Any:
    """Make a schedule of a configuration. Raises PlanError where an option is refused."""
    module: Any = schedules if choice.name in OPTIONS else torch.optim.lr_scheduler
    made = getattr(module, choice.name, None)
    if made is None:
        raise PlanError(f"scheduler.type is {choice.name!r}: torch.optim.lr_scheduler has no such class.")
    try:
        return made(optimizer, **choice.options)
    except (TypeError, ValueError) as error:
        raise PlanError(f"scheduler.params: {choice.name} refuses {dict(choice.options)}: {error}.") from error
