"""What files of all of DeepSpeed's checkpoints have in common, and what comes out of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from paceline.compat.deepspeed_files.safe_pickles import Inert
from paceline.errors import CheckpointError

__all__ = [
    "DeepSpeedCheckpoint",
    "Shapes",
    "buffers_of",
    "frozen_of",
    "group_states",
    "is_plain",
    "listed",
    "made_checkpoint",
    "mapping",
    "module_of",
    "named_groups",
    "shapes_of",
    "splitter",
    "stage_of",
    "tensor_of",
    "tensors_of",
]

Shapes = Sequence[Mapping[str, Sequence[int]]]  # of trained parameters, by group and name


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeedCheckpoint:
    """`weights` has parameters and buffers by name, whole and in fp32 where DeepSpeed kept them so. `optimizer` has by
    name what the optimizer keeps for each trained parameter: {"exp_avg": tensor, ..., "step": number}. `groups` are its
    parameter groups, with names in "params"; empty where a checkpoint does not tell."""

    weights: dict[str, Tensor]
    optimizer: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    schedule: dict[str, Any]  # state of the learning rate's schedule; empty: there is none
    step: int  # of the engine: global_steps
    skipped: int  # of these steps
    samples: int  # in these steps
    stage: int  # ZeRO stage that wrote it
    client_state: dict[str, Any]  # what the program gave to save_checkpoint, as far as it is plain values


def made_checkpoint(
    model: Mapping[str, Any],
    weights: dict[str, Tensor],
    optimizer: dict[str, dict[str, Any]],
    groups: list[dict[str, Any]],
    *,
    stage: int,
) -> DeepSpeedCheckpoint:
    """Add what a file of the model says beside weights: tied names, counts, the program's own values."""
    for name, first in _tied(model):
        if first in weights:
            weights[name] = weights[first]
    client = {key: value for key, value in model.items() if key not in _ENGINE_KEYS and is_plain(value)}
    schedule = model.get("lr_scheduler")
    taken = _count(model, "global_steps") - _count(model, "skipped_steps")
    for state in optimizer.values():
        if "exp_avg" in state:
            state.setdefault("step", taken)  # some files do not have it, and torch's Adam needs it
    return DeepSpeedCheckpoint(
        weights=weights,
        optimizer=optimizer,
        groups=groups,
        schedule=dict(schedule) if isinstance(schedule, dict) and is_plain(schedule) else {},
        step=_count(model, "global_steps"),
        skipped=_count(model, "skipped_steps"),
        samples=_count(model, "global_samples"),
        stage=stage,
        client_state=client,
    )


def _count(model: Mapping[str, Any], key: str) -> int:
    found = model.get(key, 0)
    return found if isinstance(found, int) else 0


_ENGINE_KEYS = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "ds_config",
        "ds_version",
        "autoep_layers",
        "checkpoint_parallel_dimensions",
        "universal_checkpoint_info",
    }
)


def mapping(value: Any, path: Path) -> dict[str, Any]:
    """Raise CheckpointError where a file holds no dict."""
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__} where DeepSpeed writes a dict")
    return cast("dict[str, Any]", value)


def tensor_of(value: Any, path: Path) -> Tensor:
    """Raise CheckpointError where a file holds no tensor."""
    if not isinstance(value, Tensor):
        raise CheckpointError(f"{path} holds a {type(value).__name__} where DeepSpeed writes a tensor")
    return value


def listed(value: Any, path: Path) -> list[Any]:
    """Raise CheckpointError where a file holds no list of tensors."""
    if not isinstance(value, (list, tuple)):
        raise CheckpointError(f"{path}: the fp32 weights are a {type(value).__name__}, and no list of tensors")
    return list(cast("list[Any]", value))


def is_plain(value: Any) -> bool:
    """Whether it is numbers, texts and containers of them."""
    if isinstance(value, Tensor):
        return value.dim() == 0
    if isinstance(value, (list, tuple)):
        return all(is_plain(one) for one in cast("list[Any]", value))
    if isinstance(value, dict):
        return all(is_plain(key) and is_plain(one) for key, one in cast("dict[Any, Any]", value).items())
    return value is None or isinstance(value, (str, int, float, bool, bytes))


