"""What a script says about a model, for every axis that splits it: `worker.prepare(model, sample=..., units=...)`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["ModelHints"]

LISTS = ("units", "stages", "tokenwise", "experts")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelHints:
    """The arguments of `worker.prepare` that layouts use. Raises TypeError for a string where a list of names is
    expected."""

    sample: Any = None  # arguments of a small forward: (x,) or {"input_ids": x}
    cut: Mapping[str, str] | None = None  # the user's roles for layers: {"layers.*.attn.q": "column", ...}
    units: Sequence[str] = ()  # patterns of names of modules that are gathered, recomputed or placed as a whole
    stages: Sequence[str] = ()  # the units with which stages after the first begin
    # modules that treat each token by itself although torch functions do not show it: "layers.*.moe"
    tokenwise: Sequence[str] = ()
    experts: Sequence[str] = ()  # modules that are routed experts, instead of those found automatically

    def __post_init__(self) -> None:
        for name in LISTS:
            value = getattr(self, name)
            if isinstance(value, str):
                raise TypeError(f"worker.prepare({name}={value!r}) takes a list of names: {name}=[{value!r}]")
            object.__setattr__(self, name, tuple(value))
