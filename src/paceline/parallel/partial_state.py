"""Guards `state_dict()` and `load_state_dict()` of a model of which this worker has only a part.

A file written from `model.state_dict()` would hold this worker's part alone, without a word. So reading is refused by
name, but for Paceline's own checkpoints (`reading_parts`) and, where each split tensor is a DTensor, for
torch.distributed.checkpoint, which writes every worker's rows. Whole weights that are loaded are reduced to the part
that is here, so `model.load_state_dict(whole)` on all workers means the same as in one process.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.sharded_tensors import TensorSlice, is_sharded, part_like, whole_shape
from paceline.parallel.class_name import class_name
from paceline.plan import Layout

__all__ = ["PartialStateGuard", "is_partial", "reading_parts"]

CHECKPOINT_PACKAGE = "torch.distributed.checkpoint"

_num_reading = 0  # `reading_parts` contexts


@contextlib.contextmanager
def reading_parts() -> Iterator[None]:
    """In this context `state_dict()` of a split model returns what this worker has."""
    global _num_reading
    _num_reading += 1
    try:
        yield
    finally:
        _num_reading -= 1


def is_partial(model: nn.Module, slices: Mapping[str, TensorSlice], owners: Mapping[str, Any]) -> bool:
    """Whether this worker has only a part of a prepared model."""
    return bool(slices or owners) or any(is_sharded(one) for one in model.parameters())


class PartialStateGuard:
    """Hooks on every module of one split model, so that a part of it is guarded as well as a module around it."""

    def __init__(
        self,
        model: nn.Module,
        *,
        layout: Layout,
        slices: Mapping[str, TensorSlice],
        has_owners: bool,
        close: Callable[[], None],
    ) -> None:
        """`slices`: what is here of split parameters, by name. `has_owners`: workers have different tensors. `close()`
        frees rows that are gathered at present."""
        self._layout, self._close = layout, close
        self._suits_torch = not slices and not has_owners  # torch sees from DTensors which rows are here
        self._slices: dict[nn.Module, dict[str, TensorSlice]] = {}
        for name, part in slices.items():
            path, _, key = name.rpartition(".")
            self._slices.setdefault(model.get_submodule(path), {})[key] = part
        for module in model.modules():
            module.register_state_dict_pre_hook(self._before_reading)
            module.register_load_state_dict_pre_hook(self._before_loading)

    def _before_reading(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if _num_reading or (self._suits_torch and _is_called_from(CHECKPOINT_PACKAGE)):
            return
        text = (
            f"state_dict() of {class_name(module)} was called under {self._layout!r}, where this worker has only a "
            "part of the weights: a file of them would lack the rest. Call weights = worker.state_dict(model) on all "
            "workers; the first worker gets the whole weights, for torch.save(weights, path) or "
            "model.save_pretrained(path, state_dict=weights). Or call worker.save_model(path) on all workers, which "
            "writes safetensors"
        )
        if self._suits_torch:
            text += ". For torch.distributed.checkpoint take its get_model_state_dict(model)"
        raise RuntimeError(text)

    def _before_loading(
        self,
        module: nn.Module,
        state_dict: MutableMapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Put the part that is here in place of each whole tensor."""
        self._close()
        if local_metadata.get("assign_to_params_buffers", False):
            raise RuntimeError(
                f"load_state_dict(assign=True) of {class_name(module)} under {self._layout!r}: the assigned tensors "
                "would take the place of the parts that optimizers and groups know. Use assign=False, or load the "
                "weights before worker.prepare(model)"
            )
        for key, target in module.named_parameters(recurse=False, remove_duplicate=False):
            value = state_dict.get(prefix + key)
            if not isinstance(value, Tensor) or is_sharded(value):
                continue
            cut = self._slices.get(module, {}).get(key)
            shape = whole_shape(target, cut)
            if target.is_meta:
                state_dict[prefix + key] = torch.empty_like(target)  # on another worker
            elif value.shape != shape:
                error_msgs.append(
                    f"{prefix}{key} has the shape {list(value.shape)}, and the whole parameter has {list(shape)}: on "
                    f"each worker load_state_dict() takes whole weights under {self._layout!r}, as "
                    "worker.state_dict(model) gives them"
                )
                state_dict[prefix + key] = target.detach()
            elif cut is not None or is_sharded(target):
                state_dict[prefix + key] = part_like(value.to(target.device, target.dtype), target, cut)

    def __deepcopy__(self, memo: dict[int, Any]) -> PartialStateGuard:
        return self


def _is_called_from(package: str) -> bool:
    """Whether a function of a package has called the present one, by whatever way."""
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == package or name.startswith(f"{package}."):
            return True
        frame = frame.f_back
    return False
