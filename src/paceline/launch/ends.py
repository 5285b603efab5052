"""How the workers of a job have ended so far, and what follows from that when all have: who failed, left, or was lost.

The head hears every end and decides when the others are to end; here is only what is known, and the verdict.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.elastic.notices import Finish
from paceline.launch.outcome import Outcome, WorkerExit, interrupted, left, lost, verdict

__all__ = ["Ends"]


class Ends:
    """`workers` are those whose end is to be waited for."""

    def __init__(self, workers: Iterable[int]) -> None:
        self.by_worker: dict[int, WorkerExit] = {}
        self.finish: Finish | None = None  # what everybody was told, once the run is to end
        self._expected = set(workers)
        self._accused: dict[int, Mapping[str, Any]] = {}  # workers that are ended because they hang, and what they did
        self._signum: int | None = None  # somebody stopped the job
        self._by = ""  # where, when it was not here

    # Whose end is waited for.

    def expect(self, workers: Iterable[int]) -> None:
        """These are started, perhaps anew."""
        for worker in workers:
            self._expected.add(worker)
            self.by_worker.pop(worker, None)

    def forget(self, worker: int) -> None:
        """Its end is no news."""
        self._expected.discard(worker)

    def is_expected(self, worker: int) -> bool:
        """Whether this worker is one of the job, ended or not."""
        return worker in self._expected

    @property
    def missing(self) -> frozenset[int]:
        """Workers that have not ended."""
        return frozenset(self._expected - self.by_worker.keys())

    # What is known.

    def is_news(self, ended: WorkerExit) -> bool:
        return ended.worker in self.missing

    def accuse(self, worker: int, error: Mapping[str, Any]) -> None:
        """It is ended because it hangs: that is how it was lost."""
        self._accused[worker] = error

    def judged(self, ended: WorkerExit) -> WorkerExit:
        """The end of a worker, as what it was accused of."""
        if ended.worker not in self._accused:
            return ended
        error = self._accused[ended.worker]
        return dataclasses.replace(ended, exit_code=None, signal=None, error=error, sent_by_us=False)

    def note(self, ended: WorkerExit) -> None:
        """A worker has ended."""
        self.by_worker[ended.worker] = ended

    def note_hang(self, error: Mapping[str, Any]) -> None:
        """A worker is ended because it hangs, and that ends the job."""
        worker = int(error["worker"])
        ended = lost(worker, host=error["host"], pid=error["pid"], kind=error["kind"], message=error["message"])
        self.by_worker[worker] = dataclasses.replace(ended, error=error)

    def take_failures(self) -> list[WorkerExit]:
        """Those that have failed so far; they are to be noted anew."""
        failed = [ended for ended in self.by_worker.values() if ended.failed]
        for ended in failed:
            del self.by_worker[ended.worker]
        return failed

    @property
    def has_failures(self) -> bool:
        return any(ended.failed for ended in self.by_worker.values())

    def stop(self, signum: int, *, by: str = "", anyway: bool = False) -> None:
        """Somebody stopped the job. One that has failed already stays so, but `anyway`."""
        # Who stops a whole cgroup, say, sends workers the same signal.
        failures = [ended for ended in self.by_worker.values() if ended.failed]
        if anyway or all(ended.signal == signum or ended.exit_code == 128 + signum for ended in failures):
            self._signum, self._by = signum, by

    # What follows.

    @property
    def have_left(self) -> bool:
        """Whether all have saved and left, as they were told."""
        ended = self.by_worker.values()
        return self._signum is None and self.finish is not None and bool(ended) and all(one.has_left for one in ended)

    @property
    def stopped(self) -> Outcome | None:
        """How the job ends where somebody stopped it."""
        return None if self._signum is None else interrupted(self._signum, self._in_order, by=self._by)

    @property
    def outcome(self) -> Outcome:
        """How the job ends with these ends."""
        if self.finish is not None and self.have_left:
            return left(self.finish, self._in_order)
        return self.stopped or verdict(self._in_order)

    @property
    def _in_order(self) -> list[WorkerExit]:
        return [self.by_worker[worker] for worker in sorted(self.by_worker)]
