"""Parameters of which a worker holds a part, or nothing: code that would read the whole is refused by name.

Tensor and expert parallelism leave a worker with a slice of a parameter, pipeline stages with none of many. The layers
know that. Other code does not: `p.norm()`, `sum(p.pow(2).sum() for p in model.parameters())`, or a projection of the
weights computes on the slice, and nobody would notice. So these parameters are of a class of their own, which sees each
torch function that takes them. The layers' own forwards, Paceline and optimizers use them as before.

For all other code the rules are: questions about shape, type and gradient are answered for the part. Numbers may be
combined with numbers at the same place (`p.mul_(0.9)`, an average of the weights). The result is a `PartialTensor`,
with the same rules. Everything else would need the whole, or numbers of other workers, and is refused.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.optim.optimizer as optimizer_module
from torch import Tensor, nn

from paceline.errors import PlanError, Reason

__all__ = ["HeldPart", "PartialParameter", "PartialTensor", "mark_partial", "on_parts"]

# Within it our classes are plain tensors. torch documents this class and has no public name for it.
on_parts = torch._C.DisableTorchFunctionSubclass  # pyright: ignore[reportPrivateUsage]  # see above

TORCH_DIR = str(Path(torch.__file__).parent)
OWN_DIR = str(Path(__file__).parents[1])
OPTIMIZERS_DIR, LAYERS_DIR = f"{TORCH_DIR}/optim/", f"{TORCH_DIR}/nn/"
MODULE_FILE, OPTIMIZER_FILE = f"{TORCH_DIR}/nn/modules/module.py", f"{TORCH_DIR}/optim/optimizer.py"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HeldPart:
    """What this worker holds of one parameter. `dim`: along which it is split; None where all of it is elsewhere."""

    name: str
    whole: tuple[int, ...]
    dim: int | None
    because: str  # "Layout(tensor=2) splits it", for messages

    def refusal(self, what: str) -> PlanError:
        here = "nothing of it" if self.dim is None else "a part of it"
        said = (
            f"{what} needs the whole of {self.name} {list(self.whole)}, but this worker holds {here}: {self.because}."
        )
        remedy = (
            "A penalty on weights belongs in worker.stepper(..., penalty=fn): fn(name, parameter) gets each parameter "
            "whole. Compute other values of whole weights "
            "before worker.prepare(model), or from a checkpoint."
        )
        return PlanError(f"{said} {remedy}", reasons=[Reason(module=self.name, what=said, remedy=remedy)])


class PartialTensor(Tensor):
    """Numbers made from a worker's part of a parameter, each from the one at the same place."""

    held: HeldPart

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _call(func, types, args, kwargs or {})


