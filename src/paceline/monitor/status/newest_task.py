"""The program of a task by what its events say, however long ago it was started."""

from __future__ import annotations

import dataclasses

from paceline.events import Event, TaskReady, TaskStarted, TaskUsage

__all__ = ["NewestTask"]


@dataclasses.dataclass(slots=True)
class NewestTask:
    """The newest start of another framework's program, from the events of its worker, the last one first."""

    start: TaskStarted | TaskUsage | None = None  # the newest event with the program's pid and restarts
    told: TaskUsage | None = None  # what it used when that was told last
    is_ready: bool = False  # it listens

    def take(self, event: Event) -> None:
        """Take the event before those that were taken; without effect where the program is known."""
        if self.start is not None:
            return
        match event:
            case TaskReady():
                self.is_ready = True
            case TaskUsage(ready=ready):
                self.start = self.told = event
                self.is_ready = self.is_ready or ready
            case TaskStarted():
                self.start = event
            case _:
                pass
