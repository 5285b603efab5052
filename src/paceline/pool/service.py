"""The pool's loop: looks at the queue, the nodes and the runs, decides, and has the runs brought to what was decided.

What was decided stays until the next decision. Everything that it knows is in files, and runs are processes of their
own: after kill -9 the next `paceline pool`, on any node, finds both and goes on. Where it is asked to end, all runs
save and end, and are gone on with later.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from paceline import clock, run_lock
from paceline.elastic.membership_messages import PREEMPTED, TOO_FEW
from paceline.errors import PlanError
from paceline.monitor.records.run_files import local_path
from paceline.pool import pool_lock
from paceline.pool.facts import PoolJob, PoolTerms
from paceline.pool.node_agent import NodeAgent
from paceline.pool.nodes import Nodes
from paceline.pool.notices import Notices
from paceline.pool.part_control import PartControl, Presence
from paceline.pool.policy import decide
from paceline.pool.pool_run import QUEUE, PoolRun, is_taken_out, queued_runs
from paceline.pool.pool_state import PoolRecord, RunEntry
from paceline.pool.run_control import Observed, console_of, measured_step, observe
from paceline.pool.run_pace import RunPace
from paceline.pool.shares import shares_of, shares_text
from paceline.private_files import make_own_directory
from paceline.processes import process_started_s, this_host

__all__ = ["Pool"]

LOOK_S, DECIDE_S = 0.25, 5.0
MOST_PASSED_S = 5.0  # between two looks: a pool that stood still does not know what its runs did
MOVE_S = 1.0  # a run stands still for so long when it is resized while it goes on
RESTART_S = 20.0  # and for so long when it saves, ends and goes on with other replicas
SPREAD = 0.9  # the pace of replicas on several nodes over that on one, until steps are measured there
# A start and a stop take some seconds: a run that was let in is not paused for twice a decision.
TERMS = PoolTerms(interval_s=DECIDE_S, patience_s=300.0, turn_s=10.0)
BATCH_STAYS_S = 30.0  # a run that has just changed is not stopped for another batch
LOSSES = 3  # without a step between them: then a run has failed
UNCLEAR_S = 5.0  # a run's record that another node wrote may be so old, after its parts have ended
SAVE_AGAIN_S = 30.0  # pool.json is written, also where it has not changed
END_S = 60.0  # in which runs save and end, where the pool ends


class Pool:
    """The pool of one folder. `agent` is this host as one of its nodes, which it turns, too; None where that is another
    process. `say` gets a line for everything that happens.
    """

    def __init__(self, folder: Path, *, agent: NodeAgent | None, say: Callable[[str], None]) -> None:
        """Take the folder; raises PlanError where another process has it, or a file of it is damaged."""
        make_own_directory(folder)
        self._folder, self._agent, self._say = folder, agent, say
        if not pool_lock.hold(folder):
            before = PoolRecord.load(folder)
            raise PlanError(f"{folder} is in use: process {before.pid} on {before.host} is its pool.")
        try:
            self._record, self._newest_term = PoolRecord.load(folder), PoolRecord.term_file(folder)
            _require_queue(folder, self._record)
        except BaseException:
            run_lock.release(folder)
            raise
        pid = os.getpid()
        self._record.take_over(this_host(), pid, process_started_s(pid) or 0.0, now=clock.now())
        self._runs: dict[str, PoolRun] = {}
        self._seen: dict[str, Observed] = {}
        self._target: dict[str, dict[str, int]] = {}  # replicas of each run by node, as decided
        self._noted: dict[str, int] = {}  # replicas of runs as decisions.jsonl has them; as they are where it is silent
        self._gone_since: dict[str, float] = {}  # of runs without parts, whose record says that they run
        self._say_once = Notices(say)
        self._is_dirty, self._saved, self._saved_at = False, "", 0.0
        self._nodes = Nodes(
            folder, own=None if agent is None else agent.name, say=say, before_telling=self._before_telling
        )
        self._parts = PartControl(
            self._nodes,
            entries=self._record.runs,
            taken_out=self._record.taken_out,
            seen=self._seen,
            say_once=self._say_once,
            changed=self._changed,
        )
        self._next_decision = self._last_look = time.monotonic()
        self._nodes.look()
        self._note_devices(self._parts.held())  # before it is seen at work: a run that is too large for it is refused
        self._save()

    def run(self, is_asked: Callable[[], bool], is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Serve until `is_asked()`; then have all runs save and end, for at most a minute, or until `is_hurried()`.

        Raises PlanError where another process has become the pool: the file server gave it the lock, as this host was
        cut off.
        """
        while not is_asked():
            try:
                self._require_lock()
                self.look()
            except OSError as error:  # the disk is away, for example: all stays as it is until the next look
                self._say_once(f"the pool's files cannot be read: {error}")
            time.sleep(LOOK_S)
        self._end(is_hurried)

    def _require_lock(self) -> None:
        """Raises PlanError where another process is the pool, and OSError where that cannot be seen."""
        newest = self._newest_term.read()
        pool_lock.require(self._folder, self._record.term, newest)
        if newest < self._record.term:  # one that was the pool before has come back, and has written what it knows
            self._is_dirty, self._saved = True, ""

    def close(self) -> None:
        """Give the folder back."""
        run_lock.release(self._folder)

    def look(self) -> None:
        """One turn: what has come, what has changed, what is due."""
        self._turn_agent()
        changed = self._nodes.look()
        changed |= self._read_queue()
        for name in self._seen.keys() - self._runs.keys():
            del self._seen[name]  # another run may come by this name
        passed_s, self._last_look = min(time.monotonic() - self._last_look, MOST_PASSED_S), time.monotonic()
        for name, run in self._runs.items():
            changed |= self._observe(name, run, passed_s)
        self._parts.look_at_parting()
        if changed or time.monotonic() >= self._next_decision:
            self._decide()
        self._change_batches()
        self._parts.bring_about(self._runs, self._target)
        self._save_changes()
        self._turn_agent()

    def _turn_agent(self) -> None:
        if self._agent is not None:
            self._agent.look()

    # What is there.

    def _entry(self, name: str) -> RunEntry:
        return self._record.runs.setdefault(name, RunEntry())

    def _read_queue(self) -> bool:
        """Note what has come and what was taken out, while no pool was there, too; returns whether anything has."""
        before, entries = self._runs, self._record.runs
        self._runs = queued_runs(self._folder, known=before, problem=self._say_once)
        for name in (before.keys() | entries.keys()) - self._runs.keys():
            if is_taken_out(self._folder, name):
                self._take_out(name)
        for name in self._runs.keys() - before.keys():
            run = self._runs[name]
            if name in entries and entries[name].submitted not in (0.0, run.submitted):
                self._take_out(name)  # and queued again, as another run, while no pool was there
            if name not in entries:
                self._say(f"{name} is queued: {_replicas_text(run)}")
                entries[name] = RunEntry(since=clock.now())
            entries[name].submitted, entries[name].run_dir = run.submitted, run.run_dir
        return self._runs.keys() != before.keys()

    def _take_out(self, name: str) -> None:
        self._target.pop(name, None)
        self._seen.pop(name, None)
        self._gone_since.pop(name, None)
        entry = self._record.runs.pop(name, None)
        if entry is not None and not entry.is_over:
            self._note_end(name, self._noted.get(name, entry.replicas), f"{name} is taken out")
            self._parts.part_with(name, entry)

    def _observe(self, name: str, run: PoolRun, passed_s: float) -> bool:
        """Look at a run; returns whether there is something to decide anew."""
        entry = self._entry(name)
        if entry.is_over or (entry.phase == "waiting" and name in self._seen):  # nothing runs that could change it
            return False
        try:
            seen = self._seen[name] = observe(run)
        except OSError as error:  # it is as it was seen last; the other runs are looked at all the same
            self._say_once(f"{name} cannot be looked at: {error}")
            return False
        if seen.step > entry.step:
            entry.step, entry.losses = seen.step, 0
        entry.last_step = seen.last_step if seen.last_step is not None else entry.last_step
        entry.noise_scale = seen.noise_scale if seen.noise_scale is not None else entry.noise_scale
        if entry.phase == "waiting":
            return False
        num_parts = len(entry.parts)
        presence = self._parts.look_at(name, entry)
        if presence.is_there:
            entry.attained += passed_s * seen.replicas * run.workers_each
            # Workers that are there and have not taken a step yet do not carry the run.
            if sum(seen.at_work_on.values()) == entry.devices > 0 and seen.replicas == entry.replicas:
                entry.settled = seen.step if entry.settled < 0 else entry.settled
                if (took := measured_step(run, after_step=entry.settled)) is not None:
                    scale = RunPace.of(run, entry).scale
                    step_s, entry.samples_s = took.on_least(scale=scale, replicas=seen.replicas)
                    entry.step_s[str(seen.replicas)] = step_s
            return len(entry.parts) != num_parts
        if self._is_unclear(name, entry, seen, presence):
            return False
        self._ended(name, run, entry, seen, presence)
        return True

    def _is_unclear(self, name: str, entry: RunEntry, seen: Observed, presence: Presence) -> bool:
        """Whether a run that has no part any more may have ended in another way than its record says as yet."""
        if not seen.is_running or presence.lost_node:
            self._gone_since.pop(name, None)
            return False
        return time.monotonic() - self._gone_since.setdefault(name, time.monotonic()) < UNCLEAR_S

    def _ended(self, name: str, run: PoolRun, entry: RunEntry, seen: Observed, presence: Presence) -> None:
        """The run's parts are gone: for good, or because they were asked, or lost."""
        was_leaving, had = entry.phase == "leaving", self._noted.get(name, entry.replicas)
        entry.replicas = entry.devices = 0
        code = seen.exit_code if presence.exit_code is None else presence.exit_code
        # Without a record it has never begun: its node left, say, or its agent was killed before it started the part.
        never_began = seen.state == "" and code is None and not presence.problem
        is_lost = never_began or seen.state == "lost" or seen.is_running or (code is not None and code < 0)
        has_failed = seen.state == "failed" and code is not None and code > 0 and code not in (PREEMPTED, TOO_FEW)
        if seen.state == "finished" and code in (0, None):
            phase, word = "finished", f"finished at step {seen.step}"
        elif (was_leaving and not has_failed) or code in (PREEMPTED, TOO_FEW):
            phase, word = "waiting", f"has saved step {seen.step} and waits"
        elif presence.lost_node and (is_lost or presence.exit_code is None):  # its record may be of an earlier start
            phase, word = "waiting", f"was lost at step {seen.step} with node {presence.lost_node}; it is started again"
        elif is_lost:
            entry.losses += 1
            phase = "waiting" if entry.losses < LOSSES else "failed"
            word = f"was lost at step {seen.step}" + ("; it is started again" if phase == "waiting" else "")
        elif presence.problem:
            phase, word = "failed", f"has failed: {presence.problem}"
        elif seen.state == "stopped":
            phase, word = "stopped", f"was stopped at step {seen.step}"
        else:
            phase, word = "failed", f"failed with exit status {code}: see {local_path(console_of(self._folder, run))}"
        entry.phase, entry.exit_code, entry.since = phase, code, clock.now()
        self._seen.pop(name, None)
        self._changed()
        if entry.is_over:
            entry.ended = clock.now()
        if entry.moves and not entry.is_over:  # it keeps its devices, and has said why
            self._say(f"{name} {word}")
            return
        entry.why = f"{name} {word}"
        self._note_end(name, had, entry.why)
        if not entry.is_over:
            self._target.pop(name, None)  # what it gets next is a decision, also where it is the same

    # What it should be.

    def _decide(self) -> None:
        """Ask the policy for the replicas of each run."""
        self._next_decision = time.monotonic() + DECIDE_S
        jobs = {
            name: self._job(run, self._entry(name)) for name, run in self._runs.items() if not self._entry(name).is_over
        }
        try:
            decision = decide(jobs, self._devices(), clock.now(), TERMS)
        except PlanError as error:  # facts that cannot be: what was decided stays
            self._say_once(f"nothing is decided: {error}")
            return
        reasons = {change.job: change.reason for change in decision.changes}
        for name in jobs:
            entry = self._entry(name)
            shares = self._placed(name, decision.allocations.get(name, ()))
            if shares != self._target.get(name, entry.moves or entry.shares):
                entry.why = reasons.get(name) or f"{name} goes on with what it has: {shares_text(shares) or 'nothing'}."
                self._note(name, entry.replicas, shares, entry.why)
            self._target[name] = shares
            entry.moves = shares if entry.moves else {}
            if name in decision.waiting:
                entry.why = decision.waiting[name]
        self._changed()

    def _change_batches(self) -> None:
        """Have runs save and end that are to go on with another batch; they keep their devices meanwhile."""
        for name, shares in self._target.items():
            run, entry = self._runs[name], self._entry(name)
            is_due = run.growth is not None and shares and clock.now() - entry.since > BATCH_STAYS_S
            if not is_due or entry.phase != "running" or not self._parts.may_resize(name, entry):
                continue
            pace, replicas = RunPace.of(run, entry), sum(shares.values())
            if pace.best_batch(replicas) != pace.batch:
                entry.why = pace.gain_text(name, replicas, pace.batch)
                self._note(name, entry.replicas, shares, entry.why)
                entry.moves = shares
                self._parts.pause(name, entry)

    def _devices(self) -> dict[str, int]:
        """Return the devices of each node: those that it offers, or where it does not answer, those of runs that go on
        there.
        """
        held = self._parts.held()
        silent = {node: count for node, count in held.items() if not self._nodes.is_here(node)}
        self._note_devices(held)
        return {name: node.slots for name, node in self._nodes.here.items()} | silent

    def _note_devices(self, held: Mapping[str, int]) -> None:
        self._record.nodes = self._nodes.entries(held)
        self._record.slots = sum(node.slots for node in self._nodes.here.values())

    def _placed(self, name: str, places: Sequence[str]) -> dict[str, int]:
        """Return the replicas by node; none where too few of them are whole on a node."""
        run = self._runs[name]
        shares = shares_of(places, run.workers_each)
        least = run.least if run.is_elastic else run.most
        if places and sum(shares.values()) < least:
            needs = f"{least} {'replica' if least == 1 else 'replicas'} of {run.workers_each} workers"
            self._entry(name).why = f"{name} waits: no nodes have room for {needs}."
            return {}
        return shares

    def _job(self, run: PoolRun, entry: RunEntry) -> PoolJob:
        pace, is_present = RunPace.of(run, entry), entry.phase == "running" or bool(entry.moves)
        remaining = None
        if entry.last_step is not None and entry.step_s:
            remaining = max(0, entry.last_step - entry.step) * pace.scale * pace.throughput.step_s(1)
        now, each, shares = clock.now(), run.workers_each, entry.moves or entry.shares
        places = [node for node, replicas in shares.items() for _ in range(replicas * each)]
        return PoolJob(
            speedup=lambda nodes, devices: pace.pace(devices // each) * (SPREAD if nodes > 1 else 1.0),
            min_replicas=run.least * each,
            max_replicas=run.most * each,
            age=max(0.0, now - run.submitted),
            attained=entry.attained,
            restarts=max(0, entry.changes - 1),
            allocation=places if is_present else [],
            remaining=remaining,
            priority=run.priority,
            deadline=None if remaining is None else run.deadline,  # what it has left is known after its first steps
            moving_s=MOVE_S if entry.fixed is None else RESTART_S,
            waiting_s=0.0 if is_present or entry.phase != "waiting" else max(0.0, now - (entry.since or run.submitted)),
            held_s=max(0.0, now - entry.let_in) if is_present else 0.0,
        )

    def _note_end(self, name: str, had: int, why: str) -> None:
        """Write down and say that a run has nothing any more; one that was paused has had nothing already."""
        if had:
            self._note(name, had, {}, why)
        else:
            self._say(why)
        self._noted.pop(name, None)

    def _note(self, name: str, before: int, after: Mapping[str, int], why: str) -> None:
        """Write down and say what a run has from now on, in replicas by node, and why."""
        self._noted[name] = sum(after.values())
        sizes = {"before": before, "after": self._noted[name]}
        row = {"time": clock.now(), "run": name, **sizes, "nodes": dict(after), "why": why}
        try:
            with (self._folder / "decisions.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            self._say_once(f"decisions.jsonl cannot be written: {error}")
        self._say(why)

    def _changed(self) -> None:
        """Note that something is to be written: at the end of the turn, or before a node is told something."""
        self._is_dirty = True

    def _before_telling(self) -> None:
        self._require_lock()
        self._save_changes()

    def _save_changes(self) -> None:
        if self._is_dirty:
            self._save()

    def _save(self) -> None:
        """Write what the pool knows, unless it is on the disk as it is; then once in `SAVE_AGAIN_S`."""
        text = self._record.text()
        if text == self._saved and time.monotonic() < self._saved_at + SAVE_AGAIN_S:
            self._is_dirty = False
            return
        try:
            self._require_lock()
            self._record.updated = clock.now()
            self._record.save(self._folder)
            self._is_dirty, self._saved, self._saved_at = False, self._record.text(), time.monotonic()
        except OSError as error:  # the disk is full, for example; runs go on, and so does the pool
            self._say_once(f"pool.json cannot be written: {error}")

    # The end.

    def _end(self, is_hurried: Callable[[], bool]) -> None:
        """All runs save and end."""
        running = [name for name in self._runs if self._entry(name).phase in ("running", "leaving")]
        if running:
            self._say(
                f"the pool ends: {', '.join(running)} save and end, and are gone on with when it is started again"
            )
        for name in running:
            entry = self._entry(name)
            entry.phase = "leaving"
            self._parts.leave(name, entry)
        deadline = time.monotonic() + END_S
        while running and time.monotonic() < deadline and not is_hurried():
            try:
                self._look_at_ending(running)
            except OSError as error:
                self._say_once(f"the pool's files cannot be read: {error}")
            running = [name for name in running if self._entry(name).phase == "leaving"]
            time.sleep(LOOK_S)
        if running and is_hurried():
            self._say(f"asked again: the pool does not wait until {', '.join(running)} have saved and ended")
        elif running:
            self._say(f"{', '.join(running)} have not ended in {END_S:.0f} s: they go on")
        self._parts.tell()
        self._record.has_ended = True
        self._save()

    def _look_at_ending(self, running: Sequence[str]) -> None:
        self._parts.bring_about(self._runs, {})
        self._turn_agent()
        self._nodes.look()
        for name in running:
            self._observe(name, self._runs[name], 0.0)
        self._save_changes()


def _require_queue(folder: Path, record: PoolRecord) -> None:
    """Raise PlanError where the pool has runs and their queue is gone: they would all be taken out."""
    going_on = sorted(name for name, entry in record.runs.items() if not entry.is_over)
    if going_on and not (folder / QUEUE).is_dir():
        raise PlanError(
            f"{folder} has runs ({', '.join(going_on[:5])}{', ...' if len(going_on) > 5 else ''}), and their queue "
            f"{folder / QUEUE} is not there: is the disk mounted? To begin anew without them, move {folder} away."
        )


def _replicas_text(run: PoolRun) -> str:
    if run.is_elastic:
        return f"{run.least} to {run.most} replicas"
    return f"{run.least} {'replica' if run.least == 1 else 'replicas'}, not elastic"
