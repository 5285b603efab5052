"""Watches the workers for hangs and stragglers: reads their activity, requests stacks, reports and ends hangs in time.

It is like torch's NCCL watchdog, but in the supervisor. On the coordinator's host it also receives the activity of
other hosts' workers, and decides; on other hosts it only sends activity, once a second. A look at a healthy run costs
about 40 us for each worker, at most five times a second.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from paceline import clock
from paceline.monitor.hang.hang_detection import (
    HangDetector,
    HangFinding,
    cause_text,
    finding_text,
    mismatches,
    outlook_text,
)
from paceline.monitor.hang.stack_dumps import StackFile, place_of, stack_text
from paceline.monitor.hang.straggler_detection import StragglerDetector, look_interval_s
from paceline.monitor.hang.worker_activity import WorkerActivity, read_activity
from paceline.monitor.records.failure import Failure, root_cause
from paceline.monitor.records.run_files import worker_number

__all__ = ["HangMonitor", "WorkerControl"]

BALANCE = "; --balance would give it fewer micro-batches"
CIRCLE_LIMIT_S = 15.0  # workers that wait for each other so long are ended
LOOK_INTERVAL_S = 1.0  # for hangs; stragglers in fast steps need more
SOON_LOOK_S = 0.2  # while an answer is awaited
CALM_S = 1.0  # no worker waits for as long as this
ANSWER_S = 3.0  # a stack that has not come by then is not waited for
STALE_S = 5.0  # older activity of other hosts is ignored
LONGEST_STACK = 4000  # characters of one worker's, in the explanation
DIFFERENT = "workers are in different calls"  # the workers' own error, which cannot name the others' calls
ABORTED = 6  # the signal with which gloo ends a process that was sent something else than it expected


class WorkerControl(Protocol):
    """What a hang monitor can do to workers: request their stacks, and end them."""

    def request_stacks(self, worker: int) -> None:
        """Make a worker write its Python stacks."""
        ...

    def can_do_without(self, workers: Sequence[int]) -> bool:
        """Return whether the job can go on without these workers."""
        ...

    def end_hung(self, workers: Sequence[int], error: Mapping[str, Any], *, goes_on: bool) -> None:
        """End the job, with `error` as its failure, because these workers hold up the others. If the run `goes_on`
        without them, end only these workers.
        """
        ...


class HangMonitor:
    """Call `poll` often, from one thread.

    `local`: the workers of this host; None: all that have a directory. With `send` it only sends their activity, once a
    second, and the coordinator decides. A hang is ended `lead_s` seconds before the workers' own timeout.
    `may_balance`: the shares are even, but --balance could make them uneven.
    """

    def __init__(
        self,
        directory: Path,
        *,
        host: str,
        local: Collection[int] | None,
        control: WorkerControl | None,
        say: Callable[[str], None],
        send: Callable[[Sequence[Mapping[str, Any]]], None] | None = None,
        lead_s: float = 0.0,
        may_balance: bool = False,
    ) -> None:
        self._directory, self._host, self._given_workers = directory, host, local
        self._control, self._say, self._send, self._lead_s = control, say, send, lead_s
        self._detector, self._stragglers = HangDetector(), StragglerDetector(remedy=BALANCE if may_balance else "")
        self._activities: dict[int, WorkerActivity] = {}
        self._remote: dict[int, tuple[float, WorkerActivity]] = {}
        self._stacks: dict[int, StackFile] = {}
        self._awaited_stacks: dict[int, float] = {}  # worker -> when its stack was requested
        self._places: dict[int, str] = {}
        self._texts: dict[int, str] = {}  # whole stacks
        self._open: HangFinding | None = None  # its stacks are awaited
        self._reported: set[tuple[object, ...]] = set()
        self._next_at = self._next_search_at = 0.0

    def poll(self, now: float) -> None:
        """Look, if it is time; `now` is monotonic, in seconds."""
        if now < self._next_at:
            return
        self._next_at = now + LOOK_INTERVAL_S
        self._activities = self._look(now)
        if self._send is not None:
            self._take_stacks(now)
            self._send(self._own_activities())
            return
        if self._awaited_stacks:
            self._next_at = now + SOON_LOOK_S
            self._take_stacks(now)
        if self._open is not None:
            self._report_open_finding(now)
        elif len(self._activities) > 1:
            self._next_at = now + look_interval_s(self._activities, LOOK_INTERVAL_S)
            if now >= self._next_search_at:
                self._next_search_at = now + LOOK_INTERVAL_S
                self._open_finding_for(self._detector.look(self._activities), now)
            for text in self._stragglers.look(self._activities, now):
                self._say(text)

    def receive(self, message: Sequence[Mapping[str, Any]], now: float) -> None:
        """Take the activity of another host's workers; raise TypeError or KeyError if the message is invalid."""
        for one in message:
            doing = WorkerActivity.from_json(one["doing"])
            self._remote[doing.worker] = (now, doing)
            if one.get("stack"):
                self._places[doing.worker], self._texts[doing.worker] = str(one["place"]), str(one["stack"])
                self._awaited_stacks.pop(doing.worker, None)

    def stack_requested(self, worker: int) -> None:
        """A worker's stack is about to be requested."""
        self._places.pop(worker, None)
        self._texts.pop(worker, None)
        self._awaited_stacks[worker] = time.monotonic()
        self._next_at = 0.0
        if worker not in self._remote:
            self._stacks.setdefault(worker, StackFile(self._directory / f"worker_{worker}")).ask()

    def _own_activities(self) -> list[dict[str, Any]]:
        """Return the activity of this host's workers, as the coordinator receives it."""
        messages: list[dict[str, Any]] = []
        for worker, doing in self._activities.items():
            stack = {"stack": self._texts.pop(worker), "place": self._places[worker]} if worker in self._texts else {}
            messages.append({"doing": doing.to_json(), **stack})
        return messages

    def explained(self, failures: Sequence[Failure]) -> tuple[Failure, ...]:
        """After the job's end: if collectives were mismatched, put that failure first and explain it."""
        if not failures or not _may_be_mismatch(root_cause(failures)):
            return tuple(failures)
        activities = {worker: doing for worker in self._local() if (doing := self._read(worker)) is not None}
        activities |= {worker: doing for worker, (_, doing) in self._remote.items()}
        found = mismatches(activities)
        if not found:
            return tuple(failures)
        text = finding_text(found[0], activities, {})
        culprit = next((one for one in failures if one.worker == found[0].named[0]), root_cause(failures))
        error = {**(culprit.error or {}), **_error(text, culprit.worker, culprit.host, culprit.pid, culprit.step)}
        others = [one for one in failures if one is not culprit]
        return (
            dataclasses.replace(culprit, error=error),
            *(
                one if one.error is None else dataclasses.replace(one, error={**one.error, "echo": True})
                for one in others
            ),
        )

    def _look(self, now: float) -> dict[int, WorkerActivity]:
        local = self._local()
        activities = {w: d for w in local if (d := self._read(w, with_calls=False)) is not None}
        if max((max(doing.idle_s, doing.waited_s) for doing in activities.values()), default=0.0) >= CALM_S:
            activities = {w: d for w in local if (d := self._read(w)) is not None}
        remote = {worker: doing for worker, (when, doing) in self._remote.items() if now - when < STALE_S}
        return {**remote, **activities}

    def _local(self) -> Collection[int]:
        if self._given_workers is not None:
            return self._given_workers
        try:
            names = os.listdir(self._directory)
        except OSError:
            return ()
        return sorted(number for name in names if (number := worker_number(name)) is not None)

    def _read(self, worker: int, *, with_calls: bool = True) -> WorkerActivity | None:
        return read_activity(self._directory / f"worker_{worker}", worker, host=self._host, with_calls=with_calls)

    def _open_finding_for(self, findings: Sequence[HangFinding], now: float) -> None:
        """Open the first finding that is new, or whose timeout is over, and request the stacks for its report."""
        # A finding that comes again is reported again.
        self._reported &= {self._report_key(finding) for finding in findings}
        for finding in findings:
            if self._report_key(finding) in self._reported:
                continue
            self._reported.add(self._report_key(finding))
            self._open = finding
            for worker in {*finding.named, *self._activities} if self._is_final(finding) else finding.named:
                if worker not in self._activities or self._activities[worker].state == "running":
                    self.stack_requested(worker)
                    if self._control is not None:
                        self._control.request_stacks(worker)
            self._next_at = now + SOON_LOOK_S
            return

    def _take_stacks(self, now: float) -> None:
        for worker, when in list(self._awaited_stacks.items()):
            stack = self._stacks.get(worker)
            frames = stack.answer() if stack is not None else None
            if frames is not None:
                self._places[worker], self._texts[worker] = place_of(frames), stack_text(frames)
            if frames is not None or now - when > ANSWER_S:
                del self._awaited_stacks[worker]

    def _report_open_finding(self, now: float) -> None:
        """Report the open finding once its stacks have arrived; end the hang if its timeout is over."""
        finding = self._open
        if finding is None or self._awaited_stacks:
            return
        self._open = None
        finding = self._now(finding, now)
        text = finding_text(finding, self._activities, self._places)
        if self._control is None:
            self._say(text)
            return
        limit_s = self._detector.limit_s
        goes_on = not finding.is_certain and self._control.can_do_without(finding.named)
        if not self._is_final(finding):
            until_s = self._limit_s(finding)
            self._say(text + outlook_text(finding, self._activities, limit_s=until_s, goes_on=goes_on, host=self._host))
            return
        worker = finding.named[0]
        doing = self._activities.get(worker)
        error = _error(text, worker, doing.host if doing else self._host, doing.pid if doing else 0, finding.call.step)
        error["stacks"] = self._all_stacks(finding)
        error["waited_s"], error["cause"] = (
            finding.waited_s,
            cause_text(finding, self._activities, self._places, limit_s),
        )
        if goes_on:  # report the hang before its consequences
            self._say(f"{text}\n{error['stacks']}")
        self._control.end_hung(finding.named, error, goes_on=goes_on)

    def _now(self, finding: HangFinding, now: float) -> HangFinding:
        """Return the same finding with the present length of its wait."""
        waits = [max(d.waited_s, d.idle_s) for w in finding.waiting if (d := self._activities.get(w)) is not None]
        return dataclasses.replace(finding, waited_s=max([finding.waited_s, *waits]))

    def _is_final(self, finding: HangFinding) -> bool:
        return finding.waited_s >= self._limit_s(finding)

    def _limit_s(self, finding: HangFinding) -> float:
        """After how long a wait is ended: a circle never recovers, so nothing is gained by the whole timeout."""
        limit_s = self._detector.limit_s - self._lead_s
        return min(limit_s, CIRCLE_LIMIT_S) if finding.kind == "circle" else limit_s

    def _report_key(self, finding: HangFinding) -> tuple[object, ...]:
        stopped = tuple(w for w in finding.named if w in self._activities and self._activities[w].state == "stopped")
        return (*finding.key, stopped, self._is_final(finding))

    def _all_stacks(self, finding: HangFinding) -> str:
        """Return all workers' stacks, those of the named workers first."""
        parts: list[str] = []
        for worker in [*finding.named, *sorted(self._activities.keys() - set(finding.named))]:
            text = self._texts.get(worker, "")
            doing = self._activities.get(worker)
            if not text:
                text = "  (stopped)" if doing is not None and doing.state == "stopped" else "  (it did not answer)"
            elif len(text) > LONGEST_STACK:
                text = f"  ...\n{text[-LONGEST_STACK:]}"
            parts.append(f"worker {worker}, most recent call last:\n{text}")
        return "\n".join(parts)


def _error(text: str, worker: int, host: str, pid: int, step: int) -> dict[str, Any]:
    """Return an error as in the worker's error.json; its message names the worker itself."""
    return {
        "kind": "Hang",
        "message": text,
        "traceback": "",
        "worker": worker,
        "host": host,
        "pid": pid,
        "step": step,
        "time": clock.now(),
        "usage": False,
        "echo": False,
        "says_all": True,
        "names_workers": True,
    }


def _may_be_mismatch(failure: Failure) -> bool:
    """Return whether a failure may come from mismatched collectives, and does not explain that itself."""
    if failure.error is None:
        return failure.signal == ABORTED
    return bool(failure.error.get("echo")) or DIFFERENT in str(failure.error.get("message"))
