"""Reads checkpoints that DeepSpeed has written: ZeRO 0 to 3, pipelines, and universal ones, as whole tensors by name.

Files may come from strangers: see `safe_pickles`.

What is where, by stage, of a model of N parameters over W workers (P is a worker's number):

    0     mp_rank_00_model_states.pt                       module, and optimizer by the parameters' order
    1, 2  zero_pp_rank_P_mp_rank_00_optim_states.pt        1 / W of the flat fp32 weights of each parameter group
    3     the same name, with fp32_flat_groups             1 / W of each parameter, one after the other, padded
    universal   zero/NAME/{fp32,exp_avg,exp_avg_sq}.pt     each parameter by itself
    pipeline    layer_NN-model_states.pt                   see `pipeline_files`
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from paceline.compat.deepspeed_files.checkpoint_parts import (
    DeepSpeedCheckpoint,
    Shapes,
    buffers_of,
    frozen_of,
    group_states,
    is_plain,
    listed,
    made_checkpoint,
    mapping,
    module_of,
    named_groups,
    shapes_of,
    splitter,
    stage_of,
    tensor_of,
    tensors_of,
)
from paceline.compat.deepspeed_files.pipeline_files import layer_files, read_pipeline
from paceline.compat.deepspeed_files.safe_pickles import Inert, load_safely
from paceline.compat.deepspeed_files.whole_states import read_whole_optimizer
from paceline.errors import CheckpointError
from paceline.regular_files import read_regular

__all__ = ["DeepSpeedCheckpoint", "read_deepspeed_checkpoint"]

MODELS = r"(?:zero_pp_rank_(?P<worker>\d+)_)?mp_rank_(?P<stage>\d+)_model_states\.pt"
STATES = r"(?:bf16_)?zero_pp_rank_(?P<worker>\d+)_mp_rank_(?P<stage>\d+)_optim_states\.pt"


def read_deepspeed_checkpoint(path: Path, *, tag: str | None = None) -> DeepSpeedCheckpoint:
    """Read a checkpoint: the folder that `save_checkpoint` was given (`tag`: which one; None: the latest), that of a
    tag, or one that ds_to_universal has written.

    Raises CheckpointError for a folder that holds none, files that are missing or do not fit each other, and
    checkpoints of tensor parallel engines.
    """
    folder = _folder_of(Path(path), tag)
    models, states = _ranked(folder, MODELS), _ranked(folder, STATES)
    if (folder / "zero").is_dir():
        return _read_universal(folder, [one for files in models.values() for one in files])
    if not models:
        raise CheckpointError(f"{folder} has no *_model_states.pt: it is no checkpoint of DeepSpeed")

    def read_stage(stage: int, model: Mapping[str, Any], weights: Mapping[str, Tensor]) -> DeepSpeedCheckpoint | None:
        files = states.get(stage, [])
        return _read_parts(model, files, models[stage], folder, weights) if files else None

    if layer_files(folder):
        return read_pipeline(folder, [models[stage][0] for stage in sorted(models)], read_stage)
    if max(models) > 0:
        raise CheckpointError(
            f"{folder} is of a tensor parallel engine (mp_rank_01 and more): its files hold parts of layers. Make it a "
            "universal checkpoint first (ds_to_universal.py)"
        )
    path = models[0][0] if 0 in models else next(iter(models.values()))[0]
    model = mapping(load_safely(path), path)
    return read_stage(0, model, module_of(model)) or _read_whole(model, path)


def _read_parts(
    model: Mapping[str, Any], files: Sequence[Path], models: Sequence[Path], folder: Path, weights: Mapping[str, Tensor]
) -> DeepSpeedCheckpoint:
    """Read what several workers have written of the same parameters. `weights`: as the model's files have them."""
    parts = [mapping(mapping(load_safely(one), one).get("optimizer_state_dict"), one) for one in files]
    stage = stage_of(parts[0], model, files[0])
    count = parts[0].get("partition_count", len(parts))
    count = max(count) if isinstance(count, (list, tuple)) else count
    if count != len(parts):
        raise CheckpointError(f"{folder} has {len(parts)} files of optimizer state, but {count} workers wrote it")
    if stage == 3:
        return _read_stage_3([mapping(load_safely(one), one) for one in models], parts, folder)
    return _read_stages_1_and_2(model, parts, folder, stage, weights)


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


