"""Reads checkpoints of DeepSpeed's pipelines: each layer has a file, and the optimizer's state is by stages.

    layer_02-model_states.pt                             state dict of layer 2
    mp_rank_01_model_states.pt                           counts; the optimizer of stage 1, where its state is whole
    [bf16_]zero_pp_rank_0_mp_rank_01_optim_states.pt     state of stage 1, otherwise

Parameters are called "2.weight". Those of tied layers have names of their own, "tied_modules.KEY.weight": they get that
of the first of these layers that has a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.compat.deepspeed_files.checkpoint_parts import (
    DeepSpeedCheckpoint,
    buffers_of,
    made_checkpoint,
    mapping,
    tensors_of,
)
from paceline.compat.deepspeed_files.safe_pickles import load_safely
from paceline.compat.deepspeed_files.whole_states import OptimizerByName, read_whole_optimizer
from paceline.errors import CheckpointError

__all__ = ["layer_files", "read_pipeline"]

TIED = re.compile(r"tied_modules\.[^.]+\.(?P<name>.+)")


def layer_files(folder: Path) -> dict[int, Path]:
    """The files of a pipeline's layers, by their numbers. Raises CheckpointError for layers that have several."""
    found: dict[int, Path] = {}
    for path in sorted(folder.glob("layer_*-model_states.pt")):
        match = re.fullmatch(r"layer_(\d+)(-model_00)?-model_states\.pt", path.name)
        if match is None:
            raise CheckpointError(f"{path} is a part of a layer, of a tensor parallel engine, or of experts")
        found[int(match[1])] = path
    return found


def read_pipeline(
    folder: Path,
    models: Sequence[Path],
    read_parts: Callable[[int, Mapping[str, Any], Mapping[str, Tensor]], DeepSpeedCheckpoint | None],
) -> DeepSpeedCheckpoint:
    """Read a pipeline's checkpoint. `models`: the files of its stages. `read_parts(stage, model, weights)` reads the
    files of a stage's optimizer state, where there are any."""
    raw: dict[str, Tensor] = {}
    for number, path in layer_files(folder).items():
        layer = mapping(load_safely(path), path)
        raw |= {f"{number}.{name}": one.detach() for name, one in layer.items() if isinstance(one, Tensor)}
    stages = [mapping(load_safely(path), path) for path in models]
    buffers = frozenset[str]().union(*(buffers_of(one) for one in stages))
    found = [read_parts(number, model, raw) for number, model in enumerate(stages)]
    read = [one for one in found if one is not None]
    if len(read) == len(stages):
        states = [(one.weights, one.optimizer, one.groups) for one in read]
    else:
        states = _whole([one.get("optimizer") for one in stages], {k: v for k, v in raw.items() if k not in buffers})
    masters = {name: one for weights, _, _ in states for name, one in weights.items()}
    names = _names_of_tied(masters, raw)
    optimizer = {names.get(name, name): one for _, state, _ in states for name, one in state.items()}
    is_known = all(state for _, state, _ in states)
    return made_checkpoint(
        stages[0],
        tensors_of(raw) | {names.get(name, name): one for name, one in masters.items()},
        optimizer if is_known else {},
        _joined([groups for _, _, groups in states], names) if is_known else [],
        stage=max((one.stage for one in read), default=0),
    )


def _whole(states: Sequence[Any], parameters: dict[str, Tensor]) -> list[OptimizerByName]:
    """What the optimizers of all stages have, where each keeps whole parameters. In fp32 they are told apart by their
    numbers: so where a parameter is frozen, or is in several stages, nothing is known."""
    found: list[OptimizerByName] = []
    counts = [_count(one) for one in states]
    for number, state in enumerate(states):
        own = parameters
        if isinstance(state, dict) and "optimizer_state_dict" not in state:
            first = sum(counts[:number])
            own = dict(list(parameters.items())[first : first + counts[number]])
            own = own if sum(counts) == len(parameters) else {}
        found.append(read_whole_optimizer(state, own))
    return found


def _count(state: Any) -> int:
    """The parameters of an optimizer."""
    groups = state.get("param_groups", ()) if isinstance(state, dict) else ()
    return sum(len(group["params"]) for group in groups)


def _names_of_tied(masters: Mapping[str, Tensor], raw: Mapping[str, Tensor]) -> dict[str, str]:
    """For each parameter of tied layers the name that it has in a layer's file: that with its values."""
    found: dict[str, str] = {}
    for name, master in masters.items():
        match = TIED.fullmatch(name)
        ends = [one for one in raw if match is not None and one.partition(".")[2] == match["name"]]
        same = (
            one for one in ends if raw[one].shape == master.shape and torch.equal(master.to(raw[one].dtype), raw[one])
        )
        first = next(same, None)
        if first is not None:
            found[name] = first
    return found


def _joined(stages: Sequence[Sequence[Mapping[str, Any]]], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """The groups of all stages as those of one optimizer; empty where stages have other numbers of them."""
    if len({len(groups) for groups in stages}) != 1:
        return []
    joined: list[dict[str, Any]] = []
    for same in zip(*stages, strict=True):
        held = (names.get(name, name) for group in same for name in group["params"])
        joined.append({**same[0], "params": list(dict.fromkeys(held))})
    return joined
