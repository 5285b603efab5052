"""In which types a model computes.

fp32: as written. bf16, fp16: weights and optimizer stay fp32, matrix work runs in that type by autocast. fp64:
everything in double precision, the reference for parity. fp8: as bf16, but for linear layers (`parallel.float8`).
That losses are scaled in fp16 is the step's business (`worker.step.loss_scale`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from paceline.errors import PlanError
from paceline.parallel.part_dtype import later_dtype

__all__ = ["HALVES", "computing", "computing_body", "convert", "input_dtype"]

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}  # by precision: autocast's type


def convert(model: nn.Module, precision: str) -> None:
    """Change the model's own types where the precision asks for it, in place. Raises PlanError for trained weights in
    fp16 under fp16: their gradients would vanish when the loss scale is taken out of them."""
    if precision == "fp64":
        model.double()
    named = model.named_parameters() if precision == "fp16" else ()
    for name, parameter in named:
        if later_dtype(parameter) == torch.float16 and parameter.requires_grad:
            raise PlanError(
                f"{name} is trained and has 16 bits, but Compute(precision='fp16') keeps weights in fp32, and computes "
                "with copies of them in fp16: call model.float() before worker.prepare(model)."
            )


def input_dtype(precision: str) -> torch.dtype | None:
    """The type that floating inputs are converted to, or None."""
    return torch.float64 if precision == "fp64" else None


@contextlib.contextmanager
def computing(precision: str, device: torch.device) -> Iterator[None]:
    """What surrounds each forward: autocast for bf16 and fp16, a default type of float64 for fp64."""
    if precision in HALVES:
        with torch.autocast(device.type, dtype=HALVES[precision]):
            yield
    elif precision == "fp64":
        former = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(former)
    else:
        yield


def computing_body(precision: str, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """What surrounds code whose models autocast in their own forwards: the default type of fp64, or nothing."""
    return contextlib.nullcontext() if precision in HALVES else computing(precision, device)
