"""The pool's loop: looks at the queue and at the runs, decides, and brings the runs to what was decided.

Runs that give replicas up go first; those that take wait until the devices are free. What was decided stays until the
next decision. Everything that it knows is in files, and runs are processes of their own: after kill -9 the next
`paceline pool` finds both and goes on. Where it is asked to end, all runs save and end, and are gone on with later.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from paceline import clock, run_lock
from paceline.elastic.membership_messages import PREEMPTED, TOO_FEW
from paceline.errors import PlanError
from paceline.monitor.records.run_files import local_path
from paceline.pool.batch_growth import RunPace
from paceline.pool.facts import PoolJob, PoolTerms
from paceline.pool.policy import decide
from paceline.pool.pool_run import PoolRun, queued_runs
from paceline.pool.pool_state import PoolRecord, RunEntry
from paceline.pool.run_control import Observed, ask_to_stop, console_of, measured_step, observe, resize, start
from paceline.pool.throughput import Throughput
from paceline.private_files import make_run_directory
from paceline.processes import is_same_process, process_started_s, this_host

__all__ = ["Pool"]

HERE = "here"  # the one node
LOOK_S, DECIDE_S = 0.25, 5.0
MOST_PASSED_S = 5.0  # between two looks: a pool that stood still does not know what its runs did
LEAVE_S = 90.0  # in which a run saves and ends; then it is asked once more, which ends its workers at once
MOVE_S = 1.0  # a run stands still for so long when it is resized
# A start and a stop take some seconds: a run that was let in is not paused for twice a decision.
TERMS = PoolTerms(interval_s=DECIDE_S, patience_s=600.0, turn_s=10.0)
BATCH_STAYS_S = 30.0  # a run that has just changed is not stopped for another batch
LOSSES = 3  # without a step between them: then a run has failed
END_S = 60.0  # in which runs save and end, where the pool ends


class Pool:
    """The pool of one folder, with so many devices of this host. `say` gets a line for everything that happens."""

    def __init__(self, folder: Path, *, slots: int, say: Callable[[str], None]) -> None:
        """Take the folder; raises PlanError where another process has it, or a file of it is damaged."""
        make_run_directory(folder)
        self._folder, self._slots, self._say = folder, slots, say
        if not run_lock.hold(folder):
            before = PoolRecord.load(folder)
            raise PlanError(f"{folder} is in use: process {before.pid} on {before.host} is its pool.")
        self._record = PoolRecord.load(folder)
        self._record.host, self._record.slots, self._record.pid = this_host(), slots, os.getpid()
        self._record.pid_started_s = process_started_s(os.getpid()) or 0.0
        self._runs: dict[str, PoolRun] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._seen: dict[str, Observed] = {}
        self._target: dict[str, int] = {}  # replicas of each run, as decided
        self._unasked: set[str] = set()  # have to leave, and were not there to be asked
        self._parting: dict[str, tuple[PoolRun, RunEntry]] = {}  # taken out, and perhaps still there
        self._next_decision = self._last_look = time.monotonic()
        self._told: set[str] = set()
        self._is_ending = False
        self._save()

    def run(self) -> None:
        """Serve until SIGTERM or Ctrl-C; then have all runs save and end, for at most a minute."""
        before = {number: signal.signal(number, self._asked_to_end) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            while not self._is_ending:
                self.look()
                time.sleep(LOOK_S)
            self._end()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            run_lock.release(self._folder)

    def look(self) -> None:
        """One turn: what has come, what has changed, what is due."""
        changed = self._read_queue()
        passed_s, self._last_look = min(time.monotonic() - self._last_look, MOST_PASSED_S), time.monotonic()
        for name, run in self._runs.items():
            changed |= self._observe(name, run, passed_s)
        if changed or time.monotonic() >= self._next_decision:
            self._decide()
        self._bring_about()

    # What is there.

    def _entry(self, name: str) -> RunEntry:
        return self._record.runs.setdefault(name, RunEntry())

    def _read_queue(self) -> bool:
        before = self._runs
        self._runs = queued_runs(self._folder, known=self._runs, problem=self._say_once)
        for name in self._runs.keys() - before.keys():
            run = self._runs[name]
            if name not in self._record.runs:
                self._say(f"{name} is queued: {_replicas_text(run)}")
            self._entry(name)
        for name in before.keys() - self._runs.keys():  # taken out
            self._target.pop(name, None)
            entry = self._record.runs.pop(name, None)
            if entry is not None and not entry.is_over:
                self._say(f"{name} is taken out")
                self._parting[name] = (before[name], entry)
                self._ask_to_leave(name, before[name])
        return self._runs.keys() != before.keys()

    def _observe(self, name: str, run: PoolRun, passed_s: float) -> bool:
        """Look at a run; returns whether there is something to decide anew."""
        entry = self._entry(name)
        if entry.is_over:
            return False
        process = self._processes.get(name)
        code = process.poll() if process is not None else None
        is_there = is_same_process(entry.pid, entry.pid_started_s) if process is None else code is None
        seen = self._seen[name] = observe(run)
        if seen.step > entry.step:
            entry.step, entry.losses = seen.step, 0
        entry.last_step = seen.last_step if seen.last_step is not None else entry.last_step
        entry.noise_scale = seen.noise_scale if seen.noise_scale is not None else entry.noise_scale
        if entry.phase == "waiting":
            return False
        if is_there:
            if name in self._unasked:
                self._ask_to_leave(name, run)
            elif entry.phase == "leaving" and clock.now() - entry.since > LEAVE_S:
                self._say(f"{name} has not ended {LEAVE_S:.0f} s after it was asked to: its workers are ended")
                ask_to_stop(run)
                entry.since = clock.now()
            entry.attained += passed_s * seen.replicas * run.workers_each
            if seen.replicas == entry.replicas and (took := measured_step(run, since=entry.since)) is not None:
                step_s, entry.samples_s = took.on_least(scale=_batch_scale(run, entry), replicas=seen.replicas)
                entry.step_s[str(seen.replicas)] = step_s
            return False
        self._processes.pop(name, None)
        self._unasked.discard(name)
        self._ended(name, run, entry, seen, code)
        return True

    def _ended(self, name: str, run: PoolRun, entry: RunEntry, seen: Observed, code: int | None) -> None:
        """The run's process is gone: for good, or because it was asked, or lost."""
        was_leaving, entry.replicas, entry.devices = entry.phase == "leaving", 0, 0
        code = seen.exit_code if code is None else code
        if seen.state == "finished" and code in (0, None):
            phase, word = "finished", f"finished at step {seen.step}"
        elif was_leaving or code in (PREEMPTED, TOO_FEW):
            phase, word = "waiting", f"has saved step {seen.step} and waits"
        elif seen.state == "lost" or (code is not None and code < 0):
            entry.losses += 1
            phase = "waiting" if entry.losses < LOSSES else "failed"
            word = f"was lost at step {seen.step}" + ("; it is started again" if phase == "waiting" else "")
        elif seen.state == "stopped":
            phase, word = "stopped", f"was stopped at step {seen.step}"
        else:
            phase, word = "failed", f"failed with exit status {code}: see {local_path(console_of(self._folder, run))}"
        entry.phase, entry.exit_code, entry.since = phase, code, clock.now()
        if entry.is_over:
            entry.ended = clock.now()
        self._say(f"{name} {word}")

    # What it should be.

    def _decide(self) -> None:
        """Ask the policy for the replicas of each run."""
        self._next_decision = time.monotonic() + DECIDE_S
        jobs = {
            name: self._job(run, self._entry(name)) for name, run in self._runs.items() if not self._entry(name).is_over
        }
        try:
            decision = decide(jobs, {HERE: self._slots}, clock.now(), TERMS)
        except PlanError as error:  # facts that cannot be: what was decided stays
            self._say_once(f"nothing is decided: {error}")
            return
        reasons = {change.job: change.reason for change in decision.changes}
        for name in jobs:
            entry = self._entry(name)
            replicas = len(decision.allocations.get(name, ())) // self._runs[name].workers_each
            if replicas != self._target.get(name, entry.moves or entry.replicas):
                entry.why = reasons.get(name, "")
                self._note(name, entry.replicas, replicas, entry.why)
            self._target[name] = replicas
            entry.moves = replicas if entry.moves else 0
            if name in decision.waiting:
                entry.why = decision.waiting[name]
        self._save()

    def _job(self, run: PoolRun, entry: RunEntry) -> PoolJob:
        pace = _pace(run, entry)
        remaining = None
        if entry.last_step is not None and entry.step_s:
            least_steps = max(0, entry.last_step - entry.step) * _batch_scale(run, entry)
            remaining = least_steps * pace.throughput.step_s(1)
        now, each = clock.now(), run.workers_each
        is_present = entry.phase == "running" or entry.moves > 0
        return PoolJob(
            speedup=lambda nodes, devices: pace.pace(devices // each),
            min_replicas=run.least * each,
            max_replicas=run.most * each,
            age=max(0.0, now - run.submitted),
            attained=entry.attained,
            restarts=max(0, entry.changes - 1),
            allocation=[HERE] * ((entry.moves or entry.replicas) * each if is_present else 0),
            remaining=remaining,
            priority=run.priority,
            deadline=None if remaining is None else run.deadline,  # what it has left is known after its first steps
            moving_s=MOVE_S,
            waiting_s=0.0 if is_present or entry.phase != "waiting" else max(0.0, now - (entry.since or run.submitted)),
            held_s=max(0.0, now - entry.let_in) if is_present else 0.0,
        )

    def _note(self, name: str, before: int, after: int, why: str) -> None:
        row = {"time": clock.now(), "run": name, "before": before, "after": after, "why": why}
        try:
            with (self._folder / "decisions.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            self._say_once(f"decisions.jsonl cannot be written: {error}")
        self._say(why or f"{name}: {before} -> {after} replicas")

    # How it comes about.

    def _bring_about(self) -> None:
        """Take first, then give what is free."""
        free = self._slots - self._held_by_parting()
        for name, run in self._runs.items():
            entry = self._entry(name)
            if entry.is_over or entry.phase == "waiting":
                continue
            target = self._target.get(name, entry.moves or entry.replicas)
            if entry.phase == "running" and target > 0 and self._may_resize(name):
                self._move_to_other_batch(name, run, entry, target)
            if entry.phase == "running" and target < entry.replicas and (target == 0 or self._may_resize(name)):
                self._take(name, run, entry, target)
            held = max(entry.replicas, self._seen[name].replicas if name in self._seen else 0)
            free -= held * run.workers_each
        for name, run in self._runs.items():
            entry, target = self._entry(name), self._target.get(name, 0)
            more = (target - entry.replicas) * run.workers_each
            if entry.is_over or entry.phase == "leaving" or not 0 < more <= free:
                continue
            if entry.phase == "running" and not self._may_resize(name):
                continue
            if self._give(name, run, entry, target):
                free -= more

    def _held_by_parting(self) -> int:
        """Devices of runs that were taken out and have not ended yet."""
        for name in list(self._parting):
            process, (run, entry) = self._processes.get(name), self._parting[name]
            is_there = process.poll() is None if process else is_same_process(entry.pid, entry.pid_started_s)
            if not is_there:
                del self._parting[name]
                self._processes.pop(name, None)
                self._unasked.discard(name)
            elif name in self._unasked:
                self._ask_to_leave(name, run)
        return sum(entry.devices for _, entry in self._parting.values())

    def _may_resize(self, name: str) -> bool:
        """Whether a run has taken its first step; until then it waits for its turn to be resized."""
        return name in self._seen and self._seen[name].has_stepped

    def _move_to_other_batch(self, name: str, run: PoolRun, entry: RunEntry, target: int) -> None:
        """Have a run save and end where it is to go on with another batch; it keeps its devices meanwhile."""
        if run.growth is None or clock.now() - entry.since < BATCH_STAYS_S:
            return
        pace = _pace(run, entry)
        if pace.best_batch(target) == pace.batch:
            return
        entry.why = pace.gain_text(name, target, pace.batch)
        self._note(name, entry.replicas, target, entry.why)
        entry.phase, entry.moves = "leaving", target
        self._ask_to_leave(name, run)
        self._changed(entry)

    def _take(self, name: str, run: PoolRun, entry: RunEntry, target: int) -> None:
        if target == 0:
            entry.phase, entry.moves = "leaving", 0
            self._ask_to_leave(name, run)
        elif problem := resize(run, target):
            self._say_once(f"{name} keeps its replicas, {entry.replicas}: {problem}")
            self._target[name] = entry.replicas
            return
        else:
            entry.replicas, entry.devices = target, target * run.workers_each
        self._changed(entry)

    def _give(self, name: str, run: PoolRun, entry: RunEntry, target: int) -> bool:
        if entry.phase == "waiting":
            threads = max(1, (os.cpu_count() or 1) // self._slots)
            entry.batch = _pace(run, entry).best_batch(target)
            try:
                process = self._processes[name] = start(
                    self._folder, run, replicas=target, threads=threads, batch=entry.batch
                )
                entry.pid, entry.pid_started_s = process.pid, process_started_s(process.pid) or 0.0
            except OSError as error:
                entry.phase, entry.exit_code, entry.ended = "failed", 2, clock.now()
                self._say(f"{name} cannot be started: {error}")
                self._save()
                return False
            entry.phase, entry.let_in = "running", entry.let_in if entry.moves else clock.now()
            entry.moves = 0
        elif problem := resize(run, target):
            self._say_once(f"{name} keeps its replicas, {entry.replicas}: {problem}")
            self._target[name] = entry.replicas
            return False
        entry.replicas, entry.devices = target, target * run.workers_each
        self._changed(entry)
        return True

    def _ask_to_leave(self, name: str, run: PoolRun) -> None:
        """Have it save and end; one that has just been started is asked again at each look until it is there."""
        if ask_to_stop(run):
            self._unasked.discard(name)
        else:
            self._unasked.add(name)

    def _changed(self, entry: RunEntry) -> None:
        entry.changes += 1
        entry.since = clock.now()
        self._save()

    def _save(self) -> None:
        try:
            self._record.save(self._folder)
        except OSError as error:  # the disk is full, for example; runs go on, and so does the pool
            self._say_once(f"pool.json cannot be written: {error}")

    def _say_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._say(text)

    # The end.

    def _asked_to_end(self, number: int, frame: FrameType | None) -> None:
        self._is_ending = True

    def _end(self) -> None:
        """All runs save and end."""
        running = [name for name in self._runs if self._entry(name).phase in ("running", "leaving")]
        if running:
            self._say(
                f"the pool ends: {', '.join(running)} save and end, and are gone on with when it is started again"
            )
        for name in running:
            if self._entry(name).phase == "running":
                self._entry(name).phase = "leaving"
                self._ask_to_leave(name, self._runs[name])
        deadline = time.monotonic() + END_S
        while running and time.monotonic() < deadline:
            for name in running:
                self._observe(name, self._runs[name], 0.0)
            running = [name for name in running if self._entry(name).phase == "leaving"]
            time.sleep(LOOK_S)
        for name in running:
            self._say(f"{name} has not ended in {END_S:.0f} s: it goes on")
        self._save()


def _pace(run: PoolRun, entry: RunEntry) -> RunPace:
    batch = 0 if run.growth is None else entry.batch or run.growth.least
    return RunPace(
        throughput=Throughput(entry.measured),
        fewest=run.least,
        samples_s=entry.samples_s,
        growth=run.growth,
        noise_scale=entry.noise_scale,
        batch=batch,
    )


def _batch_scale(run: PoolRun, entry: RunEntry) -> float:
    """The batch in multiples of the least one."""
    return entry.batch / run.growth.least if run.growth is not None and entry.batch else 1.0


def _replicas_text(run: PoolRun) -> str:
    if run.is_elastic:
        return f"{run.least} to {run.most} replicas"
    return f"{run.least} {'replica' if run.least == 1 else 'replicas'}, not elastic"
