"""Which optimizer of torch stands for an optimizer of DeepSpeed's configuration. No torch here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from paceline.errors import PlanError

__all__ = ["OptimizerChoice", "choose_optimizer"]

# Of torch.optim: DeepSpeed takes any of them by its class name.
OF_TORCH = (
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)

_COMPRESSED = (
    "it sends the sign of the momentum after freeze_step. Here gradients are compressed, by the plan, with error "
    "feedback, beside any optimizer: use AdamW, and --plan '...+onebit' or '...+powersgd(rank=4)'"
)
_OWN = "torch has none. Make the optimizer in the program, and pass it: initialize(optimizer=...)"
_REFUSED = {
    "onebitadam": _COMPRESSED,
    "zerooneadam": _COMPRESSED,
    "onebitlamb": _COMPRESSED.replace("AdamW", "AdamW, or a LAMB of your own"),
    "lamb": _OWN,
    "lion": _OWN,
    "muon": "DeepSpeed's has an AdamW beside it for parameters that are no matrices. Make both in the program: "
    "torch.optim.Muon takes matrices",
    "muadam": "it is of the package mup: make it in the program, and pass it: initialize(optimizer=...)",
    "muadamw": "it is of the package mup: make it in the program, and pass it: initialize(optimizer=...)",
    "musgd": "it is of the package mup: make it in the program, and pass it: initialize(optimizer=...)",
}
_DROPPED = ("fp32_optimizer_states", "set_grad_none", "adamw_mode")  # they say how DeepSpeed's own kernels store state


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerChoice:
    """A class of torch.optim, and its options."""

    name: str
    options: Mapping[str, Any]

    def __str__(self) -> str:
        return f"torch.optim.{self.name}({', '.join(f'{key}={value!r}' for key, value in self.options.items())})"


def choose_optimizer(kind: str, params: Mapping[str, Any]) -> OptimizerChoice:
    """Return what stands for an optimizer of this type. Raises PlanError for one that nothing here stands for.

    DeepSpeed's Adam decays weights as AdamW does, unless adam_w_mode is false, and decays none by default.
    """
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in params.items()}
    name = kind.lower()
    if name in _REFUSED:
        raise PlanError(f"optimizer.type is {kind!r}: {_REFUSED[name]}.")
    if "max_grad_norm" in options:
        raise PlanError(
            "optimizer.params.max_grad_norm: gradients are clipped by gradient_clipping of the whole config."
        )
    for key in _DROPPED:
        options.pop(key, None)
    if name in ("adam", "adamw"):
        return _adam(kind, options)
    for one in OF_TORCH:
        if one == kind or (one == "Adagrad" and name == "adagrad"):
            return OptimizerChoice(name=one, options=options)
    known = ", ".join(("Adam", "AdamW", *(one for one in OF_TORCH if not one.startswith("Adam"))))
    raise PlanError(f"optimizer.type is {kind!r}; it must be one of {known}. {_OWN[0].upper()}{_OWN[1:]}.")


def _adam(kind: str, options: dict[str, Any]) -> OptimizerChoice:
    is_torchs = bool(options.pop("torch_adam", False))
    decays_apart = bool(options.pop("adam_w_mode", True)) or kind.lower() == "adamw"
    if options.pop("bias_correction", True) is False:
        raise PlanError(
            "optimizer.params.bias_correction is false: torch's Adam always corrects its bias. Leave it out, or pass "
            "an optimizer of your own: initialize(optimizer=...)."
        )
    if not is_torchs:
        options.setdefault("weight_decay", 0.0)
    return OptimizerChoice(name="AdamW" if decays_apart else "Adam", options=options)