def _ranked(folder: Path, pattern: str) -> dict[int, list[Path]]:
    """The files of the workers, in the order of their numbers, by the stage of a pipeline, or by the part of layers, of
    which they are."""
    found = [(match, one) for one in folder.iterdir() if (match := re.fullmatch(pattern, one.name))]
    ranked: dict[int, list[Path]] = {}
    for match, one in sorted(found, key=lambda pair: int(pair[0]["worker"] or 0)):
        ranked.setdefault(int(match["stage"]), []).append(one)
    return ranked


# Whole replicas: stage 0.


def _read_whole(model: Mapping[str, Any], path: Path) -> DeepSpeedCheckpoint:
    raw = {name: one for name, one in mapping(model.get("module"), path).items() if isinstance(one, Tensor)}
    parameters = {name: one for name, one in raw.items() if name not in buffers_of(model)}
    masters, optimizer, groups = read_whole_optimizer(model.get("optimizer"), parameters)
    weights = tensors_of(raw) | masters
    for name, one in parameters.items():  # tied ones have copies under one name
        weights[name] = next((masters[key] for key in masters if _is_tied(parameters[key], one)), weights[name])
    return made_checkpoint(model, weights, optimizer, groups, stage=0)


def _is_tied(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and first.data_ptr() == second.data_ptr()


# ZeRO 1 and 2: each group is one flat vector, of which each worker has a slice.


def _read_stages_1_and_2(
    model: Mapping[str, Any], parts: Sequence[Mapping[str, Any]], folder: Path, stage: int, raw: Mapping[str, Tensor]
) -> DeepSpeedCheckpoint:
    shapes = shapes_of(model) or _mapped_shapes(parts, raw, folder)
    paddings = parts[0].get("param_alignment_paddings")
    weights = tensors_of(module_of(model))  # buffers and frozen parameters stay, the others come in fp32
    optimizer: dict[str, dict[str, Any]] = {}
    flat = [listed(part.get("single_partition_of_fp32_groups"), folder) for part in parts]
    states = [group_states(part.get("base_optimizer_state")) for part in parts]
    for number, group in enumerate(shapes):
        gaps = [0] * len(group) if paddings is None else [int(one) for one in paddings[number]]
        if len(gaps) != len(group):
            raise CheckpointError(f"{folder}: group {number} has {len(group)} parameters, and {len(gaps)} paddings")
        split = splitter(group, gaps, folder, number)
        weights |= split(torch.cat([tensor_of(of[number], folder).flatten() for of in flat]), "fp32 weights")
        for key in states[0][number] if number < len(states[0]) else ():
            values = [of[number].get(key) for of in states]
            if all(isinstance(one, Tensor) and one.dim() == 1 for one in values):
                for name, tensor in split(torch.cat(cast("list[Tensor]", values)), key).items():
                    optimizer.setdefault(name, {})[key] = tensor
            elif is_plain(values[0]):
                for name in group:
                    optimizer.setdefault(name, {})[key] = values[0]
    weights |= tensors_of(cast("Mapping[str, Any]", model.get("frozen_param_fragments") or {}))
    return made_checkpoint(model, weights, optimizer, _groups_of(parts[0], shapes), stage=stage)


def _mapped_shapes(parts: Sequence[Mapping[str, Any]], raw: Mapping[str, Tensor], folder: Path) -> Shapes:
    """The shapes by group and name where the model's file has none: the files of the state say which names they hold,
    in their order."""
    found: list[dict[str, Sequence[int]]] = []
    for part in parts:
        by_group = cast("Sequence[Mapping[str, Any]]", part.get("param_slice_mappings") or ())
        for number, group in enumerate(by_group):
            found.extend({} for _ in range(number + 1 - len(found)))
            for name, address in group.items():
                found[number].setdefault(name, _mapped_shape(name, address, raw, folder))
    return found


def _mapped_shape(name: str, address: Any, raw: Mapping[str, Tensor], folder: Path) -> Sequence[int]:
    if name in raw:
        return tuple(raw[name].shape)
    tied = re.sub(r"^tied_modules\.[^.]+\.", "", name)
    size = address.state.get("numel") if isinstance(address, Inert) and isinstance(address.state, dict) else None
    same = {tuple(one.shape) for key, one in raw.items() if key.partition(".")[2] == tied and one.numel() == size}
    if len(same) != 1:
        raise CheckpointError(f"{folder}: no file says which shape {name} has")
    return same.pop()


def _groups_of(part: Mapping[str, Any], shapes: Shapes) -> list[dict[str, Any]]:
    base = part.get("base_optimizer_state")
    base = base if isinstance(base, dict) else part.get("optimizer_state_dict")
    found = base.get("param_groups") if isinstance(base, dict) else None
    return named_groups(part.get("param_groups") if found is None else found, shapes)


# ZeRO 3: each parameter is cut into equal parts, the last one padded.


def _read_stage_3(
    models: Sequence[Mapping[str, Any]], parts: Sequence[Mapping[str, Any]], folder: Path
) -> DeepSpeedCheckpoint:
    by_group = shapes_of(models[0])
    shapes = {name: shape for group in by_group for name, shape in group.items()}
    weights = tensors_of({name: one for name, one in module_of(models[0]).items() if name in buffers_of(models[0])})
    flat = [
        torch.cat([tensor_of(one, folder).flatten() for one in listed(part.get("fp32_flat_groups"), folder)])
        for part in parts
    ]
    weights |= _joined(flat, shapes, folder, "fp32 weights")
    optimizer: dict[str, dict[str, Any]] = {}
    states = [group_states(part.get("optimizer_state_dict")) for part in parts]
    for key in states[0][0] if states[0] and len(states[0]) == len(by_group) else ():
        values = [[of.get(key) for of in groups] for groups in states]
        if all(isinstance(one, Tensor) and one.dim() == 1 for of in values for one in of):
            whole = _joined([torch.cat(cast("list[Tensor]", of)) for of in values], shapes, folder, key)
            for name, tensor in whole.items():
                optimizer.setdefault(name, {})[key] = tensor
        elif is_plain(values[0][0]):
            for value, group in zip(values[0], by_group, strict=True):
                for name in group:
                    optimizer.setdefault(name, {})[key] = value
    weights |= frozen_of(models, folder)
    return made_checkpoint(models[0], weights, optimizer, _groups_of(parts[0], by_group), stage=3)


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


# Universal checkpoints.


def _read_universal(folder: Path, paths: Sequence[Path]) -> DeepSpeedCheckpoint:
    """`paths`: the files of the model, which lie beside the folder of the parameters."""
    models = [mapping(load_safely(one), one) for one in paths]
    model = models[0] if models else {}
    shapes: list[dict[str, Sequence[int]]] = []
    for one in models:  # stages of a pipeline have parameters of their own, in as many groups
        own = shapes_of(one)
        shapes.extend({} for _ in range(len(own) - len(shapes)))
        shapes = [former | new for former, new in itertools.zip_longest(shapes, own, fillvalue={})]
    known = {name: shape for group in shapes for name, shape in group.items()}
    weights: dict[str, Tensor] = {}
    optimizer: dict[str, dict[str, Any]] = {}
    for place in sorted(one.parent for one in (folder / "zero").glob("*/fp32.pt")):
        name, shape = place.name, known.get(place.name)
        for path in sorted(place.glob("*.pt")):
            value = load_safely(path)
            value = value.get("param", value) if isinstance(value, dict) else value
            if isinstance(value, Tensor):
                if shape is not None and value.dim() == 1 and value.numel() == math.prod(shape):
                    value = value.reshape(tuple(shape))  # those of ZeRO 3 are flat
                value = value.clone()
            if path.stem == "fp32":
                weights[name] = tensor_of(value, path)
            elif isinstance(value, Tensor) or is_plain(value):
                optimizer.setdefault(name, {})[path.stem] = value
    for one in models:  # buffers have a folder, too, in which they are floating-point numbers
        weights |= tensors_of({name: value for name, value in module_of(one).items() if name in buffers_of(one)})
    weights |= frozen_of(models, folder) if models else {}
    if not weights:
        raise CheckpointError(f"{folder / 'zero'} has no parameter: no folder in it has a file fp32.pt")
    beside = folder / "zero" / "optimizer_state.pt"
    found = mapping(load_safely(beside), beside).get("param_groups") if beside.is_file() else None
    return made_checkpoint(model, weights, optimizer, named_groups(found, shapes), stage=0)
