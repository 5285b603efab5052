"""What the members of a run hold in common: how a newcomer gets it, and how all save it before they leave."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from paceline.worker.loop.training_loop import TrainingLoop
from paceline.worker.parts import WorkerParts
from paceline.worker.state.codec_state import GatheredCodecState
from paceline.worker.state.run_state import Carrier, RunState

__all__ = ["ElasticState"]


class ElasticState:
    """One worker's copy of the run's state (the `StateHolder` of its consensus)."""

    def __init__(self, parts: WorkerParts, loop: TrainingLoop) -> None:
        self._contents, self._resumed, self._saver = parts.contents, parts.resumed, parts.saver
        self._group, self._consensus = parts.place.group, parts.place.consensus
        self._setup_replay = parts.place.setup_replay
        self._loop, self._memory_checkpointer = loop, parts.memory_checkpointer
        self._guard = parts.numerical_guard

    @property
    def step(self) -> int:
        """How many steps are committed."""
        return self._loop.step

    def snapshot(self) -> dict[str, Any]:
        """For a newcomer: this worker's whole state, between two steps."""
        return RunState.capture(self._contents, Carrier.PEER, step=self.step).to_dict()

    def fill(self, state: Mapping[str, Any]) -> None:
        """Take over a member's state."""
        self._resumed.take_over(RunState.from_dict(state))
        self._saver.has_taken_over = True

    def regrouped(self) -> None:
        """The members are others: forget what was made for the old ones."""
        self._loop.members_changed()
        self._memory_checkpointer.members_changed()
        self._saver.has_taken_over = True
        if self._setup_replay.is_over:
            self._setup_replay.end(self._group.index == 0)

    def settle(self) -> None:
        """Save, and wait until the checkpoint is complete; on all workers."""

        def settle() -> None:
            self._saver.wait()  # for an earlier save
            gathered = self._contents.codecs.gather(keeps=self._saver.writes)
            if self._saver.saved_at != self.step:  # its writer may have been lost before it was complete
                self._loop.save(gathered)
            self._saver.wait(is_end=True)

        self._loop.step_log.leave()
        self._consensus.run(settle)

    @property
    def wants_save(self) -> bool:
        """Whether the time for a save has come; the first member's clock decides."""
        between = self._loop.between
        return self._group.index == 0 and between.save_timer.is_due and self.step > between.saved_at_step

    def save(self) -> None:
        """Save by time, and go on while the checkpoint is written; on all workers."""

        def begin() -> GatheredCodecState:
            self._saver.wait()  # otherwise a writer might wait alone, and the others in a step
            return self._contents.codecs.gather(keeps=self._saver.writes)

        began = time.monotonic()
        self._guard.compare(self.step, is_save_due=True)
        self._loop.save(self._consensus.run(begin))
        self._loop.between.save_timer.saved(time.monotonic() - began)
