"""The codec state of a worker: what the wire's codecs remember between steps, and how each carrier keeps it.

It has two parts (`paceline.sync.allreduce.gradient_buckets`):

- *Own* state is error feedback: what a replica has still to send. A checkpoint holds that of every replica, under the
  parameters' names and in their shapes, so any layout can read it. As many replicas go on with what each had. Any other
  number shares out the sum, so nothing is lost. Where workers of a replica have parts of one gradient, each has
  something to send of its part: the sum is stored, and one of them goes on with it.
- *Common* state is known to all replicas. It is stored once, and for each part of a parameter that is split. As long as
  the split has as many parts, each goes on with its own. Parameters whose rows are sharded have no common state.

A newcomer has nothing to send, and receives the common state. What a lost replica had still to send is lost with it,
also where all workers restart and its place begins with another replica's snapshot. A rollback drops all error
feedback, which is of steps that are undone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.checkpoint.reader import Checkpoint
from paceline.comm.group import WorkerGroup
from paceline.comm.sharded_tensors import TensorSlice, as_local_of, is_sharded, local_part, part_like
from paceline.plan import Wire
from paceline.sync.allreduce.gradient_buckets import CodecMemory
from paceline.worker.state.prepared_models import PreparedModels
from paceline.worker.state.state_registry import StateRegistry
from paceline.worker.topology.parallel_groups import ParallelGroups, StateOwner

__all__ = ["CodecState", "GatheredCodecState", "is_codec_state"]

PREFIX = "wire:"
OWN, COMMON, HERE = "own", "common", "here"
PART_MARK = "@"  # before the number of the part, in common state of a parameter that is split


@dataclasses.dataclass(frozen=True, slots=True)
class GatheredCodecState:
    """Tensors for a checkpoint, beside those of the registry."""

    tensors: Mapping[str, Tensor] = dataclasses.field(default_factory=dict[str, Tensor])
    slices: Mapping[str, TensorSlice] = dataclasses.field(default_factory=dict[str, TensorSlice])
    owners: Mapping[str, StateOwner] = dataclasses.field(default_factory=dict[str, StateOwner])


class CodecState:
    """The codec state of all gradient reducers of one worker."""

    def __init__(self, wire: Wire, *, models: PreparedModels, registry: StateRegistry, axes: ParallelGroups) -> None:
        self._wire, self._models, self._registry, self._axes = wire, models, registry, axes

    @property
    def is_kept(self) -> bool:
        """Whether codecs remember anything; the same on all workers."""
        return self._wire.feedback

    def gather(self, *, keeps: bool) -> GatheredCodecState:
        """Collect the error feedback of all replicas; an operation of all workers, that blocks.

        Every worker sends its own, as it is, to all replicas. Those that do not write need not keep what came.
        """
        if not self.is_kept:
            return GatheredCodecState()
        registry, parameters = self._registry, self._registry.parameters()
        tensors, slices, owners = dict[str, Tensor](), dict[str, TensorSlice](), dict[str, StateOwner]()
        for models, gradients in self._models.reducers.sums():
            for name, parts in gradients.gathered_own(keeps=keeps).items():
                for number, part in enumerate(parts):
                    key = _key(models, OWN, str(number), name)
                    tensors[key] = as_local_of(part, like=parameters[name])
                    if name in registry.slices:
                        slices[key] = registry.slices[name]
                    if name in registry.owners:
                        owners[key] = registry.owners[name]
            for name, named in gradients.memory().common.items() if keeps else ():
                part, owner = self._part_of(name)
                for side, tensor in named.items() if not is_sharded(parameters[name]) else ():
                    key = _key(models, COMMON, side + part, name)
                    tensors[key] = tensor
                    if owner is not None:
                        owners[key] = owner
        return GatheredCodecState(tensors, slices, owners)

    def load(self, checkpoint: Checkpoint | None, group: WorkerGroup) -> None:
        """Go on with what a checkpoint holds, which the first worker has open; all workers must call it."""
        listed = None
        if checkpoint is not None:
            names = filter(is_codec_state, checkpoint.names)
            listed = [(key, checkpoint.shape(key), checkpoint.dtype(key)) for key in names]
        listed = group.broadcast_object(listed)
        parameters, found, has_word = self._registry.parameters(), _Found(), self._models.reducers.has_word()
        counts: dict[tuple[str, str], int] = {}  # how many replicas have stored theirs
        for key, _, _ in listed:
            models, kind, _, name = _parts(key)
            counts[models, name] = counts.get((models, name), 0) + (kind == OWN)
        for key, shape, dtype in listed:
            whole = torch.empty(shape, dtype=dtype)
            if checkpoint is not None:
                whole = checkpoint.load([key])[key].contiguous()
            group.broadcast(whole, what=f"{key} from worker 0")
            models, kind, which, name = _parts(key)
            parameter = parameters.get(name)
            if parameter is None or parameter.is_meta:
                continue
            if kind == COMMON:
                side, _, part = which.partition(PART_MARK)
                if not part or PART_MARK + part == self._part_of(name)[0]:
                    found.common.setdefault(models, {}).setdefault(name, {})[side] = whole.to(parameter.device)
                continue
            if not has_word(parameter):
                continue
            index, size = self._models.reducers.replica_of(parameter)
            if counts[models, name] != size or int(which) == index:
                part = local_part(part_like(whole, parameter, self._registry.slices.get(name)))
                share = part.to(parameter.device) / (1 if counts[models, name] == size else size)
                own = found.own.setdefault(models, {})
                own[name] = own[name] + share if name in own else share
        self._remember(found)

    def here(self, *, with_own: bool) -> dict[str, Tensor]:
        """Return what is remembered here, live: for a memory checkpoint, or without its own for a newcomer."""
        tensors: dict[str, Tensor] = {}
        for models, gradients in self._models.reducers.sums():
            memory = gradients.memory()
            for name, named in memory.common.items():
                tensors.update((_key(models, COMMON, side, name), tensor) for side, tensor in named.items())
            if with_own:
                tensors.update((_key(models, OWN, HERE, name), tensor) for name, tensor in memory.own.items())
        return tensors

    def recall(self, tensors: Mapping[str, Tensor], *, with_own: bool) -> None:
        """Go on with what `here` returned. That may have been at the same place of another replica: then without its
        own, which that replica sends itself."""
        parameters, found = self._registry.parameters(), _Found()
        for key in tensors:
            if not is_codec_state(key):
                continue
            models, kind, which, name = _parts(key)
            if name not in parameters or (kind == OWN and not with_own):
                continue
            value = tensors[key].to(parameters[name].device)
            if kind == COMMON:
                found.common.setdefault(models, {}).setdefault(name, {})[which] = value
            else:
                found.own.setdefault(models, {})[name] = value
        self._remember(found)

    def drop_error_feedback(self) -> None:
        """Steps are undone: drop what they have left to send, on all replicas alike."""
        for _, gradients in self._models.reducers.sums():
            gradients.remember(CodecMemory({}, gradients.memory().copied().common))

    def _part_of(self, name: str) -> tuple[str, StateOwner | None]:
        """Which part of a parameter is here, as part of a stored name ("": all of it), and which worker stores it."""
        owner = self._registry.owners.get(name)
        found = owner or StateOwner(tensor=None if name in self._registry.slices else 0)
        part = ""
        if found.expert is None:
            part += f"{PART_MARK}expert {self._axes.experts.index} of {self._axes.experts.size}"
            found = dataclasses.replace(found, expert=self._axes.experts.index)
        if found.tensor is None:
            part += f"{PART_MARK}tensor {self._axes.tensor.index} of {self._axes.tensor.size}"
            found = dataclasses.replace(found, tensor=self._axes.tensor.index)
        return part, found if part else owner

    def _remember(self, found: _Found) -> None:
        self._models.reducers.remember(
            {
                models: CodecMemory(found.own.get(models, {}), found.common.get(models, {}))
                for models in {*found.own, *found.common}
            }
        )


@dataclasses.dataclass(slots=True)
class _Found:
    """What was read, by the models of a reducer, and then by parameters."""

    own: dict[str, dict[str, Tensor]] = dataclasses.field(default_factory=dict[str, dict[str, Tensor]])
    common: dict[str, dict[str, dict[str, Tensor]]] = dataclasses.field(
        default_factory=dict[str, dict[str, dict[str, Tensor]]]
    )


def is_codec_state(name: str) -> bool:
    """Whether a tensor of a checkpoint is a codec's."""
    return name.startswith(PREFIX)


def _key(models: str, kind: str, which: str, name: str) -> str:
    return f"{PREFIX}{models}:{kind}:{which}:{name}"


def _parts(key: str) -> tuple[str, str, str, str]:
    """What `_key` was made of; a parameter's name may have any letters."""
    models, kind, which, name = key.removeprefix(PREFIX).split(":", 3)
    return models, kind, which, name
