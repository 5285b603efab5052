"""Watches for hangs and stragglers: reads what workers do, asks for stacks, reports what is wrong, ends it in time.

There is one beside each supervisor. On the coordinator's host it also receives what the workers of other hosts do, and
decides; on other hosts it only reports, once a second. A look at a healthy run costs about 40 us for each worker, at
most five times a second.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

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
LOOK_INTERVAL_S = 1.0  # for hangs; stragglers in fast steps need more
SOON_LOOK_S = 0.2  # while an answer is awaited
CALM_S = 1.0  # no worker waits for as long as this
ANSWER_S = 3.0  # a stack that has not come by then does not come
STALE_S = 5.0  # what another host said so long ago is not believed
LONGEST_STACK = 4000  # characters of one worker's, in the explanation
DIFFERENT = "workers are in different calls"  # what workers find out themselves, each without the others' lines
ABORTED = 6  # the signal with which gloo ends a process that was sent something else than it expected


class WorkerControl(Protocol):
    """What a hang monitor may ask of the workers: stacks, and to end them."""

    def request_stacks(self, worker: int) -> None:
        """Have a worker write its stacks."""
        ...

    def can_do_without(self, workers: Sequence[int]) -> bool:
        """Whether the job can go on when these workers are ended."""
        ...

    def stuck(self, workers: Sequence[int], error: Mapping[str, Any], *, goes_on: bool) -> None:
        """End what these workers hold up: the job, whose end then tells `error`, or, where it `goes_on` without them,
        these workers."""
        ...


class HangMonitor:
    """Call `poll` often, from one thread.

    `local`: the workers of this host; None: all that have a directory. With `tell` it only tells, once a second, what
    they do, and the coordinator decides. `lead_s`: a hang is ended so much earlier than the workers' own patience is
    over. `may_balance`: shares are even, and need not be.
    """

    def __init__(
        self,
        directory: Path,
        *,
        host: str,
        local: Collection[int] | None,
        reach: WorkerControl | None,
        say: Callable[[str], None],
        tell: Callable[[Sequence[Mapping[str, Any]]], None] | None = None,
        lead_s: float = 0.0,
        may_balance: bool = False,
    ) -> None:
        self._directory, self._host, self._given = directory, host, local
        self._reach, self._say, self._tell, self._lead_s = reach, say, tell, lead_s
        self._detector, self._stragglers = HangDetector(), StragglerDetector(remedy=BALANCE if may_balance else "")
        self._doings: dict[int, WorkerActivity] = {}
        self._remote: dict[int, tuple[float, WorkerActivity]] = {}
        self._stacks: dict[int, StackFile] = {}
        self._asked: dict[int, float] = {}  # worker -> when its stack was asked for
        self._places: dict[int, str] = {}
        self._texts: dict[int, str] = {}  # whole stacks
        self._open: HangFinding | None = None  # its stacks are awaited
        self._said: set[tuple[object, ...]] = set()
        self._next_at = self._next_search_at = 0.0

    def poll(self, now: float) -> None:
        """Look, if it is time; `now` is monotonic, in seconds."""
        if now < self._next_at:
            return
        self._next_at = now + LOOK_INTERVAL_S
        self._doings = self._look(now)
        if self._tell is not None:
            self._take_answers(now)
            self._tell(self._news())
            return
        if self._asked:
            self._next_at = now + SOON_LOOK_S
            self._take_answers(now)
        if self._open is not None:
            self._go_on(now)
        elif len(self._doings) > 1:
            self._next_at = now + look_interval_s(self._doings, LOOK_INTERVAL_S)
            if now >= self._next_search_at:
                self._next_search_at = now + LOOK_INTERVAL_S
                self._judge(self._detector.look(self._doings), now)
            for text in self._stragglers.look(self._doings, now):
                self._say(text)

    def heard(self, message: Sequence[Mapping[str, Any]], now: float) -> None:
        """Another host says what its workers do; TypeError or KeyError where that makes no sense."""
        for told in message:
            doing = WorkerActivity.from_json(told["doing"])
            self._remote[doing.worker] = (now, doing)
            if told.get("stack"):
                self._places[doing.worker], self._texts[doing.worker] = str(told["place"]), str(told["stack"])
                self._asked.pop(doing.worker, None)

    def stack_requested(self, worker: int) -> None:
        """A worker is about to be asked for its stack."""
        self._places.pop(worker, None)
        self._texts.pop(worker, None)
        self._asked[worker] = time.monotonic()
        self._next_at = 0.0
        if worker not in self._remote:
            self._stacks.setdefault(worker, StackFile(self._directory / f"worker_{worker}")).ask()

    def _news(self) -> list[dict[str, Any]]:
        """What the coordinator is told about this host's workers."""
        told: list[dict[str, Any]] = []
        for worker, doing in self._doings.items():
            stack = {"stack": self._texts.pop(worker), "place": self._places[worker]} if worker in self._texts else {}
            told.append({"doing": doing.to_json(), **stack})
        return told

    def explained(self, failures: Sequence[Failure]) -> tuple[Failure, ...]:
        """After the end: where workers failed because they were in different collectives, say which, and first."""
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
        if self._given is not None:
            return self._given
        try:
            names = os.listdir(self._directory)
        except OSError:
            return ()
        return sorted(number for name in names if (number := worker_number(name)) is not None)

    def _read(self, worker: int, *, with_calls: bool = True) -> WorkerActivity | None:
        return read_activity(self._directory / f"worker_{worker}", worker, host=self._host, with_calls=with_calls)

    def _judge(self, findings: Sequence[HangFinding], now: float) -> None:
        """Begin to tell a finding that is new, or whose time is over."""
        self._said &= {self._told_as(finding) for finding in findings}  # what comes again is told again
        for finding in findings:
            if self._told_as(finding) in self._said:
                continue
            self._said.add(self._told_as(finding))
            self._open = finding
            for worker in {*finding.named, *self._doings} if self._is_final(finding) else finding.named:
                if worker not in self._doings or self._doings[worker].state == "running":
                    self.stack_requested(worker)
                    if self._reach is not None:
                        self._reach.request_stacks(worker)
            self._next_at = now + SOON_LOOK_S
            return

    def _take_answers(self, now: float) -> None:
        for worker, when in list(self._asked.items()):
            stack = self._stacks.get(worker)
            frames = stack.answer() if stack is not None else None
            if frames is not None:
                self._places[worker], self._texts[worker] = place_of(frames), stack_text(frames)
            if frames is not None or now - when > ANSWER_S:
                del self._asked[worker]

    def _go_on(self, now: float) -> None:
        """Tell the open finding, when its stacks are there."""
        finding = self._open
        if finding is None or self._asked:
            return
        self._open = None
        finding = self._now(finding, now)
        text = finding_text(finding, self._doings, self._places)
        if self._reach is None:
            self._say(text)
            return
        limit_s = self._detector.limit_s
        goes_on = not finding.is_certain and self._reach.can_do_without(finding.named)
        if not self._is_final(finding):
            until_s = limit_s - self._lead_s
            self._say(text + outlook_text(finding, self._doings, limit_s=until_s, goes_on=goes_on, host=self._host))
            return
        worker = finding.named[0]
        doing = self._doings.get(worker)
        error = _error(text, worker, doing.host if doing else self._host, doing.pid if doing else 0, finding.call.step)
        error["stacks"] = self._all_stacks(finding)
        error["waited_s"], error["cause"] = (
            finding.waited_s,
            cause_text(finding, self._doings, self._places, limit_s),
        )
        if goes_on:  # what the run goes on from is told before that it does
            self._say(f"{text}\n{error['stacks']}")
        self._reach.stuck(finding.named, error, goes_on=goes_on)

    def _now(self, finding: HangFinding, now: float) -> HangFinding:
        """The same finding, its wait as long as it is by now."""
        waits = [max(d.waited_s, d.idle_s) for w in finding.waiting if (d := self._doings.get(w)) is not None]
        return dataclasses.replace(finding, waited_s=max([finding.waited_s, *waits]))

    def _is_final(self, finding: HangFinding) -> bool:
        return finding.waited_s >= self._detector.limit_s - self._lead_s

    def _told_as(self, finding: HangFinding) -> tuple[object, ...]:
        stopped = tuple(w for w in finding.named if w in self._doings and self._doings[w].state == "stopped")
        return (*finding.key, stopped, self._is_final(finding))

    def _all_stacks(self, finding: HangFinding) -> str:
        """Everybody's stack, those of the named ones first."""
        parts: list[str] = []
        for worker in [*finding.named, *sorted(self._doings.keys() - set(finding.named))]:
            text = self._texts.get(worker, "")
            doing = self._doings.get(worker)
            if not text:
                text = "  (stopped)" if doing is not None and doing.state == "stopped" else "  (it did not answer)"
            elif len(text) > LONGEST_STACK:
                text = f"  ...\n{text[-LONGEST_STACK:]}"
            parts.append(f"worker {worker}, most recent call last:\n{text}")
        return "\n".join(parts)


def _error(text: str, worker: int, host: str, pid: int, step: int) -> dict[str, Any]:
    """What would be in the worker's error.json; its message names the worker itself."""
    return {
        "kind": "Hang",
        "message": text,
        "traceback": "",
        "worker": worker,
        "host": host,
        "pid": pid,
        "step": step,
        "time": time.time(),
        "usage": False,
        "echo": False,
        "says_all": True,
        "names_workers": True,
    }


def _may_be_mismatch(failure: Failure) -> bool:
    """Whether a run may have failed because workers were in different collectives, and nobody could say so better."""
    if failure.error is None:
        return failure.signal == ABORTED
    return bool(failure.error.get("echo")) or DIFFERENT in str(failure.error.get("message"))
