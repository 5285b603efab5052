"""Frozen weights that checkpoints leave out: those that adapters (LoRA and the like) adapt.

The script loads them again whenever it starts, so a checkpoint of a model of peft needs its adapters, and to know that
the base is the same. For that it has a digest of each weight that it leaves out, the same under every layout
(`part_digest`). A weight that is not any more what the script prepared (an adapter was merged into it, say) is no
longer left out: all writers agree on that at each save, by the digests of what they hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from torch import Tensor

from paceline.checkpoint.weight_files import FROZEN
from paceline.comm.group import WorkerGroup
from paceline.comm.remote_tensors import is_remote
from paceline.errors import CheckpointError
from paceline.worker.state.adapter_weights import adapter_names, has_adapters
from paceline.worker.state.checkpoint_shards import written_pieces
from paceline.worker.state.part_digest import MASK, part_digest
from paceline.worker.state.state_registry import StateRegistry, model_entries
from paceline.worker.topology.parallel_groups import ParallelGroups

__all__ = ["FrozenWeights", "left_out_names"]

NUM_NAMED = 3

_Pieces: TypeAlias = dict[tuple[int, ...], int]  # digests of a tensor's pieces, by their offsets


@dataclasses.dataclass(frozen=True, slots=True)
class _KnownWeight:
    """What a worker knows of a frozen weight: the digests of its pieces here, and whether they are what they were."""

    pieces: _Pieces
    is_kept: bool
    beside: frozenset[str] = frozenset()  # names of what goes with it, such as the scales of quantised codes


class FrozenWeights:
    """The frozen weights of one worker's prepared models of peft, as the script prepared them."""

    def __init__(self, registry: StateRegistry, axes: ParallelGroups) -> None:
        self._registry, self._axes = registry, axes
        self._prepared: dict[str, _Pieces] = {}  # by full names; only pieces that this worker would write

    def take(self, name: str, also: Iterable[str]) -> None:
        """Remember a registered model as it is now, before a state fills it. `also`: full names of what a checkpoint
        has left out, whether it is still frozen or not."""
        found = {*self._frozen(name), *(key for key in also if key.startswith(f"{name}."))}
        self._prepared.update(self._digests(found))

    def omittable(self) -> set[str]:
        """The full names of what is frozen here now, and was when it was prepared."""
        return {key for name in self._registry.models for key in self._frozen(name)} & self._prepared.keys()

    def unchanged(self) -> dict[str, int | None]:
        """The digests of all weights that a checkpoint may leave out now, by full names; an operation of all workers
        that write one. Each tensor of which a writer has other bits than it prepared is missing.

        What a module keeps beside a weight has no digest: scales of quantised codes, which are made with the codes.
        """
        if not any(map(has_adapters, self._registry.models.values())):
            return {}
        omittable = self.omittable()
        now, beside = self._digests(self._prepared), self._beside(self._prepared)
        here = {
            name: _KnownWeight(pieces, name in omittable and pieces == self._prepared[name], beside[name])
            for name, pieces in now.items()
        }
        axes = self._axes
        for group in (axes.shard_group, axes.tensor, axes.experts, axes.parted):
            here = _joined(group.gather_objects(here))
        found: dict[str, int | None] = {}
        for name, held in sorted(here.items()):
            if held.is_kept:
                found |= {name: _sum(held.pieces), **dict.fromkeys(sorted(held.beside))}
        return found

    def require(self, name: str, stored: Mapping[str, int | None], group: WorkerGroup) -> None:
        """Raise CheckpointError where the script did not prepare a model with the weights that a checkpoint has left
        out; an operation of all workers. `stored`: their digests, by full names."""
        wanted = {key: one for key, one in stored.items() if one is not None and key.startswith(f"{name}.")}
        if not wanted:
            return
        parts = group.gather_objects({key: _KnownWeight(self._prepared.get(key, {}), is_kept=True) for key in wanted})
        here = _joined(parts)
        other = [key for key, digest in wanted.items() if not here[key].pieces or _sum(here[key].pieces) != digest]
        if other:
            raise CheckpointError(
                f"the checkpoint has adapters alone, and the weights that they adapt are others now: "
                f"{_listed(other)} (of {len(wanted)}). Give the script the same base model, of the same dtype, that "
                "the run began with, or start with another run_dir"
            )

    def _frozen(self, name: str) -> list[str]:
        """The full names of the parameters here that belong to no adapter and get no gradients."""
        model = self._registry.models[name]
        if not has_adapters(model):
            return []
        parameters = dict(model.named_parameters(remove_duplicate=False))
        names = list(model_entries(model)[0])
        frozen = {key for key, one in parameters.items() if not one.requires_grad and _is_here(one)}
        return [f"{name}.{key}" for key in sorted(frozen.intersection(names).difference(adapter_names(model, names)))]

    def _beside(self, names: Iterable[str]) -> dict[str, frozenset[str]]:
        """The full names of what modules keep beside weights: state below a weight's own name."""
        stored = [f"{prefix}.{key}" for prefix, one in self._registry.models.items() for key in model_entries(one)[0]]
        found: dict[str, set[str]] = {name: set() for name in names}
        for key in stored:
            above = key.rpartition(".")[0]
            while above and above not in found:
                above = above.rpartition(".")[0]
            if above:
                found[above].add(key)
        return {name: frozenset(some) for name, some in found.items()}

    def _digests(self, names: Iterable[str]) -> dict[str, _Pieces]:
        """The digests of the pieces that this worker would write of tensors, by full names."""
        wanted, registry = set(names), self._registry
        here = {
            f"{prefix}.{key}": one
            for prefix, model in registry.models.items()
            for key, one in model.named_parameters(remove_duplicate=False)
            if f"{prefix}.{key}" in wanted and _is_here(one)
        }
        found: dict[str, _Pieces] = {key: {} for key in here}
        known: dict[tuple[int, tuple[int, ...]], int] = {}  # of tied tensors
        mine, where = written_pieces(self._axes, here, registry.slices, registry.owners)
        for key, piece in mine.items():
            box = where.get(key)
            whole, offsets = (tuple(piece.shape), (0,) * piece.dim()) if box is None else (box.shape, box.offsets)
            at = piece.data_ptr(), tuple(piece.shape)
            if at not in known:
                known[at] = part_digest(piece, whole, offsets)
            found[key if box is None else box.name][tuple(offsets)] = known[at]
        return found


def left_out_names(objects: Mapping[str, object]) -> Mapping[str, int | None]:
    """The digests, where there are some, of what a checkpoint has left out, by full names. `objects`: its plain values
    of prepared objects."""
    found = objects.get(FROZEN)
    return found if isinstance(found, dict) else {}


def _is_here(tensor: Tensor) -> bool:
    return not tensor.is_meta and not is_remote(tensor)


def _joined(parts: Sequence[Mapping[str, _KnownWeight]]) -> dict[str, _KnownWeight]:
    """What all workers know together. Where two have the same piece, the first one's counts."""
    found: dict[str, _KnownWeight] = {}
    for part in parts:
        for name, held in part.items():
            before = found.get(name)
            pieces = held.pieces if before is None else {**held.pieces, **before.pieces}
            kept, beside = (True, frozenset[str]()) if before is None else (before.is_kept, before.beside)
            found[name] = _KnownWeight(pieces, held.is_kept and kept, held.beside | beside)
    return found


def _sum(pieces: _Pieces) -> int:
    return sum(pieces.values()) & MASK


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NUM_NAMED])
    return shown if len(names) <= NUM_NAMED else f"{shown} and {len(names) - NUM_NAMED} more"
