"""Words of the plan that are not built yet: each is refused by name, and the message says what to use now.

Building one of them removes its row here and adds a field, a legal value or a class.
"""

from __future__ import annotations

import re

__all__ = ["KINDS", "field", "kind"]

# Fields of a part, and single values of a field ("Field=value"): what it is, what to use now.
FIELDS = {
    "Layout.experts": (
        "spreading experts over workers (expert parallelism)",
        "Layout(shard=n), which splits the state over workers",
    ),
    "Compute.precision=fp16": (
        "fp16 arithmetic (it needs loss scaling)",
        "precision='bf16', which needs none, or precision='fp32'",
    ),
    "Compute.precision=fp8": ("fp8 arithmetic", "precision='bf16'"),
    "AllReduce.algorithm=ring": ("choosing the all-reduce algorithm", "algorithm='auto'"),
    "AllReduce.algorithm=tree": ("choosing the all-reduce algorithm", "algorithm='auto'"),
    "AllReduce.algorithm=halving": ("choosing the all-reduce algorithm", "algorithm='auto'"),
    "AllReduce.algorithm=hierarchical": ("choosing the all-reduce algorithm", "algorithm='auto'"),
}

# Classes: syncs, wires, and what belongs to them.
KINDS = {
    "ParameterServer": ("agreeing through parameter servers", "AllReduce()"),
    "LocalSGD": ("agreeing only every few steps (local SGD, DiLoCo)", "AllReduce()"),
    "Gossip": ("agreeing with neighbours only (gossip)", "AllReduce()"),
    "Nesterov": ("an outer optimizer for local SGD", "AllReduce()"),
    "Int8": ("sending 8-bit integers", "Cast(dtype='bf16') or Raw()"),
    "OneBit": ("sending one bit for each value", "Cast(dtype='bf16') or Raw()"),
    "TopK": ("sending only the largest values", "Cast(dtype='bf16') or Raw()"),
    "PowerSGD": ("sending low-rank factors", "Cast(dtype='bf16') or Raw()"),
    "Sparse": ("sending sparse gradients as such", "Raw() and modules with sparse=False"),
}


def field(cls: str, name: str, value: object) -> str | None:
    """Return why field `name` of class `cls`, or this value of it, is refused; None where the tables do not have it."""
    row = FIELDS.get(f"{cls}.{name}") or FIELDS.get(f"{cls}.{name}={value}")
    return f"{cls}({name}={_shown(value)}): {row[0]} is not built yet. Use {row[1]}." if row else None


def kind(name: str) -> str | None:
    """Return why the class `name` (in any spelling, "PowerSGD" or "power_sgd") is refused; None where it is unknown."""
    folded = name.replace("_", "").lower()
    for known, (what, instead) in KINDS.items():
        if known.lower() == folded:
            return f"{known}: {what} is not built yet. Use {instead}."
    return None


def _shown(value: object) -> str:
    """As Python would write it; a number that came as text needs no quotes."""
    return value if isinstance(value, str) and re.fullmatch(r"[\d.-]+|true|false", value) else repr(value)
