"""The state of a run: the one list of what a run is between two steps, as one worker has it.

`StateContents` is the list. `RunState.capture` collects what a carrier needs of it, and `RunState.restore` gives it
back. There are four carriers (`Carrier`):

- disk: a checkpoint holds the tensors of the whole replica, in files that any layout can read (`checkpoint_saving`,
  `checkpoint_state`);
- memory: the worker's share in memory of this host or the neighbor host, which outlives it (`memory_checkpointing`);
- peer: a member's state, sent to a newcomer (`paceline.worker.elastic_state`);
- rollback: a copy in this process, for the numerical guard (`paceline.worker.health.numerical_guard`).

Something new in the state needs one more line in `describe_run`. Every carrier has it then.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor

from paceline.checkpoint.huggingface_folder import MODELS
from paceline.comm.sharded_tensors import DTensorLayout, TensorSlice
from paceline.worker.data import random_state
from paceline.worker.state.codec_state import CodecState, GatheredCodecState
from paceline.worker.state.frozen_weights import FrozenWeights
from paceline.worker.state.local_tensors import (
    copy_tensors,
    fill_model,
    fill_optimizer,
    named_tensors,
    optimizer_layouts,
    restore_tensors,
)
from paceline.worker.state.published_models import described_models
from paceline.worker.state.state_registry import StateRegistry
from paceline.worker.topology.parallel_groups import StateOwner

__all__ = ["Carrier", "RunState", "StateContents", "StateEntry", "StatePart", "When", "describe_run"]

OBJECTS = "run"  # the key of the plain values of prepared objects


class Carrier(enum.Flag):
    """What takes a run's state from one moment, or one worker, to another."""

    DISK = enum.auto()
    MEMORY = enum.auto()
    PEER = enum.auto()
    ROLLBACK = enum.auto()
    ALL = DISK | MEMORY | PEER | ROLLBACK
    RESTART = DISK | MEMORY | PEER  # those that a worker begins with


class When(enum.Enum):
    """When an entry is given back to a worker that begins with a state. A rollback gives back all at once."""

    ARRIVED = enum.auto()  # as soon as the state is known
    BEFORE_TRAINING = enum.auto()  # before the first batch, when the user's set-up code has run


class StatePart(Protocol):
    """A collaborator of the worker that has plain values of its own, such as the counters of the loop."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StateEntry:
    """Plain values of a run's state, under a name that is also their key in checkpoints.

    `restore` does nothing to a state that lacks them, such as a checkpoint of an earlier version.
    """

    name: str
    capture: Callable[[], Any]
    restore: Callable[[Any], None] | None  # None: what needs it reads it from the state
    carriers: Carrier
    when: When


class StateContents:
    """The list of what a run's state consists of: prepared objects, codec state, and further plain values."""

    def __init__(self, registry: StateRegistry, codecs: CodecState, frozen: FrozenWeights) -> None:
        self.registry, self.codecs, self.frozen = registry, codecs, frozen
        self._entries: list[StateEntry] = []
        self.add(OBJECTS, registry.plain)  # each object is filled when it is prepared

    def add(
        self,
        name: str,
        capture: Callable[[], Any],
        restore: Callable[[Any], None] | None = None,
        *,
        carriers: Carrier = Carrier.ALL,
        when: When = When.BEFORE_TRAINING,
    ) -> None:
        """Make plain values part of the state. Raises ValueError where the name is taken."""
        if any(entry.name == name for entry in self._entries):
            raise ValueError(f"the run's state has {name!r} already: give it another name")
        self._entries.append(StateEntry(name=name, capture=capture, restore=restore, carriers=carriers, when=when))

    def entries(self, carrier: Carrier) -> Iterator[StateEntry]:
        """The entries that a carrier holds, in the order in which they were added."""
        return (entry for entry in self._entries if carrier in entry.carriers)

    def plain(self, carrier: Carrier) -> dict[str, Any]:
        """The present plain values that a carrier holds; some are live."""
        return {entry.name: entry.capture() for entry in self.entries(carrier)}

    def restore(self, plain: Mapping[str, Any], when: When) -> None:
        """Give back those entries that are due now."""
        for entry in self._entries:
            if entry.when is when and entry.restore is not None and entry.name in plain:
                entry.restore(plain[entry.name])


