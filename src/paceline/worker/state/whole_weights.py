"""The whole weights of a prepared model under the user's own names, on the first worker, one tensor after the other.

Each tensor of a split model is put together within the first replica and sent to the first worker, which keeps or
writes it before the next one comes. So no worker holds more than its part, one whole tensor, and, on the first worker,
what the caller keeps. Other replicas have the same numbers, and send nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.export import MAX_SHARD_BYTES, write_weights
from paceline.checkpoint.safetensors_file import TensorInfo
from paceline.comm.group import WorkerGroup
from paceline.comm.sharded_tensors import whole_shape
from paceline.errors import CheckpointError
from paceline.storage.address import check_address, is_address, plain_path
from paceline.worker.state.adapter_weights import adapter_names, has_adapters, write_adapters
from paceline.worker.state.prepared_models import PreparedModels
from paceline.worker.state.published_models import config_text
from paceline.worker.state.state_registry import StateRegistry, model_entries, tied_names
from paceline.worker.topology.parallel_groups import ParallelGroups

__all__ = ["WholeWeights", "weights_path"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightContents:
    """What a model's weights consist of, equal on all workers of the first replica."""

    tensors: dict[str, TensorInfo]  # in the model's order, each tied one under its first name alone
    sources: dict[str, int]  # the index, in the group of the workers with different tensors, of the one that has it
    ties: dict[str, str]  # further names of tensors, each with the first one
    extra: dict[str, Any]  # what modules return by `get_extra_state`
    order: tuple[str, ...]  # of all names


