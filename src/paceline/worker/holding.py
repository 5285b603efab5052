"""What the members of a run hold in common: how a newcomer gets it, and how all save it before they leave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.worker.guarding import Guarding
from paceline.worker.loop import Loop
from paceline.worker.memories import Memories
from paceline.worker.place import Place
from paceline.worker.preparing import Preparation
from paceline.worker.vaulting import Vaulting

__all__ = ["Holding"]


class Holding:
    """One worker's copy of the run's state (the `Holder` of its agreement)."""

    def __init__(
        self,
        *,
        place: Place,
        loop: Loop,
        prepared: Preparation,
        memories: Memories,
        guarding: Guarding,
        vaulting: Vaulting,
    ) -> None:
        self._memories = memories
        self._group, self._agreement, self._prelude = place.group, place.agreement, place.prelude
        self._loop, self._prepared, self._guarding, self._vaulting = loop, prepared, guarding, vaulting

    @property
    def step(self) -> int:
        """How many steps are committed."""
        return self._loop.step

    def snapshot(self) -> dict[str, Any]:
        """For a newcomer: this worker's whole state, between two steps."""
        return {
            "loop": self._loop.plain(),
            "guarding": self._guarding.plain(),
            "vaulting": self._vaulting.plain(),
            **self._prepared.snapshot(step=self.step, cursors=self._loop.cursors, is_own=False),
        }

    def fill(self, state: Mapping[str, Any]) -> None:
        """Take over a member's state."""
        self._prepared.fill(state)
        self._loop.fill(state["loop"])
        self._guarding.fill(state["guarding"])
        self._vaulting.fill(state["vaulting"])

    def regrouped(self) -> None:
        """The members are others: forget what was made for the old ones."""
        self._loop.members_changed()
        self._vaulting.members_changed()
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

        self._loop.books.leave()
        self._agreement.run(settle)
