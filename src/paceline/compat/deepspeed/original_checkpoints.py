"""Makes a checkpoint that DeepSpeed itself has written one of the run, for `load_checkpoint`.

Weights, the optimizer's state, the schedule and the counters come in; random state does not. Stages, workers and ZeRO
stage may be others than those of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from paceline.compat.deepspeed_files.checkpoint_reading import DeepSpeedCheckpoint, read_deepspeed_checkpoint
from paceline.compat.imports.fit import OWN_OPTIONS
from paceline.compat.imports.write import write_checkpoint
from paceline.errors import CheckpointError
from paceline.worker.run_member import parts_of
from paceline.worker.state.state_registry import StateRegistry, model_entries
from paceline.worker.worker import Worker

__all__ = ["convert_original", "is_original"]

NUM_LISTED = 8


def is_original(folder: Path) -> bool:
    """Whether DeepSpeed itself has written a checkpoint into this folder."""
    return any(folder.glob("*model_states.pt")) or (folder / "zero").is_dir()


def convert_original(
    source: Path,
    directory: Path,
    *,
    worker: Worker,
    engine: Any,
    with_optimizer: bool,
) -> tuple[Path, dict[str, Any]]:
    """Read DeepSpeed's checkpoint for an engine, on one worker, and write it as a checkpoint of the run into
    `directory`; returns its path and the `client_state`.

    Raises CheckpointError where it is of another model, or the optimizer's state cannot be read.
    """
    found = read_deepspeed_checkpoint(source)
    registry = parts_of(worker).prepared.registry
    prefix = _name_of(engine.module, registry.models)
    other_names: Callable[[str], Iterable[str]] = getattr(engine.module, "names_in_deepspeed", lambda name: (name,))
    tensors = {f"{prefix}.{name}": one for name, one in _weights(engine.module, found, other_names, source).items()}
    optimizers: dict[str, Any] = {}
    if with_optimizer and engine.optimizer is not None:
        name = _name_of(engine.optimizer, registry.optimizers)
        states = _states(name, prefix, registry, found, other_names, source)
        optimizers[name] = {"groups": _groups(name, prefix, registry, found, other_names), "values": {}}
        for parameter, state in states.items():
            for entry, value in state.items():
                if isinstance(value, Tensor):
                    tensors[f"{name}.state.{parameter}.{entry}"] = value.detach().contiguous()
                else:
                    optimizers[name]["values"].setdefault(parameter, {})[entry] = value
    counts = {
        "global_steps": found.step,
        "global_samples": found.samples,
        "micro_steps": found.step * engine.gradient_accumulation_steps(),
        "skipped_steps": found.skipped,
    }
    objects: dict[str, Any] = {_name_of(engine.counts, registry.objects): counts}
    if engine.lr_scheduler is not None and engine.lr_scheduler.state_dict().keys() <= found.schedule.keys():
        objects[_name_of(engine.lr_scheduler, registry.objects)] = found.schedule
    about = {"source": str(source), "kind": "DeepSpeed checkpoint"}
    run = {"optimizers": optimizers, "objects": objects, "extra": {prefix: {}}}
    state = {"run": run, "streams": {}, "attempt": 0, "imported": about}
    return write_checkpoint(directory, found.step, tensors, {}, state, {"imported": about}), found.client_state


def _name_of(thing: object, named: Mapping[str, object]) -> str:
    return next(name for name, one in named.items() if one is thing)


def _weights(
    model: nn.Module, found: DeepSpeedCheckpoint, other_names: Callable[[str], Iterable[str]], source: Path
) -> dict[str, Tensor]:
    """The model's tensors that are there, of its types. What is missing is said where the checkpoint is loaded."""
    taken: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, own in model_entries(model)[0].items():
        names = list(other_names(name))
        used.update(names)
        there = next((one for one in names if one in found.weights), None)
        if there is not None:
            value = found.weights[there].detach()
            taken[name] = (value.to(own.dtype) if own.is_floating_point() else value).contiguous()
    unknown = [name for name in found.weights if name not in used]
    if unknown:
        raise CheckpointError(
            f"{source} has {len(unknown)} tensors of which the model has none: {', '.join(unknown[:NUM_LISTED])}"
        )
    return taken


def _states(
    name: str,
    prefix: str,
    registry: StateRegistry,
    found: DeepSpeedCheckpoint,
    other_names: Callable[[str], Iterable[str]],
    source: Path,
) -> dict[str, dict[str, Any]]:
    """What the optimizer keeps, by the full names of its parameters."""
    states: dict[str, dict[str, Any]] = {}
    for full in (one for group in registry.held_names()[name] for one in group):
        there = (one for one in other_names(full.removeprefix(f"{prefix}.")) if one in found.optimizer)
        first = next(there, None)
        if first is not None:
            states[full] = found.optimizer[first]
    if not states and found.step:
        raise CheckpointError(
            f"{source} does not say which parameters its optimizer state is of, or has none. "
            "load_checkpoint(load_optimizer_states=False) begins with a new one"
        )
    return states


def _groups(
    name: str,
    prefix: str,
    registry: StateRegistry,
    found: DeepSpeedCheckpoint,
    other_names: Callable[[str], Iterable[str]],
) -> list[dict[str, Any]]:
    """The optimizer's groups, with the options that the checkpoint has for the same parameters."""
    groups: list[dict[str, Any]] = []
    for names, own in zip(registry.held_names()[name], registry.optimizers[name].param_groups, strict=True):
        there = {one for full in names for one in other_names(full.removeprefix(f"{prefix}."))}
        same = next((one for one in found.groups if there.issuperset(one["params"]) and one["params"]), {})
        options = {key: value for key, value in own.items() if key not in ("params", "param_names")}
        options |= {key: value for key, value in same.items() if key in options and key not in OWN_OPTIONS}
        groups.append({**options, "params": names})
    return groups