class WholeWeights:
    """Gathers the weights of prepared models. All workers of the run call each method, in one operation."""

    def __init__(
        self, models: PreparedModels, registry: StateRegistry, *, group: WorkerGroup, axes: ParallelGroups
    ) -> None:
        self._models, self._registry, self._group, self._axes = models, registry, group, axes

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return on the first worker the whole weights, copied to the CPU; on others an empty dict."""
        self._meet("worker.state_dict")
        found: dict[str, Any] = {}
        if self._group.index < self._axes.each:
            contents = self._contents(model)
            for name, tensor in self._tensors(model, contents, list(contents.tensors)):
                if tensor is not None:
                    found[name] = tensor.to("cpu", copy=True)
            if self._group.index == 0:
                found |= {name: found[first] for name, first in contents.ties.items()} | contents.extra
                found = {name: found[name] for name in contents.order}
        return found

    def _write_adapters(self, model: nn.Module, contents: WeightContents, folder: Path) -> None:
        """The same for a model of peft and a folder: its adapters alone, in peft's form."""
        names = adapter_names(model, contents.order)
        kept = list(dict.fromkeys(contents.ties.get(name, name) for name in names))
        weights = {
            name: tensor.to("cpu", copy=True)
            for name, tensor in self._tensors(model, contents, [name for name in kept if name in contents.tensors])
            if tensor is not None
        }
        if self._group.index == 0:
            with _written_to(folder) as local:
                write_adapters(model, {name: weights[contents.ties.get(name, name)] for name in names}, local)

    def save(self, model: nn.Module, path: Path, *, step: int) -> list[str]:
        """Have the first worker write the whole weights; returns there the names of extra states that were left out.

        Raises CheckpointError on all workers where the first one cannot write.
        """
        self._meet("worker.save_model")
        left_out: list[str] = []
        problem: str | None = None
        if self._group.index < self._axes.each:
            contents = self._contents(model)
            is_adapters = has_adapters(model) and (path.is_dir() or not path.suffix)
            left_out = [name for name, value in contents.extra.items() if not isinstance(value, Tensor)]
            try:
                if is_adapters:
                    self._write_adapters(model, contents, path)
                else:
                    self._write(model, contents, path, step=step)
            except (CheckpointError, OSError) as error:
                problem = str(error)
        problem = self._group.broadcast_object(problem)
        if problem is not None:
            raise CheckpointError(f"worker.save_model({str(path)!r}): {problem}")
        return left_out

    def _write(self, model: nn.Module, contents: WeightContents, path: Path, *, step: int) -> None:
        """Write what comes on the first worker, and take part in sending on others."""
        extra = {name: value for name, value in contents.extra.items() if isinstance(value, Tensor)}
        about = contents.tensors | {name: (value.dtype, tuple(value.shape)) for name, value in extra.items()}
        # Larger elements first, as they lie in the file; the sort is stable, so all workers have one order.
        order = sorted(contents.tensors, key=lambda name: -contents.tensors[name][0].itemsize)
        coming = self._tensors(model, contents, order)
        try:
            if self._group.index == 0:
                with _written_to(path) as local:
                    write_weights(
                        local,
                        about,
                        read=lambda name: extra[name] if name in extra else _next(coming, name),
                        ties=contents.ties,
                        step=step,
                        max_shard_bytes=MAX_SHARD_BYTES,
                        config=config_text(model),
                    )
        finally:
            for _ in coming:  # the others send all of them, whether or not the first worker can write
                pass

    def _meet(self, what: str) -> None:
        """Return when all workers are in this call: one that is in another call is reported soon."""
        self._group.all_reduce(torch.zeros(1), what=what).wait()

    def _name(self, model: nn.Module) -> str:
        return next(name for name, one in self._registry.models.items() if one is model)

    def _contents(self, model: nn.Module) -> WeightContents:
        """Put together what the workers of the first replica have."""
        prefix, axes = self._name(model), self._axes
        tensors, extra = model_entries(model)
        slices = self._models.layout.slices(model)
        owners = self._models.layout.owners(model)
        order = [*tensors, *extra]
        here = {
            name: (value.dtype, tuple(whole_shape(value, slices.get(name))))
            for name, value in tensors.items()
            if not value.is_meta and (name not in owners or axes.is_at(owners[name]))
        }
        own_extra = {name: one for name, one in extra.items() if name not in owners or axes.is_at(owners[name])}
        parts: list[tuple[list[str], dict[str, TensorInfo], dict[str, Any], dict[str, str]]]
        parts = axes.parted.gather_objects((order, here, own_extra, tied_names(model)))
        first = parts[0][3]
        known: dict[str, TensorInfo] = {}
        sources: dict[str, int] = {}
        extras: dict[str, Any] = {}
        for index, (_, described, states, _) in enumerate(parts):
            known |= {name: about for name, about in described.items() if name not in known}
            sources |= {name: index for name in described if name not in sources}
            extras |= {name: value for name, value in states.items() if name not in extras}
        names = tuple(name for name in dict.fromkeys(one for part in parts for one in part[0]))
        ties = {name: first[name] for name in names if first.get(name, name) != name and first[name] in known}
        missing = [name for name in names if name not in known and name not in extras and name not in ties]
        if missing:
            raise CheckpointError(f"no worker has {', '.join(missing[:3])} of {prefix}: its weights are not complete")
        return WeightContents(
            tensors={name: known[name] for name in names if name in known and name not in ties},
            sources=sources,
            ties=ties,
            extra=extras,
            order=names,
        )

    def _tensors(
        self, model: nn.Module, contents: WeightContents, names: list[str]
    ) -> Iterator[tuple[str, Tensor | None]]:
        """Yield each name with the whole tensor on the first worker, on its device; None elsewhere."""
        prefix, axes = self._name(model), self._axes
        live, owners = model_entries(model)[0], self._models.layout.owners(model)
        for name in names:
            source, (dtype, shape) = contents.sources[name], contents.tensors[name]
            whole: Tensor | None = None
            if name in live and (name not in owners or axes.is_at(owners[name])):  # all that have a part of it
                whole = self._models.whole_here(f"{prefix}.{name}", live[name])
            if source != 0 and axes.parted.size > 1:
                if whole is None:
                    whole = torch.empty(shape, dtype=dtype, device=self._registry.device)
                whole = whole.contiguous()
                axes.parted.broadcast(whole, source=source, what=f"{name} of the whole weights")
            yield name, whole if self._group.index == 0 else None


def _written_to(path: Path) -> contextlib.AbstractContextManager[Path]:
    if plain_path(path) is None:
        return contextlib.nullcontext(path)
    from paceline.storage.exports import written_to  # its package is of an extra

    return written_to(path)


def weights_path(path: str | Path) -> Path:
    """Return the path of a safetensors file, or of a folder for one. Raises ValueError for another kind of file."""
    found = Path(path)
    if found.suffix and found.suffix != ".safetensors" and not found.is_dir():
        raise ValueError(
            f"worker.save_model({str(path)!r}) writes safetensors: name a file that ends with .safetensors, or a "
            "folder. For another format take weights = worker.state_dict(model) on all workers, and on the first one "
            "torch.save(weights, path)"
        )
    if is_address(str(path)):
        check_address(str(path), option=f"worker.save_model({str(path)!r})")
    return found


def _next(coming: Iterator[tuple[str, Tensor | None]], name: str) -> Tensor:
    found, tensor = next(coming)
    if found != name or tensor is None:
        raise CheckpointError(f"{found} came where {name} was expected")
    return tensor