def tensors_of(found: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors by name; 16-bit floats become fp32."""
    narrow = (torch.float16, torch.bfloat16)
    tensors = {name: one.detach() for name, one in found.items() if isinstance(one, Tensor)}
    return {name: one.float() if one.dtype in narrow else one.clone() for name, one in tensors.items()}


# Of a file of the model.


def shapes_of(model: Mapping[str, Any]) -> list[dict[str, Sequence[int]]]:
    """The shapes of trained parameters, by group and name."""
    found = model.get("param_shapes")
    groups = found if isinstance(found, list) else [found]
    return [dict(one) for one in groups if isinstance(one, dict)]


def module_of(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state dict of the model; empty where other files have it."""
    found = model.get("module")
    return cast("Mapping[str, Any]", found) if isinstance(found, dict) else {}


def buffers_of(model: Mapping[str, Any]) -> frozenset[str]:
    """The names of persistent buffers."""
    found = model.get("buffer_names")
    return frozenset(map(str, found)) if isinstance(found, (list, tuple, set)) else frozenset()


def frozen_of(models: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, Tensor]:
    """Frozen parameters, of which the file of each worker has a part."""
    shapes = cast("Mapping[str, Sequence[int]]", models[0].get("frozen_param_shapes") or {})
    found: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        parts = [
            tensor_of(cast("Mapping[str, Any]", one.get("frozen_param_fragments") or {}).get(name), folder)
            for one in models
        ]
        found[name] = torch.cat([one.flatten() for one in parts])[: math.prod(shape)].reshape(tuple(shape)).clone()
    return tensors_of(found)


def stage_of(state: Mapping[str, Any], model: Mapping[str, Any], path: Path) -> int:
    """The ZeRO stage of a file of optimizer state, which does not say it where weights are bf16: then the
    configuration in the model's file does."""
    config = model.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    found = state.get("zero_stage", zero.get("stage", 0) if isinstance(zero, dict) else 0)
    if isinstance(found, Inert):  # DeepSpeed's own enumeration
        found = found.args[0] if found.args else 0
    if found not in (0, 1, 2, 3):
        raise CheckpointError(f"{path} says ZeRO stage {found!r}; it must be 0 to 3")
    return int(found)


def _tied(model: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    found = model.get("shared_params")
    pairs = found.items() if isinstance(found, dict) else found if isinstance(found, list) else ()
    return [(str(pair[0]), str(pair[1])) for pair in pairs if isinstance(pair, (tuple, list)) and len(pair) == 2]


# Of a file of optimizer state.


def splitter(
    group: Mapping[str, Sequence[int]], gaps: Sequence[int], folder: Path, number: int
) -> Callable[[Tensor, str], dict[str, Tensor]]:
    """What takes the parameters of a group out of its flat vector, which may end with padding."""

    def split(vector: Tensor, what: str) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        at = 0
        for (name, shape), gap in zip(group.items(), gaps, strict=True):
            size = math.prod(shape)
            if at + size > vector.numel():
                raise CheckpointError(
                    f"{folder}: the {what} of group {number} have {vector.numel()} numbers, too few for {name} "
                    f"of shape {list(shape)} at {at}"
                )
            found[name] = vector[at : at + size].reshape(tuple(shape)).clone()
            at += size + gap
        return found

    return split


def group_states(state: Any) -> list[dict[str, Any]]:
    """By group what the optimizer keeps for its flat vector; DeepSpeed writes a list, or a state of numbered ones."""
    if isinstance(state, dict):
        numbered = state.get("state", {})
        return [dict(numbered[number]) for number in sorted(numbered)] if isinstance(numbered, dict) else []
    if not isinstance(state, list):
        return []
    return [dict(one) if isinstance(one, dict) else {} for one in cast("list[Any]", state)]


def named_groups(found: Any, shapes: Shapes) -> list[dict[str, Any]]:
    """An optimizer's parameter groups, with names in place of the numbers of flat vectors. Empty where they do not fit:
    under ZeRO 3 a group may have several vectors, and otherwise one."""
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        return []
    groups = cast("list[dict[str, Any]]", found)
    held = [one.get("params") for one in groups]
    if not all(isinstance(numbers, list) for numbers in held):
        held = [[number] for number in range(len(groups))]
    if [one for numbers in cast("list[list[Any]]", held) for one in numbers] != list(range(len(shapes))):
        return []
    return [
        {
            **{key: value for key, value in options.items() if is_plain(value)},
            "params": [name for number in numbers for name in shapes[number]],
        }
        for options, numbers in zip(groups, cast("list[list[int]]", held), strict=True)
    ]
