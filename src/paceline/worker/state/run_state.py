"""The state of a run: the one description of what a run is between two steps, as one worker has it.

`RunState.capture` collects it and `RunState.restore` gives it back. Three carriers take it from one to the other: the
memory of this host or the neighbor host (`memory_checkpointing`), and another worker of the run
(`paceline.worker.elastic_state`). Carriers store and fetch what `to_dict` returns, and do not look inside.

A checkpoint on disk holds the same plain values. Its tensors are those of the whole replica, in files that any layout
can read (`checkpointing`). A rollback to an earlier step keeps only what training changes (`snapshot`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from paceline.comm.sharded_tensors import DTensorLayout
from paceline.worker.state.snapshot import named_tensors, optimizer_spreads
from paceline.worker.state.state_dict import StateRegistry

__all__ = ["RunState", "StatePart"]


class StatePart(Protocol):
    """A collaborator of the worker that has plain values of its own: counters of the loop, say."""

    def plain(self) -> dict[str, Any]: ...

    def fill(self, state: Any, /) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """Everything that one worker has of a run after `step`.

    Tensors of `capture` are live and local: a carrier copies them before the next step.
    """

    step: int
    tensors: Mapping[str, Tensor]  # parameters, buffers, optimizer state and codec state, by full name
    spreads: Mapping[str, DTensorLayout]  # the layouts of those that are local parts of a DTensor
    plain: Mapping[str, Any]  # the rest of a checkpoint: options, stream positions, losses, random state
    parts: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])  # plain values of each `StatePart`
    worker: int | None = None  # the rank it belongs to; None: any worker at the same place of a replica may take it

    @classmethod
    def capture(
        cls,
        registry: StateRegistry,
        *,
        step: int,
        plain: Mapping[str, Any],
        codec_tensors: Mapping[str, Tensor],
        parts: Mapping[str, StatePart],
        worker: int | None = None,
    ) -> RunState:
        """Collect the present state, between two steps, without a copy."""
        return cls(
            step=step,
            tensors={**named_tensors(registry, with_caches=True), **codec_tensors},
            spreads=optimizer_spreads(registry),
            plain=plain,
            parts={name: part.plain() for name, part in parts.items()},
            worker=worker,
        )

    def restore(self, parts: Mapping[str, StatePart]) -> None:
        """Give each of these parts its values back. Prepared objects are filled by the registry's owner instead: many
        of them are prepared only later."""
        for name, part in parts.items():
            part.fill(self.parts[name])

    def to_dict(self) -> dict[str, Any]:
        """Return the form that carriers store."""
        owner = {} if self.worker is None else {"worker": self.worker}
        own = {"tensors": self.tensors, "spreads": self.spreads, "plain": self.plain, "step": self.step}
        return {**owner, **self.parts, **own}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> RunState:
        """Return what `to_dict` was given."""
        fields = {name: state[name] for name in ("tensors", "spreads", "plain", "step")}
        parts = {name: value for name, value in state.items() if name not in fields and name != "worker"}
        return cls(**fields, parts=parts, worker=state.get("worker"))
