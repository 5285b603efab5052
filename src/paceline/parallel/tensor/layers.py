"""The layers that can be split: `Layer` says in which role, and `install` gives the module its new forward.

    role         weight of a Linear, out x in     input              result               collectives
    column       rows (its outputs)               plain              split in features    copy before
    row          columns (its inputs)             split in features  plain                total, then bias
    head         rows                             plain              plain                copy before, gather after
    vocabulary   an Embedding's rows              token numbers      plain                total after
    attention    heads of nn.MultiheadAttention   plain              plain                copy before, total after

A column layer and the row layer behind it make a pair with one all-reduce forward and one backward. An Embedding may
also be a column layer, with split features (T5's bias of each head, for example).
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

__all__ = ["ROLES", "Kind", "Layer", "Role", "install", "kind_of", "split_dims", "width_of"]

Role = Literal["column", "row", "head", "vocabulary", "attention"]
Kind = Literal["linear", "conv1d", "embedding", "attention"]
ROLES: tuple[Role, ...] = ("column", "row", "head", "vocabulary", "attention")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A layer that is split: its name, its role, and the sections of its features (or tokens, or heads)."""

    name: str
    role: Role
    sections: Sections


def kind_of(module: nn.Module) -> Kind | None:
    """Return what kind of splittable layer a module is; None where it is none.

    Classes with a forward of their own cannot be split. Neither can layers whose weight is computed from other
    parameters (weight_norm, spectral_norm).
    """
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
    # GPT-2's layer in transformers: a Linear whose weight is in x out. That package is not imported here.
    if type(module).__name__ == "Conv1D" and {"nf", "weight", "bias"} <= {
        *vars(module),
        *dict(module.named_parameters()),
    }:
        return "conv1d"
    return None


def _has_made_weight(module: nn.Module) -> bool:
    """Return whether a hook makes the weight before each forward, as the older weight_norm does."""
    return "weight" in vars(module)


def width_of(module: nn.Module, kind: Kind, *, side: Literal["in", "out"]) -> int:
    """Return the number of input or output features."""
    parameters: Any = module
    weight = parameters.weight if kind != "attention" else parameters.out_proj.weight
    return weight.shape[_dim(kind, side)]


def split_dims(module: nn.Module, kind: Kind, layer: Layer) -> list[tuple[nn.Parameter, int, Sections]]:
    """Return the parameters of a layer that are split, each with its dim and sections; the others stay whole."""
    parameters: Any = module
    if layer.role == "attention":
        width = parameters.embed_dim
        found: list[tuple[nn.Parameter, int, Sections]] = [(parameters.out_proj.weight, 1, (width,))]
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


def install(module: nn.Module, kind: Kind, layer: Layer, ops: TensorGroupOps) -> None:
    """Give a module the forward for its part, in place; its parameters must have been split, or `ops` be of one
    worker.
    """
    forward = FORWARDS[layer.role]

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = (module, kind, layer, ops, *args)
        return forward(*given, **kwargs) if ops.combined is None else ops.combined.in_layer(forward, given, kwargs)

    module.forward = types.MethodType(run, module)  # `copy.deepcopy` binds a method to the copy


def _dim(kind: Kind, side: Literal["in", "out"]) -> int:
    """Return the weight's dim of a side: Linear is out x in, Conv1D in x out, an Embedding tokens x features."""
    return int((side == "in") == (kind == "linear"))


def _product(kind: Kind, ops: TensorGroupOps, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with ops.on_parts():
        if kind == "linear":
            return F.linear(x, weight, bias)
        rows = x.reshape(-1, x.shape[-1])
        out = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
        return out.view(*x.shape[:-1], weight.shape[1])


def _column(module: Any, kind: Kind, layer: Layer, ops: TensorGroupOps, x: Tensor) -> Tensor:
    if kind == "embedding":
        tokens = ops.plain(x)
        with ops.on_parts():
            out = F.embedding(tokens, module.weight, _padding(module, 0))
    else:
        out = _product(kind, ops, ops.enter(x), module.weight, module.bias)
    return wrap(out, ops=ops, dim=out.ndim - 1, sections=layer.sections, site=layer.name)


def _head(module: Any, kind: Kind, layer: Layer, ops: TensorGroupOps, x: Tensor) -> Tensor:
    part: Any = _column(module, kind, layer, ops, x)
    ops.forget()
    return ops.gather(part)


def _row(module: Any, kind: Kind, layer: Layer, ops: TensorGroupOps, x: Tensor) -> Tensor:
    if isinstance(x, SplitTensor) and x.split_dim == x.ndim - 1 and x.sections == layer.sections:
        part: Tensor = x
    else:
        plain = ops.plain(x)
        part = ops.scatter(plain, dim=plain.ndim - 1, sections=layer.sections)
    summed = ops.leave(_product(kind, ops, part, module.weight, None), site=layer.name)
    return summed if module.bias is None else summed + module.bias


def _vocabulary(module: Any, kind: Kind, layer: Layer, ops: TensorGroupOps, tokens: Tensor) -> Tensor:
    tokens = ops.plain(tokens)
    [(start, stop)] = ranges(layer.sections, size=ops.size, index=ops.index)
    if ops.size == 1:
        with ops.on_parts():
            out = F.embedding(tokens, module.weight, _padding(module, 0))
        return ops.leave(out, site=layer.name)
    # Illegal token numbers are left to the first and the last worker, whose tables raise the usual error.
    elsewhere = tokens >= stop if ops.index == 0 else tokens < start
    if 0 < ops.index < ops.size - 1:
        elsewhere = elsewhere | (tokens >= stop)
    known = (tokens - start).masked_fill(elsewhere, 0)
    padding = _padding(module, start)
    padding = padding if padding is not None and 0 <= padding < stop - start else None
    with ops.on_parts():
        found = F.embedding(known, module.weight, padding)
    return ops.leave(found.masked_fill(elsewhere.unsqueeze(-1), 0), site=layer.name)


def _padding(module: Any, start: int) -> int | None:
    return None if module.padding_idx is None else module.padding_idx - start


def _attention(module: Any, kind: Kind, layer: Layer, ops: TensorGroupOps, *args: Any, **kwargs: Any) -> Any:
    return attend(module, ops, layer.name, *args, **kwargs)


FORWARDS: dict[Role, Callable[..., Any]] = {
    "column": _column,
    "row": _row,
    "head": _head,
    "vocabulary": _vocabulary,
    "attention": _attention,
}
