"""Reads checkpoints that DeepSpeed has written: ZeRO 0 to 3, and universal ones, as whole tensors by name.

Files may come from strangers: see `safe_pickles`.

What is where, by stage, of a model of N parameters over W workers (P is a worker's number):

    0     mp_rank_00_model_states.pt                       module, and optimizer by the parameters' order
    1, 2  zero_pp_rank_P_mp_rank_00_optim_states.pt        1 / W of the flat fp32 weights of each parameter group
    3     the same name, with fp32_flat_groups             1 / W of each parameter, one after the other, padded
    universal   zero/NAME/{fp32,exp_avg,exp_avg_sq}.pt     each parameter by itself
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from paceline.compat.deepspeed_files.safe_pickles import Inert, load_safely
from paceline.errors import CheckpointError
from paceline.regular_files import read_regular

__all__ = ["DeepSpeedCheckpoint", "read_deepspeed_checkpoint"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeedCheckpoint:
    """`weights` has parameters and buffers by name, whole and in fp32 where DeepSpeed kept them so. `optimizer` has by
    name what the optimizer keeps for each trained parameter: {"exp_avg": tensor, ..., "step": number}. `groups` are its
    parameter groups, with names in "params"; empty where a checkpoint does not tell."""

    weights: dict[str, Tensor]
    optimizer: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    step: int  # of the engine: global_steps
    stage: int  # ZeRO stage that wrote it
    client_state: dict[str, Any]  # what the program gave to save_checkpoint, as far as it is plain values


def read_deepspeed_checkpoint(path: Path, *, tag: str | None = None) -> DeepSpeedCheckpoint:
    """Read a checkpoint: the folder that `save_checkpoint` was given (`tag`: which one; None: the latest), that of a
    tag, or one that ds_to_universal has written.

    Raises CheckpointError for a folder that holds none, files that are missing or do not fit each other, and
    checkpoints of tensor parallel or pipeline parallel engines.
    """
    folder = _folder_of(Path(path), tag)
    if (folder / "zero").is_dir():
        return _read_universal(folder)
    models = _ranked(folder, r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
    models = models or _ranked(folder, r"()mp_rank_(\d+)_model_states\.pt")
    states = _ranked(folder, r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
    if any(folder.glob("layer_*-model_states.pt")):
        raise CheckpointError(
            f"{folder} is of a pipeline: each layer has a file. Make it a universal checkpoint (ds_to_universal.py)"
        )
    if not models:
        raise CheckpointError(f"{folder} has no *_model_states.pt: it is no checkpoint of DeepSpeed")
    model = _mapping(load_safely(models[0]), models[0])
    if not states:
        return _read_whole(model, models[0])
    parts = [_mapping(_mapping(load_safely(one), one).get("optimizer_state_dict"), one) for one in states]
    stage = _stage(parts[0], states[0])
    count = parts[0].get("partition_count", len(parts))
    count = max(count) if isinstance(count, (list, tuple)) else count
    if count != len(parts):
        raise CheckpointError(f"{folder} has {len(parts)} files of optimizer state, but {count} workers wrote it")
    if stage == 3:
        others = [_mapping(load_safely(one), one) for one in models]
        return _read_stage_3(others, parts, folder)
    return _read_stages_1_and_2(model, parts, folder, stage)


def _folder_of(path: Path, tag: str | None) -> Path:
    if not path.is_dir():
        raise CheckpointError(f"there is no folder {path}")
    if tag is None:
        if any(path.glob("*model_states.pt")) or (path / "zero").is_dir():
            return path
        for name in ("latest_universal", "latest"):
            if (path / name).exists():
                tag = read_regular(path / name).decode().strip()
                break
        else:
            raise CheckpointError(f"{path} has neither *_model_states.pt nor a file `latest` that names a tag")
    if "/" in tag or tag in ("", ".", ".."):
        raise CheckpointError(f"the tag is {tag!r}; it must be the name of a folder in {path}")
    if not (path / tag).is_dir():
        raise CheckpointError(f"{path} has no folder {tag!r}")
    return path / tag


def _ranked(folder: Path, pattern: str) -> list[Path]:
    """The files of the workers in the order of their numbers. CheckpointError for several model parallel ranks."""
    found = [(match, one) for one in folder.iterdir() if (match := re.fullmatch(pattern, one.name))]
    if any(int(match[2]) for match, _ in found):
        raise CheckpointError(
            f"{folder} is of a tensor parallel engine (mp_rank_01 and more): its files hold parts of layers. Make it a "
            "universal checkpoint first (ds_to_universal.py)"
        )
    return [one for _, one in sorted(found, key=lambda pair: int(pair[0][1] or 0))]


def _mapping(value: Any, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__} where DeepSpeed writes a dict")
    return cast("dict[str, Any]", value)


def _stage(state: Mapping[str, Any], path: Path) -> int:
    found = state.get("zero_stage", 0)
    if isinstance(found, Inert):  # DeepSpeed's own enumeration
        found = found.args[0] if found.args else 0
    if found not in (0, 1, 2, 3):
        raise CheckpointError(f"{path} says ZeRO stage {found!r}; it must be 0 to 3")
    return int(found)


# Whole replicas: stage 0.


def _read_whole(model: Mapping[str, Any], path: Path) -> DeepSpeedCheckpoint:
    weights = _tensors(_mapping(model.get("module"), path))
    state = model.get("optimizer")
    optimizer: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    if isinstance(state, dict) and isinstance(state.get("state"), dict):
        kept = {int(number): dict(of) for number, of in state["state"].items()}
        names = [name for name in weights if name not in _buffers(model)]
        order = _order(kept, {name: weights[name] for name in names})
        optimizer = {order[number]: of for number, of in kept.items() if number in order}
        for group in state.get("param_groups", ()) if order else ():
            groups.append({**group, "params": [order[number] for number in group["params"] if number in order]})
    return _made(model, weights, optimizer, groups, stage=0)


def _order(kept: Mapping[int, Mapping[str, Any]], weights: Mapping[str, Tensor]) -> dict[int, str]:
    """The names of an optimizer's numbered parameters: it numbers those that train, in the model's order. Frozen ones
    are found by the shapes of what it keeps. Empty where several orders are possible."""
    shapes = {
        number: next((one.shape for one in of.values() if isinstance(one, Tensor) and one.dim()), None)
        for number, of in sorted(kept.items())
    }

    def matched(numbers: Sequence[int], names: Sequence[str]) -> dict[int, str]:
        left, found = iter(names), dict[int, str]()
        for number in numbers:
            name = next((one for one in left if shapes[number] in (None, weights[one].shape)), None)
            if name is None:
                return {}
            found[number] = name
        return found

    first = matched(list(shapes), list(weights))
    last = matched(list(shapes)[::-1], list(weights)[::-1])
    return first if first == last else {}


# ZeRO 1 and 2: each group is one flat vector, of which each worker has a slice.


def _read_stages_1_and_2(
    model: Mapping[str, Any], parts: Sequence[Mapping[str, Any]], folder: Path, stage: int
) -> DeepSpeedCheckpoint:
    shapes = _shapes(model)
    paddings = parts[0].get("param_alignment_paddings")
    weights = _tensors(_module(model))  # buffers and frozen parameters stay, the others come in fp32
    optimizer: dict[str, dict[str, Any]] = {}
    flat = [_list(part.get("single_partition_of_fp32_groups"), folder) for part in parts]
    states = [_group_states(part.get("base_optimizer_state")) for part in parts]
    for number, group in enumerate(shapes):
        gaps = [0] * len(group) if paddings is None else [int(one) for one in paddings[number]]
        if len(gaps) != len(group):
            raise CheckpointError(f"{folder}: group {number} has {len(group)} parameters, and {len(gaps)} paddings")
        split = _splitter(group, gaps, folder, number)
        weights |= split(torch.cat([_tensor(of[number], folder).flatten() for of in flat]), "fp32 weights")
        for key in states[0][number] if number < len(states[0]) else ():
            values = [of[number].get(key) for of in states]
            if all(isinstance(one, Tensor) and one.dim() == 1 for one in values):
                for name, tensor in split(torch.cat(cast("list[Tensor]", values)), key).items():
                    optimizer.setdefault(name, {})[key] = tensor
            elif _is_plain(values[0]):
                for name in group:
                    optimizer.setdefault(name, {})[key] = values[0]
    frozen = cast("Mapping[str, Any]", model.get("frozen_param_fragments") or {})
    weights |= _tensors(frozen)
    return _made(model, weights, optimizer, _named_groups(parts[0], shapes), stage=stage)


def _splitter(
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


def _group_states(state: Any) -> list[dict[str, Any]]:
    """By group what the optimizer keeps for its flat vector; DeepSpeed writes a list, or a state of numbered ones."""
    if isinstance(state, dict):
        numbered = state.get("state", {})
        return [dict(numbered[number]) for number in sorted(numbered)] if isinstance(numbered, dict) else []
    return (
        [dict(one) if isinstance(one, dict) else {} for one in cast("list[Any]", state)]
        if isinstance(state, list)
        else []
    )


def _named_groups(part: Mapping[str, Any], shapes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    base = part.get("base_optimizer_state")
    base = base if isinstance(base, dict) else part.get("optimizer_state_dict")
    found = base.get("param_groups") if isinstance(base, dict) else None
    found = part.get("param_groups") if found is None else found
    if not isinstance(found, list) or len(found) != len(shapes):
        return []
    return [
        {**{key: value for key, value in options.items() if _is_plain(value)}, "params": list(names)}
        for options, names in zip(found, shapes, strict=True)
        if isinstance(options, dict)
    ]


# ZeRO 3: each parameter is cut into equal parts, the last one padded.


def _read_stage_3(
    models: Sequence[Mapping[str, Any]], parts: Sequence[Mapping[str, Any]], folder: Path
) -> DeepSpeedCheckpoint:
    shapes = {name: shape for group in _shapes(models[0]) for name, shape in group.items()}
    weights = _tensors({name: one for name, one in _module(models[0]).items() if name in _buffers(models[0])})
    flat = [
        torch.cat([_tensor(one, folder).flatten() for one in _list(part.get("fp32_flat_groups"), folder)])
        for part in parts
    ]
    weights |= _joined(flat, shapes, folder, "fp32 weights")
    optimizer: dict[str, dict[str, Any]] = {}
    inner = [part.get("optimizer_state_dict") for part in parts]
    states = [_group_states(one) for one in inner]
    for key in states[0][0] if states[0] else ():
        values = [[of.get(key) for of in groups] for groups in states]
        if all(isinstance(one, Tensor) and one.dim() == 1 for of in values for one in of):
            whole = _joined([torch.cat(cast("list[Tensor]", of)) for of in values], shapes, folder, key)
            for name, tensor in whole.items():
                optimizer.setdefault(name, {})[key] = tensor
        elif _is_plain(values[0][0]):
            for name in shapes:
                optimizer.setdefault(name, {})[key] = values[0][0]
    weights |= _frozen(models, folder)
    return _made(models[0], weights, optimizer, _named_groups(parts[0], _shapes(models[0])), stage=3)


def _joined(parts: Sequence[Tensor], shapes: Mapping[str, Sequence[int]], folder: Path, what: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    at = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        each = -(-size // len(parts))
        if any(at + each > one.numel() for one in parts):
            raise CheckpointError(f"{folder}: the {what} end before {name} of shape {list(shape)}")
        found[name] = torch.cat([one[at : at + each] for one in parts])[:size].reshape(tuple(shape)).clone()
        at += each
    return found


def _frozen(models: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, Tensor]:
    shapes = cast("Mapping[str, Sequence[int]]", models[0].get("frozen_param_shapes") or {})
    found: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        parts = [
            _tensor(cast("Mapping[str, Any]", one.get("frozen_param_fragments") or {}).get(name), folder)
            for one in models
        ]
        found[name] = torch.cat([one.flatten() for one in parts])[: math.prod(shape)].reshape(tuple(shape)).clone()
    return found


# Universal checkpoints.


def _read_universal(folder: Path) -> DeepSpeedCheckpoint:
    names = sorted(one.name for one in (folder / "zero").iterdir() if (one / "fp32.pt").is_file())
    weights: dict[str, Tensor] = {}
    optimizer: dict[str, dict[str, Any]] = {}
    for name in names:
        for path in sorted((folder / "zero" / name).glob("*.pt")):
            value = load_safely(path)
            value = value.get("param", value) if isinstance(value, dict) else value
            if path.stem == "fp32":
                weights[name] = _tensor(value, path).clone()
            elif isinstance(value, Tensor) or _is_plain(value):
                optimizer.setdefault(name, {})[path.stem] = value.clone() if isinstance(value, Tensor) else value
    models = _ranked(folder, r"()mp_rank_(\d+)_model_states\.pt")
    model = _mapping(load_safely(models[0]), models[0]) if models else {}
    weights = _tensors({name: one for name, one in _module(model).items() if name in _buffers(model)}) | weights
    if not weights:
        raise CheckpointError(f"{folder / 'zero'} has no parameter: no folder in it has a file fp32.pt")
    return _made(model, weights, optimizer, [], stage=0)


# What files of all stages have.


def _made(
    model: Mapping[str, Any],
    weights: dict[str, Tensor],
    optimizer: dict[str, dict[str, Any]],
    groups: list[dict[str, Any]],
    *,
    stage: int,
) -> DeepSpeedCheckpoint:
    for name, first in _tied(model):
        if first in weights:
            weights[name] = weights[first]
    step = model.get("global_steps", 0)
    known = _ENGINE_KEYS
    client = {key: value for key, value in model.items() if key not in known and _is_plain(value)}
    return DeepSpeedCheckpoint(
        weights=weights,
        optimizer=optimizer,
        groups=groups,
        step=step if isinstance(step, int) else 0,
        stage=stage,
        client_state=client,
    )


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


def _shapes(model: Mapping[str, Any]) -> list[dict[str, Sequence[int]]]:
    """The shapes of trained parameters, by group and name."""
    found = model.get("param_shapes")
    listed = found if isinstance(found, list) else [found]
    return [dict(one) for one in listed if isinstance(one, dict)]


def _tied(model: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    found = model.get("shared_params")
    pairs = found.items() if isinstance(found, dict) else found if isinstance(found, list) else ()
    return [(str(pair[0]), str(pair[1])) for pair in pairs if isinstance(pair, (tuple, list)) and len(pair) == 2]


def _buffers(model: Mapping[str, Any]) -> frozenset[str]:
    found = model.get("buffer_names")
    return frozenset(map(str, found)) if isinstance(found, (list, tuple, set)) else frozenset()


def _module(model: Mapping[str, Any]) -> Mapping[str, Any]:
    found = model.get("module")
    return cast("Mapping[str, Any]", found) if isinstance(found, dict) else {}


def _tensors(found: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors by name; 16-bit floats become fp32."""
    narrow = (torch.float16, torch.bfloat16)
    tensors = {name: one.detach() for name, one in found.items() if isinstance(one, Tensor)}
    return {name: one.float() if one.dtype in narrow else one.clone() for name, one in tensors.items()}


def _tensor(value: Any, path: Path) -> Tensor:
    if not isinstance(value, Tensor):
        raise CheckpointError(f"{path} holds a {type(value).__name__} where DeepSpeed writes a tensor")
    return value


def _list(value: Any, path: Path) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise CheckpointError(f"{path}: the fp32 weights are a {type(value).__name__}, and no list of tensors")
    return list(cast("list[Any]", value))


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0
    if isinstance(value, (list, tuple)):
        return all(_is_plain(one) for one in cast("list[Any]", value))
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(one) for key, one in cast("dict[Any, Any]", value).items())
    return value is None or isinstance(value, (str, int, float, bool, bytes))