class PartialParameter(nn.Parameter):
    """A parameter of which this worker holds a part, or nothing; made by `mark_partial` only."""

    held: HeldPart

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _call(func, types, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> PartialParameter:
        if id(self) not in memo:
            with on_parts():
                copied = nn.Parameter(self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)
            memo[id(self)] = mark_partial(copied, self.held)
        return memo[id(self)]


# torch's optimizers take their fast paths for these classes only.
for_each: list[type] = getattr(optimizer_module, "_foreach_supported_types", [])
for_each += [] if PartialParameter in for_each else [PartialParameter]


def mark_partial(parameter: nn.Parameter, held: HeldPart) -> Any:
    """Make `parameter` a PartialParameter, in place: it stays the same object."""
    marked = cast("Any", parameter)
    if type(parameter) is nn.Parameter:
        marked.__class__ = PartialParameter
    marked.held = held
    return marked


def _call(func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function that met a partial tensor, by the rules above; raises PlanError."""
    if any(one not in (Tensor, nn.Parameter, PartialParameter, PartialTensor) for one in types):
        return NotImplemented  # another class's rules know more: SplitTensor's, for example
    name = _name_of(func)
    with on_parts():
        if name in ABOUT or _is_trusted():
            if name == "reduce_ex":
                return args[0].detach().__reduce_ex__(*args[1:])
            return func(*args, **kwargs)
        partial = list(_partial_in((args, kwargs)))
        held = partial[0].held
        if name.removesuffix("_") not in POINTWISE:
            raise held.refusal(f"{name}()" if not name.startswith("get:") else f".{name[4:]}")
        _check_operands(name, held, partial[0], (args, kwargs))
        out = func(*args, **kwargs)
        if name.startswith("_foreach_") or not isinstance(out, Tensor):
            return out
        if out.shape != partial[0].shape:
            raise held.refusal(f"{name}() with a tensor of another shape")
        return _followed(out, held)


def _followed(out: Any, held: HeldPart) -> Any:
    """Make a result a PartialTensor, in place."""
    result: Any = out
    if type(out) is Tensor:
        result.__class__ = PartialTensor
        result.held = held
    return result


def _check_operands(name: str, held: HeldPart, lead: Tensor, given: Any) -> None:
    """Refuse operands that do not meet the part place by place."""
    if held.dim is None:
        if name == "copy_" and all(one.is_meta for one in _tensors_in(given)):
            return  # load_state_dict() with whole weights: another worker has this one
        raise held.refusal(f"{name}()")
    if name.startswith("_foreach_"):
        return  # lists of tensors, each of which torch compares with its partner
    place = held.dim - len(held.whole)
    for one in _tensors_in(given):
        if one.ndim and one.ndim >= -place and one.shape[place] not in (1, lead.shape[place]):
            raise held.refusal(f"{name}() with a tensor of shape {list(one.shape)}")


def _is_trusted() -> bool:
    """Whether Paceline, or an optimizer, has called the torch function: they know that they work on parts."""
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]  # the inspect module takes a thousand times as long
    caller = frame.f_back
    while caller is not None and caller.f_code.co_filename.startswith(TORCH_DIR):
        file = caller.f_code.co_filename
        if file.startswith(OPTIMIZERS_DIR):
            return True
        if file.startswith(LAYERS_DIR) and file != MODULE_FILE:
            return False  # a layer that was not split, or a function of layers
        caller = caller.f_back
    if caller is None or caller.f_code.co_filename.startswith(OWN_DIR):
        return True
    while caller is not None:  # an optimizer of another package
        if caller.f_code.co_filename == OPTIMIZER_FILE:
            return True
        caller = caller.f_back
    return False


def _partial_in(value: Any) -> Iterator[Any]:
    return (one for one in _tensors_in(value) if isinstance(one, (PartialTensor, PartialParameter)))


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(one)


def _name_of(func: Callable[..., Any]) -> str:
    """Return the plain name of a torch function: "add" for `Tensor.__iadd__`, "get:shape" for an attribute."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return f"{name.strip('_')}:{getattr(getattr(func, '__self__', None), '__name__', '?')}"
    return name.strip("_") if name.startswith("__") else name


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


GETTERS = _names(
    "dtype device shape ndim requires_grad grad grad_fn layout is_leaf is_cuda is_cpu is_meta is_mps is_xpu is_sparse "
    "is_quantized is_nested _version _base output_nr is_mkldnn names _backward_hooks _post_accumulate_grad_hooks "
    "retains_grad is_sparse_csr nbytes itemsize _grad _cdata is_vulkan is_ipu is_xla is_ort is_hpu is_maia is_mtia"
)
ABOUT = frozenset(f"get:{name}" for name in GETTERS) | _names(
    "size dim ndimension numel nelement stride is_contiguous element_size storage_offset is_floating_point is_complex "
    "is_signed get_device is_pinned is_shared is_inference is_same_size has_names requires_grad_ retain_grad "
    "register_hook register_post_accumulate_grad_hook set:grad set:requires_grad set:_grad delete:grad "
    "set:_backward_hooks set:_post_accumulate_grad_hooks hash grad backward data_ptr untyped_storage _is_view "
    "deepcopy repr format len set:data is_set_to dim_order result_type can_cast is_tensor is_storage zeros_like "
    "ones_like full_like empty_like new_zeros new_ones new_full new_empty new_tensor"
)
FOREACH = _names("add sub mul div addcmul addcdiv lerp copy zero neg abs sqrt pow clamp_min clamp_max")
POINTWISE = _names(
    "get:data detach clone to float double half bfloat16 cpu cuda contiguous alias type type_as "
    "add sub rsub mul div true_divide truediv floordiv floor_divide mod remainder fmod pow neg pos positive abs "
    "sign exp log sqrt rsqrt square reciprocal clamp clamp_min clamp_max clip maximum minimum where masked_fill "
    "lerp addcmul addcdiv eq ne lt le gt ge isnan isinf isfinite nan_to_num round floor ceil copy zero fill "
    "tanh sigmoid iadd isub imul itruediv radd rmul rtruediv rpow "
    "logical_and logical_or logical_not and or xor invert xlogy equal allclose isclose"
) | frozenset(f"_foreach_{name}" for name in FOREACH)