def describe_run(
    contents: StateContents,
    *,
    losses: StatePart,
    loss_scale: StatePart | None,
    rounded: StatePart | None,
    streams: StatePart,
    sizes: StatePart,
    attempt: int,
    loop: StatePart,
    guard: StatePart,
    memory_checkpointer: StatePart,
) -> None:
    """List all plain values beside those of prepared objects. Checkpoints have the keys in this order. `loss_scale`:
    None where the plan scales no losses. `rounded`: None where it rounds no optimizer state."""
    contents.add("random", random_state.capture_random_state, random_state.restore_random_state)
    contents.add("losses", losses.state_dict, losses.load_state_dict)
    if loss_scale is not None:  # a rollback does not bring back one that has proved too large
        contents.add("loss_scale", loss_scale.state_dict, loss_scale.load_state_dict, carriers=Carrier.RESTART)
    if rounded is not None:
        contents.add("rounded_steps", rounded.state_dict, rounded.load_state_dict, when=When.ARRIVED)
    # Training data only goes forward, so a rollback leaves the streams where they are.
    contents.add("streams", streams.state_dict, streams.load_state_dict, carriers=Carrier.RESTART, when=When.ARRIVED)
    # Nor does a rollback bring back micro-batches for which the memory was too little.
    contents.add("micro_batch", sizes.state_dict, sizes.load_state_dict, carriers=Carrier.RESTART, when=When.ARRIVED)
    contents.add("attempt", lambda: attempt, carriers=Carrier.RESTART)
    kept = Carrier.MEMORY | Carrier.PEER  # after a start from disk these begin anew, at the checkpoint's step
    contents.add("loop", loop.state_dict, loop.load_state_dict, carriers=kept, when=When.ARRIVED)
    # The schedule of snapshots, and the snapshot to which all members would roll back.
    contents.add("numerical_guard", guard.state_dict, guard.load_state_dict, carriers=Carrier.PEER, when=When.ARRIVED)
    snapshots = memory_checkpointer
    contents.add(
        "memory_checkpointer", snapshots.state_dict, snapshots.load_state_dict, carriers=Carrier.PEER, when=When.ARRIVED
    )
    # What exports need of models of transformers: a run has it from its script.
    contents.add(MODELS, lambda: described_models(contents.registry.models), carriers=Carrier.DISK)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """Everything that one worker has of a run after `step`, as far as a carrier needs it.

    Tensors of `capture` are live: a carrier copies them before the next step. On disk they are parts of the replica's
    tensors, for which `slices` and `owners` tell what part, and which worker writes it. For other carriers they are
    local, and fit a worker at the same place of a replica.
    """

    step: int
    tensors: Mapping[str, Tensor]  # parameters, buffers, optimizer state and codec state, by full name
    plain: Mapping[str, Any]  # by the names of `StateContents`
    layouts: Mapping[str, DTensorLayout] = dataclasses.field(default_factory=dict[str, DTensorLayout])  # of local parts
    slices: Mapping[str, TensorSlice] = dataclasses.field(default_factory=dict[str, TensorSlice])
    owners: Mapping[str, StateOwner] = dataclasses.field(default_factory=dict[str, StateOwner])
    worker: int | None = None  # the rank that a memory checkpoint belongs to

    @classmethod
    def capture(
        cls,
        contents: StateContents,
        carrier: Carrier,
        *,
        step: int,
        worker: int | None = None,
        gathered: GatheredCodecState | None = None,
    ) -> RunState:
        """Collect the present state for a carrier, between two steps, without a copy.

        `gathered`: the codec state of all replicas, for a checkpoint on disk. `worker`: see the field.
        """
        registry, plain = contents.registry, contents.plain(carrier)
        if carrier is Carrier.DISK:
            codecs = gathered or GatheredCodecState()
            return cls(
                step=step,
                tensors={**registry.tensors(), **codecs.tensors},
                plain=plain,
                slices={**registry.tensor_slices(), **codecs.slices},
                owners={**registry.tensor_owners(), **codecs.owners},
            )
        tensors = named_tensors(registry, with_caches=True)
        if carrier is not Carrier.ROLLBACK:  # a rollback drops error feedback, which is of steps that are undone
            # What this replica has still to send is of use to this very worker only.
            tensors.update(contents.codecs.here(with_own=carrier is Carrier.MEMORY))
        return cls(step=step, tensors=tensors, plain=plain, layouts=optimizer_layouts(registry), worker=worker)

    def copied(self, contents: StateContents, *, instead_of: RunState | None = None) -> RunState:
        """Return a copy on the CPU that the next step does not change; it uses the memory of `instead_of`."""
        room = {} if instead_of is None else instead_of.tensors
        tensors = copy_tensors(contents.registry, self.tensors, instead_of=room)
        return dataclasses.replace(self, tensors=tensors, plain=copy.deepcopy(dict(self.plain)))

    def restore(self, contents: StateContents, when: When, *, is_own: bool = False) -> None:
        """Give back what is due now, apart from prepared objects: each of those is filled when it is prepared.

        `is_own`: this very worker had the state, so it goes on with its own error feedback.
        """
        contents.restore(self.plain, when)
        if when is When.BEFORE_TRAINING:
            self.fill_codecs(contents.codecs, is_own=is_own)

    def roll_back(self, contents: StateContents) -> None:
        """Make the state what it was. This copy stays as it is. Parameter groups that optimizers were given since
        remain, without any state."""
        plain, present = copy.deepcopy(dict(self.plain)), contents.registry.plain()["optimizers"]
        for name, saved in plain[OBJECTS]["optimizers"].items():
            saved["groups"] += present.get(name, saved)["groups"][len(saved["groups"]) :]
        restore_tensors(contents.registry, self.tensors, self.layouts, plain[OBJECTS])
        contents.codecs.drop_error_feedback()
        for when in When:
            contents.restore(plain, when)

    def fill_model(self, name: str, registry: StateRegistry) -> None:
        """Fill a prepared model. Raises CheckpointError where the state is of another one."""
        fill_model(name, registry, self.tensors, self.plain[OBJECTS])

    def fill_optimizer(self, name: str, registry: StateRegistry) -> None:
        """Fill a prepared optimizer. Raises CheckpointError where the state is of another one."""
        fill_optimizer(name, registry, self.tensors, self.layouts, self.plain[OBJECTS])

    def fill_codecs(self, codecs: CodecState, *, is_own: bool) -> None:
        """Have codecs go on with what they remembered then."""
        codecs.recall(self.tensors, with_own=is_own)

    def to_dict(self) -> dict[str, Any]:
        """Return the form in which local state is stored and sent."""
        owner = {} if self.worker is None else {"worker": self.worker}
        return {**owner, "tensors": self.tensors, "spreads": self.layouts, "plain": self.plain, "step": self.step}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> RunState:
        """Return what `to_dict` was given."""
        return cls(
            step=state["step"],
            tensors=state["tensors"],
            plain=state["plain"],
            layouts=state["spreads"],
            worker=state.get("worker"),
        )
