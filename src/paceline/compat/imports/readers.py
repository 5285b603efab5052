"""Finds out what a checkpoint is, by its file names and keys, and reads it: one function for each kind."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from paceline.checkpoint.dcp_read import INDEX, Entry, read_entry, read_index
from paceline.compat.imports.files import read_json, read_safetensors, read_torch_file
from paceline.compat.imports.foreign import ForeignCheckpoint, ForeignOptimizer, StoredTensor, stored
from paceline.errors import CheckpointError

__all__ = ["KINDS", "read_foreign"]

KINDS = (
    "a file of torch.save (.pt, .pth, .bin, .ckpt), safetensors, a folder of torch.distributed.checkpoint, of "
    "Accelerate's save_state, of Hugging Face, or of DeepSpeed"
)
# What programs call the parts of a dictionary that they save.
MODEL_KEYS = ("model", "state_dict", "model_state_dict", "model_state", "module", "net", "network", "weights", "params")
OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optimizer_state", "optim", "optim_state", "opt")
SCHEDULER_KEYS = ("scheduler", "scheduler_state_dict", "lr_scheduler", "lr_scheduler_state_dict", "sched")
STEP_KEYS = ("global_step", "step", "iteration", "iter", "iter_num", "steps")
WHOLE = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin", "model.pt")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
DCP_OPTIMIZER = re.compile(r"^(?:.*\.)?(?:optim|optimizer|optimizers|opt)\.state\.(?P<name>.+)\.(?P<entry>[^.]+)$")
DCP_OTHER_OPTIMIZER = re.compile(r"^(?:.*\.)?(?:optim|optimizer|optimizers|opt)\.(?:param_groups|state)\.")
DEEPSPEED = "paceline.compat.deepspeed_files.checkpoint_reading"  # by name: it is a package of its own


def read_foreign(path: Path) -> ForeignCheckpoint:
    """Read a checkpoint of any kind. CheckpointError where it is none, cannot be read, or would run code."""
    if not path.exists():
        raise CheckpointError(f"there is no {path}")
    if path.is_file():
        return _read_file(path)
    if (path / INDEX).is_file():
        return _read_dcp(path, "torch.distributed.checkpoint folder")
    if _is_deepspeed(path):
        return _read_deepspeed(path)
    return _read_folder(path)


def _read_file(path: Path) -> ForeignCheckpoint:
    if path.suffix == ".safetensors":
        return ForeignCheckpoint(kind="safetensors file", source=path, tensors=read_safetensors(path))
    found = read_torch_file(path)
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, and no dictionary of tensors by name")
    content = cast("Mapping[str, Any]", found)
    if "pytorch-lightning_version" in content or "optimizer_states" in content:
        return _of_lightning(path, content)
    return _of_dictionary(path, content)


def _of_lightning(path: Path, content: Mapping[str, Any]) -> ForeignCheckpoint:
    return ForeignCheckpoint(
        kind="Lightning checkpoint",
        source=path,
        tensors=_tensors(content.get("state_dict")),
        optimizers=[_optimizer(path, one) for one in content.get("optimizer_states") or ()],
        schedulers=[one for one in content.get("lr_schedulers") or () if isinstance(one, Mapping)],
        step=_count(content.get("global_step")),
        epoch=_count(content.get("epoch")),
        left_out=[name for name in ("callbacks", "loops", "hyper_parameters", "datamodule") if content.get(name)],
    )


def _of_dictionary(path: Path, content: Mapping[str, Any]) -> ForeignCheckpoint:
    """A state dict, or a dictionary that has one beside others."""
    models = {key: _tensors(content[key]) for key in MODEL_KEYS if isinstance(content.get(key), Mapping)}
    model = next((tensors for tensors in models.values() if tensors), None)
    if model is None and _tensors(content):
        return ForeignCheckpoint(kind="torch file", source=path, tensors=_tensors(content))
    if model is None:
        raise CheckpointError(
            f"{path} has no state dict of a model under any of {', '.join(MODEL_KEYS)}; its keys are "
            f"{', '.join(map(str, list(content)[:12]))}"
        )
    optimizer, scheduler = _first(content, OPTIMIZER_KEYS), _first(content, SCHEDULER_KEYS)
    known = {*MODEL_KEYS, *OPTIMIZER_KEYS, *SCHEDULER_KEYS, *STEP_KEYS, "epoch"}
    return ForeignCheckpoint(
        kind="torch file",
        source=path,
        tensors=model,
        optimizers=[] if optimizer is None else [_optimizer(path, optimizer)],
        schedulers=[] if scheduler is None else [scheduler],
        step=next((count for key in STEP_KEYS if (count := _count(content.get(key))) is not None), None),
        epoch=_count(content.get("epoch")),
        left_out=[str(key) for key in content if key not in known],
    )


def _read_folder(path: Path) -> ForeignCheckpoint:
    """A folder of Hugging Face, of its Trainer, or of Accelerate."""
    names = {one.name for one in path.iterdir()}
    state = read_json(path / "trainer_state.json") if "trainer_state.json" in names else {}
    if "trainer_state.json" in names:
        kind = "Trainer checkpoint"
    elif any(name.startswith(("random_states", "optimizer.bin", "sampler", "custom_checkpoint")) for name in names):
        kind = "Accelerate folder"
    else:
        kind = "Hugging Face folder"
    tensors, by_name = _folder_weights(path, names), list[ForeignOptimizer]()
    for name in sorted(names):
        if re.fullmatch(r"pytorch_model_fsdp_0", name) and not tensors:
            tensors = _read_dcp(path / name, kind).tensors
        if re.fullmatch(r"optimizer_0", name) and (path / name / INDEX).is_file():
            by_name += _dcp_parts(path / name)[1]
    if not tensors:
        raise CheckpointError(f"{path} is none of what can be read: {KINDS}. It has {', '.join(sorted(names)[:12])}")
    optimizers = [_optimizer(path / name, read_torch_file(path / name)) for name in _numbered(names, "optimizer")]
    schedulers = [read_torch_file(path / name) for name in _numbered(names, "scheduler")]
    return ForeignCheckpoint(
        kind=kind,
        source=path,
        tensors=tensors,
        optimizers=optimizers or by_name,
        schedulers=[one for one in schedulers if isinstance(one, Mapping)],
        step=_count(state.get("global_step")),
        epoch=None if "epoch" not in state else int(float(state["epoch"])),
        left_out=sorted(
            name for name in names if name.startswith(("random_states", "rng_state", "sampler", "custom_"))
        ),
    )


def _folder_weights(path: Path, names: set[str]) -> dict[str, StoredTensor]:
    """The weights of a folder: one file, or the parts that an index lists."""
    for name in INDEXES:
        if name in names:
            parts = read_json(path / name).get("weight_map")
            if not isinstance(parts, dict) or any(Path(str(one)).name != one for one in parts.values()):
                raise CheckpointError(f"{path / name} is no index of files beside it")
            found: dict[str, StoredTensor] = {}
            for file in sorted(set(cast("dict[str, str]", parts).values())):
                found |= _weights_of(path / file)
            if missing := [key for key in parts if key not in found]:
                raise CheckpointError(f"{path / name} lists {missing[0]}, which the files beside it do not have")
            return found
    whole = next((name for name in WHOLE if name in names), None)
    return {} if whole is None else _weights_of(path / whole)


def _weights_of(path: Path) -> dict[str, StoredTensor]:
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    return _tensors(read_torch_file(path))


def _numbered(names: set[str], word: str) -> list[str]:
    """The files "optimizer.bin", "optimizer_1.bin" (Accelerate) or "optimizer.pt" (Trainer), in their order."""
    found = [name for name in names if re.fullmatch(rf"{word}(_\d+)?\.(bin|pt)", name)]
    return sorted(found, key=lambda name: int((re.findall(r"_(\d+)\.", name) or ["0"])[0]))


def _read_dcp(path: Path, kind: str) -> ForeignCheckpoint:
    tensors, optimizers = _dcp_parts(path)
    return ForeignCheckpoint(kind=kind, source=path, tensors=tensors, optimizers=optimizers)


def _dcp_parts(path: Path) -> tuple[dict[str, StoredTensor], list[ForeignOptimizer]]:
    """The tensors of the model, and the optimizer's by names. What is no tensor, such as options, is not read: it is
    pickled."""
    index = read_index((path / INDEX).read_bytes(), tensors_only=True)
    states: dict[str | int, dict[str, Any]] = {}
    model: dict[str, StoredTensor] = {}
    for name, entry in index.items():
        of_optimizer = DCP_OPTIMIZER.match(name)
        if of_optimizer is not None:
            states.setdefault(of_optimizer["name"], {})[of_optimizer["entry"]] = _of_entry(path, entry)
        elif not DCP_OTHER_OPTIMIZER.match(name):
            model[name] = _of_entry(path, entry)
    for prefix in ("app.model.", "app.", *(f"{key}." for key in MODEL_KEYS)):
        if model and all(name.startswith(prefix) for name in model):
            model = {name.removeprefix(prefix): one for name, one in model.items()}
            break
    return model, [ForeignOptimizer(states=states)] if states else []


def _of_entry(path: Path, entry: Entry) -> StoredTensor:
    return StoredTensor(dtype=entry.dtype, shape=entry.shape, read=lambda: read_entry(path, entry, None))


def _is_deepspeed(path: Path) -> bool:
    folders = [path, *(one for one in path.iterdir() if one.is_dir())]
    return any(any(one.glob("*_model_states.pt")) or (one / "zero").is_dir() for one in folders)


def _read_deepspeed(path: Path) -> ForeignCheckpoint:
    """By the reader of the DeepSpeed package: weights and the optimizer's state, both by names."""
    try:
        read: Callable[[Path], Any] = importlib.import_module(DEEPSPEED).read_deepspeed_checkpoint
    except (ImportError, AttributeError) as error:
        raise CheckpointError(f"{path} is a checkpoint of DeepSpeed, for which no reader is there: {error}") from error
    found = read(path)
    states = {name: _entries(values) for name, values in found.optimizer.items()}
    return ForeignCheckpoint(
        kind="DeepSpeed checkpoint",
        source=path,
        tensors=_tensors(found.weights),
        optimizers=[ForeignOptimizer(states=states, groups=found.groups or None)] if states else [],
        schedulers=[found.schedule] if "last_epoch" in found.schedule else [],  # of torch: others have other states
        step=_count(found.step),
        left_out=[str(key) for key in found.client_state],
    )


def _tensors(content: Any) -> dict[str, StoredTensor]:
    """The tensors of a state dict by name."""
    if not isinstance(content, Mapping):
        return {}
    items = cast("Mapping[Any, Any]", content).items()
    return {name: stored(value) for name, value in items if isinstance(name, str) and isinstance(value, Tensor)}


def _optimizer(path: Path, content: Any) -> ForeignOptimizer:
    """What `optimizer.state_dict()` returns; CheckpointError for anything else."""
    if not isinstance(content, Mapping) or not isinstance(content.get("state"), Mapping):
        raise CheckpointError(f"the optimizer in {path} is no state dict of an optimizer of torch")
    states = {key: _entries(values) for key, values in content["state"].items()}
    groups = content.get("param_groups")
    return ForeignOptimizer(states=states, groups=groups if isinstance(groups, Sequence) else None)


def _entries(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: stored(value) if isinstance(value, Tensor) else value for name, value in values.items()}


def _first(content: Mapping[str, Any], keys: Iterator[str] | Sequence[str]) -> Mapping[str, Any] | None:
    return next((content[key] for key in keys if isinstance(content.get(key), Mapping)), None)


def _count(value: Any) -> int | None:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 else None
