"""The layers that can be cut, and what each does on one worker: `Layer` says how, `install` gives it its new forward.

    role          weight of a Linear, out x in      input             result                crossings
    column        rows (its outputs)                plain             cut in its features   spread before
    row           columns (its inputs)              cut in features   plain                 total after; bias after that
    head          rows                              plain             plain                 spread before, gather after
    vocabulary    an Embedding's rows               token numbers     plain                 total after
    attention     heads of nn.MultiheadAttention    plain             plain                 spread before, total after

A column layer and the row layer behind it make a pair with one all-reduce forward and one backward. An Embedding may
also be a column: its features are cut (T5's bias of each head, say).
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from paceline.parallel.tensor.multihead_attention import attend, refusal
from paceline.parallel.tensor.split_shapes import Sections, ranges
from paceline.parallel.tensor.split_tensor import SplitTensor, TensorGroupOps, wrap

__all__ = ["ROLES", "Kind", "Layer", "Role", "cut_dims", "install", "kind_of", "width_of"]

Role = Literal["column", "row", "head", "vocabulary", "attention"]
Kind = Literal["linear", "conv1d", "embedding", "attention"]
ROLES: tuple[Role, ...] = ("column", "row", "head", "vocabulary", "attention")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A layer that is cut: its name in the model, how, and in which sections of its features (or tokens, or heads)."""

    name: str
    role: Role
    sections: Sections


def kind_of(module: nn.Module) -> Kind | None:
    """Return what a module is, if it is a layer that can be cut; a class with a forward of its own is not, nor is one
    whose weight is computed of other parameters (weight_norm, spectral_norm)."""
    if any(is_parametrized(one) or _has_made_weight(one) for one in module.modules()):
        return None
    forward = type(module).forward
    if isinstance(module, nn.MultiheadAttention):
        return "attention" if forward is nn.MultiheadAttention.forward and refusal(module) is None else None
    if isinstance(module, nn.Linear):
        return "linear" if forward is nn.Linear.forward else None
    if isinstance(module, nn.Embedding):
        is_plain = module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
        return "embedding" if forward is nn.Embedding.forward and is_plain else None
    # GPT-2's layer, as transformers has it: a Linear whose weight is in x out. That package is not imported here.
    if type(module).__name__ == "Conv1D" and {"nf", "weight", "bias"} <= {
        *vars(module),
        *dict(module.named_parameters()),
    }:
        return "conv1d"
    return None


def _has_made_weight(module: nn.Module) -> bool:
    """Whether a hook makes the weight before each forward, as the older weight_norm does."""
    return "weight" in vars(module)


def width_of(module: nn.Module, kind: Kind, *, side: Literal["in", "out"]) -> int:
    """The number of features that go in or come out."""
    parameters: Any = module
    weight = parameters.weight if kind != "attention" else parameters.out_proj.weight
    return weight.shape[_dim(kind, side)]


def cut_dims(module: nn.Module, kind: Kind, layer: Layer) -> list[tuple[nn.Parameter, int, Sections]]:
    """Return the parameters of a layer that are cut, each with its dim and sections; the others are held whole."""
    parameters: Any = module
    if layer.role == "attention":
        width = parameters.embed_dim
        found = [(parameters.out_proj.weight, 1, (width,))]
        if parameters._qkv_same_embed_dim:
            found.append((parameters.in_proj_weight, 0, (width,) * 3))
        else:
            found += [(getattr(parameters, f"{one}_proj_weight"), 0, (width,)) for one in "qkv"]
        if parameters.in_proj_bias is not None:
            found.append((parameters.in_proj_bias, 0, (width,) * 3))
        return found
    side: Literal["in", "out"] = "in" if layer.role in ("row", "vocabulary") else "out"
    found = [(parameters.weight, _dim(kind, side), layer.sections)]
    if side == "out" and kind != "embedding" and parameters.bias is not None:
        found.append((parameters.bias, 0, layer.sections))
    return found


def install(module: nn.Module, kind: Kind, layer: Layer, team: TensorGroupOps) -> None:
    """Give a module the forward of its part, in place; its parameters must have been cut, or `team` be of one."""
    forward = FORWARDS[layer.role]

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = (module, kind, layer, team, *args)
        return forward(*given, **kwargs) if team.beside is None else team.beside.in_layer(forward, given, kwargs)

    module.forward = types.MethodType(run, module)  # `copy.deepcopy` binds a method to the copy


def _dim(kind: Kind, side: Literal["in", "out"]) -> int:
    """Of the weight: Linear is out x in, Conv1D in x out, an Embedding number x features."""
    return int((side == "in") == (kind == "linear"))


def _product(kind: Kind, team: TensorGroupOps, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with team.on_parts():
        if kind == "linear":
            return F.linear(x, weight, bias)
        rows = x.reshape(-1, x.shape[-1])
        out = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
        return out.view(*x.shape[:-1], weight.shape[1])


def _column(module: Any, kind: Kind, layer: Layer, team: TensorGroupOps, x: Tensor) -> Tensor:
    if kind == "embedding":
        out = F.embedding(team.plain(x), module.weight, _padding(module, 0))
    else:
        out = _product(kind, team, team.enter(x), module.weight, module.bias)
    return wrap(out, team=team, dim=out.ndim - 1, sections=layer.sections, site=layer.name)


def _head(module: Any, kind: Kind, layer: Layer, team: TensorGroupOps, x: Tensor) -> Tensor:
    part: Any = _column(module, kind, layer, team, x)
    team.forget()
    return team.gather(part)


def _row(module: Any, kind: Kind, layer: Layer, team: TensorGroupOps, x: Tensor) -> Tensor:
    if isinstance(x, SplitTensor) and x.split_dim == x.ndim - 1 and x.sections == layer.sections:
        part: Tensor = x
    else:
        plain = team.plain(x)
        part = team.scatter(plain, dim=plain.ndim - 1, sections=layer.sections)
    summed = team.leave(_product(kind, team, part, module.weight, None), site=layer.name)
    return summed if module.bias is None else summed + module.bias


def _vocabulary(module: Any, kind: Kind, layer: Layer, team: TensorGroupOps, tokens: Tensor) -> Tensor:
    tokens = team.plain(tokens)
    [(start, stop)] = ranges(layer.sections, size=team.size, index=team.index)
    if team.size == 1:
        return team.leave(F.embedding(tokens, module.weight, _padding(module, 0)), site=layer.name)
    # Numbers of no word are left to the first and the last, whose tables refuse them as the whole one does.
    elsewhere = tokens >= stop if team.index == 0 else tokens < start
    if 0 < team.index < team.size - 1:
        elsewhere = elsewhere | (tokens >= stop)
    known = (tokens - start).masked_fill(elsewhere, 0)
    padding = _padding(module, start)
    found = F.embedding(known, module.weight, padding if padding is not None and 0 <= padding < stop - start else None)
    return team.leave(found.masked_fill(elsewhere.unsqueeze(-1), 0), site=layer.name)


def _padding(module: Any, start: int) -> int | None:
    return None if module.padding_idx is None else module.padding_idx - start


def _attention(module: Any, kind: Kind, layer: Layer, team: TensorGroupOps, *args: Any, **kwargs: Any) -> Any:
    return attend(module, team, layer.name, *args, **kwargs)


FORWARDS: dict[Role, Callable[..., Any]] = {
    "column": _column,
    "row": _row,
    "head": _head,
    "vocabulary": _vocabulary,
    "attention": _attention,
}
