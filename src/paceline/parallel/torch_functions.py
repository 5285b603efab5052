"""What is known of torch functions that meet tensors of our own classes: their names, their arguments, and their kinds.

`ABOUT` are questions about shape, type and gradient; `POINTWISE` combine numbers with numbers at the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

__all__ = [
    "ABOUT",
    "CHECKPOINT_FUNCTION",
    "CHECKPOINT_GENERATOR",
    "POINTWISE",
    "SIZES",
    "attribute_of",
    "mapped",
    "name_of",
    "on_parts",
    "sets_masked",
    "tensors_in",
]

# What `torch.utils.checkpoint.checkpoint` looks up when it is called: the function of its reentrant kind, and for the
# other kind a generator, around whose `yield` it calls the user's function. torch 2.15 gave that another name.
CHECKPOINT_FUNCTION = "CheckpointFunction"
CHECKPOINT_GENERATOR = next(
    name
    for name in ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
    if hasattr(torch.utils.checkpoint, name)
)

# Within it our classes are plain tensors. torch documents this class and has no public name for it.
on_parts: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass  # pyright: ignore[reportPrivateUsage]  # see above


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(one)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return `value` with `change` applied to everything in its tuples, lists and dictionaries."""
    if isinstance(value, dict):
        changed = {key: mapped(one, change) for key, one in value.items()}
        if type(value) is dict:
            return changed
        for key, one in changed.items():  # a dictionary of the user's own class keeps its class
            if one is not value[key]:
                value[key] = one
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(one, change) for one in value))
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(one, change) for one in value)
    return change(value)


def attribute_of(func: Callable[..., Any]) -> str:
    """Return "get:shape" where the function reads an attribute of tensors, "set:data" where it sets one; else ""."""
    name = getattr(func, "__name__", "")
    if name not in ("__get__", "__set__", "__delete__"):
        return ""
    return f"{name.strip('_')}:{getattr(getattr(func, '__self__', None), '__name__', '?')}"


def sets_masked(target: Tensor, index: Any, value: Any) -> bool:
    """Whether `target[index] = value` sets one number where a mask says so: it is `target.masked_fill_(index, value)`,
    which combines numbers at the same place."""
    shapes = (tuple(target.shape), getattr(getattr(target, "held", None), "whole", None))  # a part's, and its whole's
    is_mask = isinstance(index, Tensor) and index.dtype is torch.bool and tuple(index.shape) in shapes
    return is_mask and (value.ndim == 0 if isinstance(value, Tensor) else isinstance(value, (int, float, complex)))


def name_of(func: Callable[..., Any]) -> str:
    """Return the plain name of a torch function: "iadd" for `Tensor.__iadd__`, "get:shape" for an attribute."""
    name = getattr(func, "__name__", str(func))
    return attribute_of(func) or (name.strip("_") if name.startswith("__") else name)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


GETTERS = _names(
    "dtype device shape ndim requires_grad grad_fn layout is_leaf is_cuda is_cpu is_meta is_mps is_xpu is_sparse "
    "is_quantized is_nested _version _base output_nr is_mkldnn names _backward_hooks _post_accumulate_grad_hooks "
    "retains_grad is_sparse_csr nbytes itemsize _cdata is_vulkan is_ipu is_xla is_ort is_hpu is_maia is_mtia "
    "grad_dtype _has_grad_dtype_override _has_symbolic_sizes_strides"  # fully_shard of torch 2.15 asks the second
)
ABOUT = frozenset(f"get:{name}" for name in GETTERS) | _names(
    "size dim ndimension numel nelement stride is_contiguous element_size storage_offset is_floating_point is_complex "
    "is_signed get_device is_pinned is_shared is_inference is_same_size has_names requires_grad_ retain_grad "
    "register_hook register_post_accumulate_grad_hook set:grad set:requires_grad set:_grad delete:grad "
    "set:_backward_hooks set:_post_accumulate_grad_hooks hash backward data_ptr untyped_storage _is_view "
    "deepcopy repr format len is_set_to dim_order result_type can_cast is_tensor is_storage zeros_like "
    "ones_like full_like empty_like new_zeros new_ones new_full new_empty new_tensor"
)
SIZES = _names("get:shape size numel nelement len get:nbytes")
FOREACH = _names("add sub mul div addcmul addcdiv lerp copy zero neg abs sqrt pow clamp_min clamp_max")
POINTWISE = _names(
    "get:data detach clone to float double half bfloat16 cpu cuda contiguous alias type type_as "
    "add sub rsub mul div true_divide truediv floordiv floor_divide mod remainder fmod pow neg pos positive abs "
    "sign exp log sqrt rsqrt square reciprocal clamp clamp_min clamp_max clip maximum minimum where masked_fill "
    "lerp addcmul addcdiv eq ne lt le gt ge isnan isinf isfinite nan_to_num round floor ceil copy zero fill "
    "tanh sigmoid iadd isub imul itruediv radd rmul rtruediv rpow "
    "logical_and logical_or logical_not and or xor invert xlogy isclose set:data"
) | frozenset(f"_foreach_{name}" for name in FOREACH)
