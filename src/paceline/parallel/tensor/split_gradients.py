"""What the user's hooks see of the gradients of split tensors: a worker's part, which computes as parts do.

Hooks of modules (`register_full_backward_hook`) and of tensors (`register_hook`) get the gradient that is here. Under
tensor or context parallelism that is a part of the whole one. It is given to them as a `PartialTensor`: numbers may be
combined with numbers at the same place, and what needs the whole (a norm) is refused by name. Under context parallelism
gradients are those of the sum of all workers' losses: hooks see them divided by the number of workers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor
from torch.utils.hooks import BackwardHook

from paceline.parallel.partial_parameter import HeldPart, PartialTensor
from paceline.parallel.tensor.split_shapes import ranges
from paceline.parallel.tensor.split_tensor import SplitTensor, TokenSplitTensor
from paceline.parallel.torch_functions import on_parts

__all__ = ["hooked", "watch_backward_hooks"]


def hooked(tensor: Tensor, hook: Callable[[Any], Any]) -> Callable[[Tensor], Any]:
    """Return a hook for the gradient of a split tensor that calls the user's. Hooks of torch (FSDP
    has some) and of Paceline stay as they are."""
    if str(getattr(hook, "__module__", "")).partition(".")[0] in ("torch", "paceline"):
        return hook
    held = _held(tensor)
    return lambda gradient: _plain(hook(_marked(gradient, held)), held)


@functools.cache
def watch_backward_hooks() -> None:
    """Have torch give the user's hooks of modules parts of gradients as such, from now on."""
    for name, kind in (("setup_input_hook", "inputs"), ("setup_output_hook", "outputs")):
        setattr(BackwardHook, name, _watching(getattr(BackwardHook, name), kind))


def _watching(setup: Callable[..., Any], kind: str) -> Callable[..., Any]:
    @functools.wraps(setup)
    def set_up(self: Any, args: Sequence[Any]) -> Any:
        split = {
            place: _held(one) for place, one in enumerate(args) if isinstance(one, (SplitTensor, TokenSplitTensor))
        }
        if split:
            parts: dict[str, Mapping[int, _Held]] = self.__dict__.setdefault("held_parts", {})
            if not parts:
                self.user_hooks = [_of_module(one, parts) for one in self.user_hooks]
                self.user_pre_hooks = [_of_outputs(one, parts) for one in self.user_pre_hooks]
            parts[kind] = split
        return setup(self, args)

    return set_up


def _of_module(hook: Callable[..., Any], parts: Mapping[str, Mapping[int, _Held]]) -> Callable[..., Any]:
    def call(module: Any, inputs: Any, outputs: Any) -> Any:
        marked = (_all_marked(inputs, parts.get("inputs", {})), _all_marked(outputs, parts.get("outputs", {})))
        return _all_plain(hook(module, *marked), parts.get("inputs", {}))

    return call


def _of_outputs(hook: Callable[..., Any], parts: Mapping[str, Mapping[int, _Held]]) -> Callable[..., Any]:
    def call(module: Any, outputs: Any) -> Any:
        held = parts.get("outputs", {})
        return _all_plain(hook(module, _all_marked(outputs, held)), held)

    return call


class _Held(NamedTuple):
    part: HeldPart  # of the gradient of a split tensor
    num_losses: int  # of so many workers' summed losses it is the gradient


def _held(tensor: Any) -> _Held:
    with on_parts():
        shape = list(tensor.shape)
    shape[tensor.split_dim] = sum(tensor.sections)
    over = [tensor.ops, *([tensor.under.ops] if getattr(tensor, "under", None) is not None else [])]
    ops, is_of_tokens = tensor.ops, any(one.is_of_tokens for one in over)
    part = HeldPart(
        name=f"what {tensor.site} gives on",
        whole=tuple(shape),
        dim=tensor.split_dim,
        because=f"Layout({'context' if ops.is_of_tokens else 'tensor'}={ops.size}) splits it",
        ranges=() if is_of_tokens else ranges(tensor.sections, size=ops.size, index=ops.index),
        is_gradient=True,
    )
    return _Held(part, math.prod(one.size for one in over if one.is_of_tokens))


def _all_marked(gradients: Sequence[Any], held: Mapping[int, _Held]) -> tuple[Any, ...]:
    return tuple(_marked(one, held.get(place)) for place, one in enumerate(gradients))


def _marked(gradient: Any, held: _Held | None) -> Any:
    if held is None or type(gradient) is not Tensor:
        return gradient
    part = cast("Any", gradient.view_as(gradient) if held.num_losses == 1 else gradient / held.num_losses)
    part.__class__, part.held = PartialTensor, held.part
    return part


def _all_plain(result: Any, held: Mapping[int, _Held]) -> Any:
    """What a hook of a module returns, as torch takes it."""
    if not isinstance(result, (tuple, list)):
        return _plain(result, held.get(0))
    return tuple(_plain(one, held.get(place)) for place, one in enumerate(result))


def _plain(result: Any, held: _Held | None) -> Any:
    if not isinstance(result, Tensor):
        return result
    with on_parts():
        plain = result.as_subclass(Tensor) if isinstance(result, PartialTensor) else result
        return plain if held is None or held.num_losses == 1 else plain * held.num_losses
