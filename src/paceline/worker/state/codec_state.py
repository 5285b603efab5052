"""What the wire's codecs remember, outside of a step: in checkpoints, in snapshots, for newcomers, after a rollback.

It has two parts (`paceline.sync.allreduce.codec_memory`). What a replica has still to send is its own: a checkpoint
holds that of every replica, under the parameters' names and in their shapes, so that any layout can read it. As many
replicas go on with what each had; any other number shares out the sum, of which so nothing is lost. What all replicas
know is stored once, and of a parameter that is cut for each of its parts: as long as it is cut into as many, each goes
on with its own. Of parameters whose rows are spread nothing is common. Where workers of a replica have parts of one
gradient, each has something to send of its part: the sum is stored, and one of them goes on with it.

Whoever joins has nothing to send, and is told what all know. What a lost replica had still to send is lost with it:
also where all begin again, and its place begins with another replica's snapshot. A rollback drops what all have still
to send: it is of steps that are undone.
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
from paceline.sync.allreduce.codec_memory import CodecMemory
from paceline.worker.state.prepared_models import PreparedModels
from paceline.worker.state.state_registry import StateRegistry
from paceline.worker.topology.parallel_groups import ParallelGroups, StateOwner

__all__ = ["CodecState", "GatheredCodecState", "is_codec_state"]

PREFIX = "wire:"
OWN, COMMON, HERE = "own", "common", "here"
PART_MARK = "@"  # behind it, of what all replicas know about a parameter that is cut: which part of it this is


@dataclasses.dataclass(frozen=True, slots=True)
class GatheredCodecState:
    """Tensors for a checkpoint, beside those of the registry."""

    tensors: Mapping[str, Tensor] = dataclasses.field(default_factory=dict[str, Tensor])
    cuts: Mapping[str, TensorSlice] = dataclasses.field(default_factory=dict[str, TensorSlice])
    homes: Mapping[str, StateOwner] = dataclasses.field(default_factory=dict[str, StateOwner])


class CodecState:
    """One worker's: of all sums of gradients that its walks are about."""

    def __init__(self, wire: Wire, *, models: PreparedModels, registry: StateRegistry, axes: ParallelGroups) -> None:
        self._wire, self._models, self._registry, self._axes = wire, models, registry, axes

    @property
    def is_kept(self) -> bool:
        """Whether there is anything to remember: the same on all workers."""
        return self._wire.feedback

    def gather(self, *, keeps: bool) -> GatheredCodecState:
        """Collect what all replicas have still to send; an operation of all workers, that blocks.

        Every worker sends its own, as it is, to all replicas; those who do not write need not `keep` what came.
        """
        if not self.is_kept:
            return GatheredCodecState()
        registry, parameters = self._registry, self._registry.parameters()
        tensors, cuts, homes = dict[str, Tensor](), dict[str, TensorSlice](), dict[str, StateOwner]()
        for about, gradients in self._models.reducers.sums():
            for name, parts in gradients.gathered_own(keeps=keeps).items():
                for number, part in enumerate(parts):
                    key = _key(about, OWN, str(number), name)
                    tensors[key] = as_local_of(part, like=parameters[name])
                    if name in registry.cuts:
                        cuts[key] = registry.cuts[name]
                    if name in registry.homes:
                        homes[key] = registry.homes[name]
            for name, named in gradients.memory().common.items() if keeps else ():
                part, home = self._part_of(name)
                for side, tensor in named.items() if not is_sharded(parameters[name]) else ():
                    key = _key(about, COMMON, side + part, name)
                    tensors[key] = tensor
                    if home is not None:
                        homes[key] = home
        return GatheredCodecState(tensors, cuts, homes)

    def load(self, checkpoint: Checkpoint | None, group: WorkerGroup) -> None:
        """Go on with what the checkpoint holds, which the first worker has open; all workers must call it."""
        told = None
        if checkpoint is not None:
            names = filter(is_codec_state, checkpoint.names)
            told = [(key, checkpoint.shape(key), checkpoint.dtype(key)) for key in names]
        listed = group.broadcast_object(told)
        parameters, found, has_word = self._registry.parameters(), _Found(), self._models.reducers.has_word()
        counts: dict[tuple[str, str], int] = {}  # how many replicas have stored theirs
        for key, _, _ in listed:
            about, kind, _, name = _parts(key)
            counts[about, name] = counts.get((about, name), 0) + (kind == OWN)
        for key, shape, dtype in listed:
            whole = torch.empty(shape, dtype=dtype)
            if checkpoint is not None:
                whole = checkpoint.load([key])[key].contiguous()
            group.broadcast(whole, what=f"{key} from worker 0")
            about, kind, which, name = _parts(key)
            parameter = parameters.get(name)
            if parameter is None or parameter.is_meta:
                continue
            if kind == COMMON:
                side, _, part = which.partition(PART_MARK)
                if not part or PART_MARK + part == self._part_of(name)[0]:
                    found.common.setdefault(about, {}).setdefault(name, {})[side] = whole.to(parameter.device)
                continue
            if not has_word(parameter):
                continue
            index, size = self._models.reducers.replica_of(parameter)
            if counts[about, name] != size or int(which) == index:
                part = local_part(part_like(whole, parameter, self._registry.cuts.get(name)))
                share = part.to(parameter.device) / (1 if counts[about, name] == size else size)
                own = found.own.setdefault(about, {})
                own[name] = own[name] + share if name in own else share
        self._remember(found)

    def here(self, *, with_own: bool) -> dict[str, Tensor]:
        """What is remembered here, live: for memory that outlives this worker; without its own, for a newcomer."""
        tensors: dict[str, Tensor] = {}
        for about, gradients in self._models.reducers.sums():
            memory = gradients.memory()
            for name, named in memory.common.items():
                tensors.update((_key(about, COMMON, side, name), tensor) for side, tensor in named.items())
            if with_own:
                tensors.update((_key(about, OWN, HERE, name), tensor) for name, tensor in memory.own.items())
        return tensors

    def recall(self, tensors: Mapping[str, Tensor], *, with_own: bool) -> None:
        """Go on with what `here` gave, here or, without its own, at the same place of another replica: what that one
        has still to send it sends itself."""
        parameters, found = self._registry.parameters(), _Found()
        for key in tensors:
            if not is_codec_state(key):
                continue
            about, kind, which, name = _parts(key)
            if name not in parameters or (kind == OWN and not with_own):
                continue
            value = tensors[key].to(parameters[name].device)
            if kind == COMMON:
                found.common.setdefault(about, {}).setdefault(name, {})[which] = value
            else:
                found.own.setdefault(about, {})[name] = value
        self._remember(found)

    def drop_error_feedback(self) -> None:
        """Steps are undone: what they have left to be sent is dropped, on all replicas alike."""
        for _, gradients in self._models.reducers.sums():
            gradients.remember(CodecMemory({}, gradients.memory().copied().common))

    def _part_of(self, name: str) -> tuple[str, StateOwner | None]:
        """Which part of a parameter is here, for the names of what is stored ("": all of it), and who has the word on
        it."""
        home = self._registry.homes.get(name)
        found = home or StateOwner(tensor=None if name in self._registry.cuts else 0)
        part = ""
        if found.expert is None:
            part += f"{PART_MARK}expert {self._axes.experts.index} of {self._axes.experts.size}"
            found = dataclasses.replace(found, expert=self._axes.experts.index)
        if found.tensor is None:
            part += f"{PART_MARK}tensor {self._axes.tensor.index} of {self._axes.tensor.size}"
            found = dataclasses.replace(found, tensor=self._axes.tensor.index)
        return part, found if part else home

    def _remember(self, found: _Found) -> None:
        self._models.reducers.remember(
            {
                about: CodecMemory(found.own.get(about, {}), found.common.get(about, {}))
                for about in {*found.own, *found.common}
            }
        )


@dataclasses.dataclass(slots=True)
class _Found:
    """What was read, by the models that a walk is about, and then by parameters."""

    own: dict[str, dict[str, Tensor]] = dataclasses.field(default_factory=dict[str, dict[str, Tensor]])
    common: dict[str, dict[str, dict[str, Tensor]]] = dataclasses.field(
        default_factory=dict[str, dict[str, dict[str, Tensor]]]
    )


def is_codec_state(name: str) -> bool:
    """Whether a tensor of a checkpoint is a codec's."""
    return name.startswith(PREFIX)


def _key(about: str, kind: str, which: str, name: str) -> str:
    return f"{PREFIX}{about}:{kind}:{which}:{name}"


def _parts(key: str) -> tuple[str, str, str, str]:
    """What `_key` was made of; a parameter's name may have any letters."""
    about, kind, which, name = key.removeprefix(PREFIX).split(":", 3)
    return about, kind, which, name
