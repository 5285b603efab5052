"""Plans that assign roles to layers by name: the user's own, and those that transformers models carry.

Such a plan maps names of layers to roles: {"layers.*.attn.q": "column", "layers.*.attn.o": "row"}. `*` stands for one
part of a name, a lone "*" for every layer. The first pattern that fits counts. Layers that no pattern names are found
automatically. {"...": "replicated"} leaves a layer whole; {"*": "replicated"} as the last pattern leaves all others
whole.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any, cast, get_args

from torch import nn

from paceline.errors import Reason
from paceline.parallel.tensor.layer_trace import LayerSite
from paceline.parallel.tensor.layers import ROLES, Kind, Role

__all__ = ["REPLICATED", "huggingface_plan", "match_layers"]

REPLICATED = "replicated"
LEGAL = (*ROLES, REPLICATED)
FITS: dict[Role, tuple[Kind, ...]] = {
    "column": ("linear", "conv1d", "embedding"),
    "row": ("linear", "conv1d"),
    "head": ("linear", "conv1d"),
    "vocabulary": ("embedding",),
    "attention": ("attention",),
}

# The styles of transformers for layers; styles of expert parallelism are missing because they belong to another axis.
HUGGINGFACE_ROLES: dict[str, str] = {
    "colwise": "column",
    "colwise_rep": "head",
    "colwise_gather_output": "head",
    "rowwise": "row",
    "rowwise_rep": "row",
    "rowwise_split_input": "row",
    "packed_colwise": "column",
    "packed_rowwise": "row",
    "embedding_rowwise": "vocabulary",
    "replicate": REPLICATED,
    "replicated_with_grad_allreduce": REPLICATED,
}


def match_layers(
    plan: Mapping[str, str], sites: Mapping[str, LayerSite], *, modules: Collection[str] = ()
) -> tuple[dict[str, str], list[Reason]]:
    """Return the role of each layer that the plan names, and what is wrong with the plan."""
    roles: dict[str, str] = {}
    wrong: list[Reason] = []
    for pattern, role in plan.items():
        if role not in LEGAL:
            near = difflib.get_close_matches(str(role), LEGAL, n=1)
            legal = f"it must be one of {', '.join(map(repr, LEGAL))}."
            hint = f"Did you mean {near[0]!r}?" if near else ""
            wrong.append(Reason(module=pattern, what=f"plan[{pattern!r}] is {role!r}; {legal}", remedy=hint))
            continue
        names = [name for name in sites if _fits(pattern, name)]
        if not names:
            wrong.append(_unknown(pattern, sites, modules))
        for name in names:
            if name in roles:
                continue
            kind = sites[name].kind
            if role != REPLICATED and kind not in FITS[role]:
                can = [one for one in ROLES if kind in FITS[one]]
                wrong.append(
                    Reason(
                        module=name,
                        what=f"plan[{pattern!r}] makes {name} a {role!r} layer, but it is "
                        f"{type(sites[name].module).__name__}, which can be {' or '.join(map(repr, can))}.",
                        remedy="",
                    )
                )
                continue
            roles[name] = role
    return roles, wrong


def huggingface_plan(model: nn.Module, sites: Mapping[str, LayerSite]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the plan that a transformers model carries, as roles, and the entries that are not followed with reasons.

    Entries that name no layer here (experts' parameters, modules of other sizes of the model) are left out.
    """
    carried: Any = getattr(model, "_tp_plan", None)
    if not isinstance(carried, Mapping) or not carried:
        base: Any = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
        carried = base if isinstance(base, Mapping) else {}
    followed: dict[str, str] = {}
    other: dict[str, str] = {}
    for pattern, style in carried.items():
        names = [name for name in sites if _fits(pattern, name)]
        role = HUGGINGFACE_ROLES.get(style)
        if not names or role is None:
            other[pattern] = f"the model's own plan says {style!r}, which is not about layers"
        elif all(
            sites[name].kind in (FITS[cast(Role, role)] if role != REPLICATED else get_args(Kind)) for name in names
        ):
            followed[pattern] = role
    return followed, other


def _fits(pattern: str, name: str) -> bool:
    if pattern == "*":
        return True
    parts, given = name.split("."), pattern.split(".")
    return len(parts) == len(given) and all(one in ("*", part) for one, part in zip(given, parts, strict=True))


def _unknown(pattern: str, sites: Mapping[str, LayerSite], modules: Collection[str]) -> Reason:
    if any(_fits(pattern, name) for name in modules):
        what = f"plan[{pattern!r}] names a module that is no layer with weights to split:"
        return Reason(module=pattern, what=what, remedy="name the Linear layers in it.")
    general = sorted({".".join("*" if part.isdigit() else part for part in name.split(".")) for name in sites})
    near = difflib.get_close_matches(pattern, general, n=3, cutoff=0.4) or general[:3]
    what = f"plan[{pattern!r}] fits no layer of the model."
    return Reason(module=pattern, what=what, remedy=f"Near it: {', '.join(map(repr, near))}.")
