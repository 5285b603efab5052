"""The agent of one node: it starts, resizes and ends this node's parts of runs, as the pool wants, and says how they
do.

Parts are processes of their own. Where the agent is killed they go on, and its next start finds them again: by their
process numbers, or where it was killed while it started one, by a mark in that one's environment. A part is never
started twice: what is about to be started is written down first.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from paceline import run_lock
from paceline.errors import PlanError
from paceline.pool.devices import NodeOffer
from paceline.pool.node_files import (
    NodeRecord,
    PartRecord,
    WantedPart,
    WantedParts,
    make_node_dir,
    node_dir,
    node_name,
)
from paceline.pool.part_process import ask_part, leads_here, process_with, share_out, start_part
from paceline.pool.pool_run import PoolRun, queued_run
from paceline.processes import is_same_process, process_started_s, this_host

__all__ = ["NodeAgent"]

BEAT_S = 2.0
SHARE_AGAIN_S = 5.0  # a coordinator that took over, or refused, is told the shares again
ASK_AGAIN_S = 90.0  # a part that is not wanted any more is asked again, which ends its workers at once
END_S = 60.0  # in which parts save and end, where the agent ends
LOOK_S = 0.25


class NodeAgent:
    """This host as a node of a pool. `say` gets a line for everything that happens here."""

    def __init__(self, pool: Path, offer: NodeOffer, *, say: Callable[[str], None]) -> None:
        """Take the node's folder; raises PlanError where another process has it, or a file there is damaged."""
        self._pool, self._say, self._told = pool, say, set[str]()
        self.name = node_name(this_host())
        make_node_dir(pool, self.name)
        before = NodeRecord.load(pool, self.name)
        if not run_lock.hold(node_dir(pool, self.name)):
            by = "another process" if before is None else f"process {before.pid} on {before.host}"
            raise PlanError(
                f"{self.name} is a node of {pool} already: {by} serves it. Start one for each host; two hosts need "
                "two names."
            )
        self.record = NodeRecord(
            name=self.name,
            host=this_host(),
            slots=offer.slots,
            cores=offer.cores,
            gpus=offer.gpus,
            pid=os.getpid(),
            pid_started_s=process_started_s(os.getpid()) or 0.0,
            beat=1 if before is None else before.beat + 1,
            parts={} if before is None else before.parts,
        )
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._asked_at: dict[str, float] = {}  # parts that are not wanted any more, by run
        self._shared: dict[str, tuple[dict[str, int], float]] = {}  # by run: the shares that were sent, and when
        self._next_beat = 0.0
        self._find_again()
        self._save()

    def look(self) -> None:
        """One turn: see which parts have ended, and bring about what is wanted."""
        changed = self._observe()
        with contextlib.suppress(OSError):  # what was wanted last holds until it can be read
            try:
                wanted = WantedParts.load(self._pool, self.name)
            except PlanError as error:
                self._say_once(str(error))
                wanted = None
            if wanted is not None:
                for run, part in wanted.parts.items():
                    changed |= self._bring_about(run, part)
                changed |= self._end_others(wanted)
        if changed or time.monotonic() >= self._next_beat:
            self._save()

    def leave(self, is_hurried: Callable[[], bool]) -> None:
        """Have all parts save and end, for at most a minute, and give the node back.

        Parts that have been asked already are left to save. Where `is_hurried()`, all are asked again, which ends their
        workers at once.
        """
        self._ask_all(lambda part: part.asked == 0)
        deadline, was_hurried = time.monotonic() + END_S, False
        while self._present and time.monotonic() < deadline:
            if is_hurried() and not was_hurried:
                was_hurried = True
                self._ask_all(lambda _: True)
            if self._observe() or time.monotonic() >= self._next_beat:
                self._save()
            time.sleep(LOOK_S)
        for run in self._present:
            self._say(f"the part of {run} on {self.name} has not ended in {END_S:.0f} s: it goes on")
        self.record.has_left = not self._present
        self._save()
        run_lock.release(node_dir(self._pool, self.name))

    def _ask_all(self, is_meant: Callable[[PartRecord], bool]) -> None:
        for part in filter(is_meant, self._present.values()):
            ask_part(part)
            part.asked += 1

    @property
    def _present(self) -> dict[str, PartRecord]:
        return {run: part for run, part in self.record.parts.items() if not part.has_ended}

    def _find_again(self) -> None:
        """What an agent that was killed has left: parts that it had started, or was starting."""
        for run, part in self._present.items():
            if part.pid == 0:
                part.pid = process_with(part.mark) or 0
                part.pid_started_s = process_started_s(part.pid) or 0.0 if part.pid else 0.0
            if part.pid and is_same_process(part.pid, part.pid_started_s):
                self._say(f"found the part of {run} again: process {part.pid}")
            else:
                part.has_ended = True

    def _observe(self) -> bool:
        """Note which parts have ended; returns whether any has."""
        changed = False
        for run, part in self._present.items():
            child = self._children.get(run)
            code = None if child is None else child.poll()
            if code is None and (child is not None or is_same_process(part.pid, part.pid_started_s)):
                continue
            part.has_ended, part.exit_code = True, code
            self._children.pop(run, None)
            self._shared.pop(run, None)
            self._asked_at.pop(run, None)
            changed = True
        return changed

    def _bring_about(self, run: str, wanted: WantedPart) -> bool:
        """Bring one part to what is wanted of it; returns whether there is something to write."""
        part = self.record.parts.get(run)
        if part is None or (part.start != wanted.start and part.has_ended):
            if wanted.leaves:
                self.record.parts[run] = PartRecord(start=wanted.start, has_ended=True)
                return True
            return self._start(run, wanted)
        if part.has_ended:
            return False
        if part.start != wanted.start:  # the pool had given it up, and it runs still
            return self._end_unwanted(run, part)
        if wanted.leaves and part.asked < wanted.asked:
            self._ask(part, wanted)
            part.asked = wanted.asked
            return True
        return not wanted.leaves and bool(wanted.shares) and self._share(run, part, wanted)

    def _ask(self, part: PartRecord, wanted: WantedPart) -> None:
        """Have a part leave, as often as the pool has asked.

        Where a whole run ends, its coordinator is asked first, and then the other parts. That one is not asked a second
        time as long as it has not had the time to save: its workers would end at once.
        """
        if not (wanted.ends_run and wanted.is_open) or wanted.asked > 2:
            ask_part(part)
        elif wanted.asked == 1 or (part.asked == 0 and leads_here(wanted.run_dir)):
            ask_part(part, run_dir=wanted.run_dir)
        elif not leads_here(wanted.run_dir):
            ask_part(part)

    def _share(self, run: str, part: PartRecord, wanted: WantedPart) -> bool:
        """Resize a run whose coordinator is on this host."""
        shares, (sent, at) = dict(wanted.shares), self._shared.get(run, ({}, -math.inf))
        is_due = time.monotonic() >= at + SHARE_AGAIN_S
        if not is_due and (shares == sent or not sent):
            return False
        if shares == sent and not wanted.is_open:
            return False
        problem = share_out(wanted.run_dir, shares, is_open=wanted.is_open)
        self._shared[run] = (shares if problem == "" else {}, time.monotonic())
        if problem is None:  # it is led from another host, or its coordinator stands still
            return False
        was, part.problem = part.problem, problem
        return was != problem

    def _start(self, run: str, wanted: WantedPart) -> bool:
        queued = self._queued(run, wanted)
        if queued is None:
            return False
        part = self.record.parts[run] = PartRecord(start=wanted.start, mark=secrets.token_hex(16))
        if not self._save():
            del self.record.parts[run]  # nothing may be started that would not be found again
            return False
        try:
            child = start_part(self._pool, queued, wanted, mark=part.mark, node=self.record)
        except OSError as error:
            part.has_ended, part.exit_code, part.problem = True, 2, f"it cannot be started: {error}"
            return True
        self._children[run] = child
        self._shared[run] = dict(wanted.shares), time.monotonic()  # it begins with them
        part.pid, part.pid_started_s = child.pid, process_started_s(child.pid) or 0.0
        return True

    def _end_others(self, wanted: WantedParts) -> bool:
        """Forget parts that are not wanted any more, and ask those that still run to end."""
        changed = False
        for run in self.record.parts.keys() - wanted.parts.keys():
            part = self.record.parts[run]
            if part.has_ended:
                del self.record.parts[run]
                changed = True
            else:
                changed |= self._end_unwanted(run, part)
        return changed

    def _end_unwanted(self, run: str, part: PartRecord) -> bool:
        """Ask a part to end that the pool does not want any more, and again after a while."""
        now = time.monotonic()
        if now < self._asked_at.setdefault(run, now if part.asked else -math.inf) + ASK_AGAIN_S:
            return False
        ask_part(part)
        part.asked += 1
        self._asked_at[run] = now
        return True

    def _queued(self, name: str, wanted: WantedPart) -> PoolRun | None:
        """Return the run that is wanted, or None where the queue does not show it: it was taken out meanwhile, or the
        folder is late here. Then it is looked for again until the pool gives it up.
        """
        try:
            run = queued_run(self._pool, name)
        except PlanError as error:
            self._say_once(str(error))
            return None
        if run is not None and run.submitted == wanted.submitted:
            return run
        self._say_once(f"{name} is not started: the queue does not show it on {self.name}")
        return None

    def _save(self) -> bool:
        self.record.beat += 1
        self._next_beat = time.monotonic() + BEAT_S
        try:
            self.record.save(self._pool)
        except OSError as error:
            self._say_once(f"node.json of {self.name} cannot be written: {error}")
            return False
        return True

    def _say_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._say(text)
