"""What the members of a run hold in common: how a newcomer gets it, and how all save it before they leave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.worker.health.numerical_guard import NumericalGuard
from paceline.worker.loop.training_loop import TrainingLoop
from paceline.worker.membership.join_run import WorkerContext
from paceline.worker.state.checkpointing import CheckpointedObjects
from paceline.worker.state.codec_state import CodecState
from paceline.worker.state.memory_checkpointing import MemoryCheckpointer
from paceline.worker.state.run_state import RunState, StatePart

__all__ = ["ElasticState"]


class ElasticState:
    """One worker's copy of the run's state (the `StateHolder` of its agreement)."""

    def __init__(
        self,
        *,
        place: WorkerContext,
        loop: TrainingLoop,
        prepared: CheckpointedObjects,
        memories: CodecState,
        guarding: NumericalGuard,
        vaulting: MemoryCheckpointer,
    ) -> None:
        self._memories = memories
        self._group, self._agreement, self._prelude = place.group, place.agreement, place.prelude
        self._loop, self._prepared, self._memory_checkpointer = loop, prepared, vaulting
        self._parts: dict[str, StatePart] = {"loop": loop, "guarding": guarding, "vaulting": vaulting}

    @property
    def step(self) -> int:
        """How many steps are committed."""
        return self._loop.step

    def snapshot(self) -> dict[str, Any]:
        """For a newcomer: this worker's whole state, between two steps."""
        return self._prepared.capture(step=self.step, cursors=self._loop.cursors, parts=self._parts).to_dict()

    def fill(self, state: Mapping[str, Any]) -> None:
        """Take over a member's state."""
        found = RunState.from_dict(state)
        self._prepared.fill(found)
        found.restore(self._parts)

    def regrouped(self) -> None:
        """The members are others: forget what was made for the old ones."""
        self._loop.members_changed()
        self._memory_checkpointer.members_changed()
        self._prepared.has_taken_over = True
        if self._prelude.is_over:
            self._prelude.end(self._group.index == 0)

    def settle(self) -> None:
        """Save, and wait until the checkpoint is complete; on all workers."""

        def settle() -> None:
            self._prepared.wait()  # for an earlier save
            gathered = self._memories.gather(keeps=self._prepared.writes)
            if self._prepared.saved_at != self.step:  # who wrote it may have been lost before it was complete
                self._loop.save(gathered)
            self._prepared.wait(is_end=True)

        self._loop.step_log.leave()
        self._agreement.run(settle)
