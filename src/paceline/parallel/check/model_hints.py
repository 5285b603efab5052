"""What a script says of a model to those who cut it: `worker.prepare(model, sample=..., units=...)` and the like."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["ModelHints"]

LISTS = ("units", "stages", "tokenwise", "experts")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelHints:
    """The arguments of `worker.prepare` that layouts ask for. TypeError where a text stands for a list of names."""

    sample: Any = None  # arguments of a small forward: (x,) or {"input_ids": x}
    cut: Mapping[str, str] | None = None  # its own roles for layers: {"layers.*.attn.q": "column", ...}
    units: Sequence[str] = ()  # patterns of names of modules that are gathered, recomputed or placed as a whole
    stages: Sequence[str] = ()  # the units that stages after the first begin with
    tokenwise: Sequence[str] = ()  # modules that treat each token by itself though nobody can see it: "layers.*.moe"
    experts: Sequence[str] = ()  # modules that are routed experts, in place of those that are found

    def __post_init__(self) -> None:
        for name in LISTS:
            value = getattr(self, name)
            if isinstance(value, str):
                raise TypeError(f"worker.prepare({name}={value!r}) takes a list of names: {name}=[{value!r}]")
            object.__setattr__(self, name, tuple(value))
