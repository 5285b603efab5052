"""Brings the runs of a pool to the replicas that they should have on each node, and sees which of their parts are
there.

An elastic run on several nodes is resized while it goes on: parts join it and leave it, and its coordinator shares its
replicas out. All others change their replicas by saving, ending, and going on. What a run gives up is taken from it
first, and what it gets it is given when the devices are free. A node that does not answer is told nothing; its parts
count as there while the run says so.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path

from paceline import clock, run_lock
from paceline.elastic.membership_messages import PREEMPTED, TOO_FEW
from paceline.pool.leave_requests import LEAVE_S, LeaveRequests
from paceline.pool.node_files import PartRecord, WantedPart
from paceline.pool.nodes import LEFT, Nodes, NodeView
from paceline.pool.pool_run import PoolRun
from paceline.pool.pool_state import PartEntry, RunEntry
from paceline.pool.retries import Retries
from paceline.pool.run_control import Observed
from paceline.pool.run_pace import RunPace
from paceline.pool.shares import first_nodes, free_gpus, next_shares, startable

__all__ = ["PartControl", "Presence"]

ENDS_S = 5.0  # in which all parts of a run have ended that ends, once one of them has
OVER_S = 60.0  # and where that one has finished or failed: perhaps only it could not join
# A part on a node that does not answer is gone when for so long its run, which goes on, has had no workers there; or,
LOST_S = 3.0
GONE_S = 15.0  # of a run that goes on nowhere else, when no process has had the run's lock
START_S = 60.0  # in which a node that answers says that it has a part that it was given; else that is given up
# A node on which a part could not be started, or could not join its run, gets none of that run for so long. And a run
# is not offered replicas that it has refused; its node's agent has taken the refusal back by then.
START_AGAIN_S, RESIZE_AGAIN_S, MOST_AGAIN_S = 60.0, 10.0, 3600.0
START_BITS = 52  # of random numbers: no two starts have the same, and JSON readers keep them
STUCK_S = 30.0  # a run that can neither give nor take for so long is paused, and goes on as it should be


@dataclasses.dataclass(kw_only=True, slots=True)
class Presence:
    """Whether any part of a run is there. If not: the exit status of the last one (None: not known), whether that was
    on a node that was lost (`lost_node`), and why it could not be started.

    Where a part ends by itself, the others may be about to. So it gets no new parts until `changes_after`
    (`time.monotonic`).
    """

    is_there: bool = True
    exit_code: int | None = None
    lost_node: str = ""
    problem: str = ""
    changes_after: float = 0.0


class PartControl:
    """The parts of all runs. `entries` and `seen` are the pool's, by run. `taken_out`: entries of runs that were taken
    out of the queue; they stay here until their parts have ended. `changed` is called when an entry changes.
    """

    def __init__(
        self,
        nodes: Nodes,
        *,
        entries: Mapping[str, RunEntry],
        taken_out: MutableMapping[str, RunEntry],
        seen: Mapping[str, Observed],
        say_once: Callable[[str], None],
        changed: Callable[[], None],
    ) -> None:
        self._nodes, self._entries, self._taken_out, self._seen = nodes, entries, taken_out, seen
        self._say_once, self._changed = say_once, changed
        self._leave_requests = LeaveRequests(say_once)
        self._quiet_since: dict[tuple[str, str], float] = {}  # by run and node, of parts on nodes that do not answer
        self._stuck_since: dict[str, float] = {}
        self._unheard_since: dict[int, float] = {}  # by start: parts of which their node has not said anything
        self._joining: set[int] = set()  # starts of parts that have taken no step with their run yet
        self._start_tries = Retries[tuple[str, str]](first_s=START_AGAIN_S, most_s=MOST_AGAIN_S)  # by run and node
        self._refused_shares: dict[str, dict[str, int]] = {}  # by run, those that it refused last
        self._resize_tries = Retries[str](first_s=RESIZE_AGAIN_S, most_s=MOST_AGAIN_S)
        self._presence: dict[str, Presence] = {}  # of runs since their start

    # What is there.

    def look_at(self, name: str, entry: RunEntry) -> Presence:
        """See which parts of a run are there, and forget those that have ended."""
        presence = self._presence.setdefault(name, Presence())
        self._look_at(name, entry, self._seen.get(name, Observed()), presence)
        return presence

    def _look_at(self, name: str, entry: RunEntry, seen: Observed, presence: Presence) -> None:
        for node, part in list(entry.parts.items()):
            view = self._nodes.get(node)
            said = None if view is None else view.part(name, part.start)
            if said is not None and said.has_ended:
                self._note_end(name, entry, node, said, presence)
            elif view is not None and view.is_here:
                if said is not None:
                    self._goes_on(name, entry, node, said, seen)
                    continue
                if not self._is_unheard(name, entry, node, view):
                    continue
            elif self._is_gone(name, entry, node, seen):
                presence.lost_node = node
                self._say_once(f"{name} has lost its part on node {node}, after {entry.starts} starts of parts")
            else:
                continue
            self._forget(name, entry, node)
        presence.is_there = bool(entry.parts)

    def _forget(self, name: str, entry: RunEntry, node: str) -> None:
        """A part is not there any more."""
        part = entry.parts.pop(node)
        self._leave_requests.forget(name, node)
        self._quiet_since.pop((name, node), None)
        self._unheard_since.pop(part.start, None)
        self._joining.discard(part.start)
        entry.settled = -1
        self._count(entry)
        self._changed()

    def _note_end(self, name: str, entry: RunEntry, node: str, said: PartRecord, presence: Presence) -> None:
        part = entry.parts[node]
        presence.lost_node = ""
        if said.exit_code is not None and (not part.leaves or entry.ends_run):
            presence.exit_code = said.exit_code
        if not part.leaves:
            goes_on = said.exit_code is None or said.exit_code < 0 or said.exit_code in (PREEMPTED, TOO_FEW)
            presence.changes_after = time.monotonic() + (ENDS_S if goes_on else OVER_S)
            others_are_here = any(one != node and self._nodes.is_here(one) for one in entry.parts)
            if part.start in self._joining and others_are_here and said.exit_code not in (0, PREEMPTED):
                why = said.problem or f"its exit status is {said.exit_code}; its console says more"
                self._failed_on(name, node, f"a part of {name} could not join it on node {node}: {why}")
        presence.problem = said.problem if said.pid == 0 else presence.problem

    def _goes_on(self, name: str, entry: RunEntry, node: str, said: PartRecord, seen: Observed) -> None:
        part = entry.parts[node]
        self._unheard_since.pop(part.start, None)
        if seen.at_work_on.get(self._host(node), 0):
            self._joining.discard(part.start)
            self._start_tries.forget((name, node))
        if said.problem and not part.leaves:
            self._refused(name, entry, node, said.problem, seen)

    def _refused(self, name: str, entry: RunEntry, node: str, problem: str, seen: Observed) -> None:
        """A run does not take the replicas that it was given. On one node it is taken to have those that it shows; on
        several it may only lack a part that is still to join.
        """
        self._say_once(f"{name} keeps its replicas on {node}: {problem}")
        has = seen.workers_on.get(self._host(node), 0) // entry.workers_each
        if not entry.is_open and has and has != entry.parts[node].replicas:
            self._resize_tries.failed(name)
            self._refused_shares[name] = entry.shares
            entry.parts[node].replicas = has
            self._count(entry)
            self._changed()

    def _is_unheard(self, name: str, entry: RunEntry, node: str, view: NodeView) -> bool:
        """A node that answers says nothing of a part: its agent cannot read what it should start, or still has a former
        part. Give the part up after a while. Returns whether it can be forgotten then: an agent that finds that a part
        is to leave says so, and if it does not for long, and has no former one, it has never started it.
        """
        part = entry.parts[node]
        waited_s = time.monotonic() - self._unheard_since.setdefault(part.start, time.monotonic())
        if not part.leaves and waited_s > START_S:
            text = f"node {node} has not started its part of {name} in {START_S:.0f} s; its agent says why"
            entry.why = self._failed_on(name, node, text)
            if entry.is_open and any(one.start not in self._unheard_since for one in entry.parts.values()):
                self._leave_requests.ask(name, entry, node)
                self._resized(entry)
            else:
                self.pause(name, entry)
        former = view.record.parts.get(name)
        return part.leaves and waited_s > START_S + LEAVE_S and (former is None or former.has_ended)

    def _failed_on(self, name: str, node: str, text: str) -> str:
        """Say that a node does not get a part of a run to work, and for how long it gets no other one."""
        wait_s = self._start_tries.failed((name, node))
        text += f". It is tried there again in {wait_s:.0f} s"
        self._say_once(text)
        return text

    def held(self) -> dict[str, int]:
        """Return the devices of each node that runs have, or have not freed yet."""
        found = Counter[str]()
        for name, entry in self._entries.items():
            self._count_held(found, entry, self._seen.get(name))
        for entry in self._taken_out.values():
            self._count_held(found, entry, None)
        return dict(found)

    def _count_held(self, found: Counter[str], entry: RunEntry, seen: Observed | None) -> None:
        for node, part in entry.parts.items():
            workers = 0 if seen is None else seen.workers_on.get(self._host(node), 0)
            found[node] += max(part.replicas * entry.workers_each, workers)

    def part_with(self, name: str, entry: RunEntry) -> None:
        """A run was taken out of the queue: its parts are to end, and hold their devices until they have."""
        self._stuck_since.pop(name, None)
        self._presence.pop(name, None)
        if entry.parts:
            self._taken_out[name] = entry
            self.leave(name, entry)

    def look_at_parting(self) -> None:
        """Forget runs that were taken out and have ended."""
        for name, entry in list(self._taken_out.items()):
            self._look_at(name, entry, Observed(), Presence())
            if not entry.parts:
                del self._taken_out[name]
                self._changed()

    def _is_gone(self, name: str, entry: RunEntry, node: str, seen: Observed) -> bool:
        """Whether a part on a node that does not answer is gone with it, as far as the run shows. Its agent alone may
        have been killed: then the part goes on.
        """
        view = self._nodes.get(node)
        if view is not None and view.state == LEFT:  # in good order, with all its parts
            return True
        others = [one for one in entry.parts if one != node and self._nodes.is_here(one)]
        if others and seen.is_running:
            shows_life, limit_s = seen.workers_on.get(self._host(node), 0) > 0, LOST_S
        else:
            shows_life, limit_s = bool(entry.run_dir) and run_lock.is_held(Path(entry.run_dir)), GONE_S
        if shows_life:
            self._quiet_since.pop((name, node), None)
            return False
        return time.monotonic() - self._quiet_since.setdefault((name, node), time.monotonic()) > limit_s

    # How it comes about.

    def bring_about(self, runs: Mapping[str, PoolRun], target: Mapping[str, Mapping[str, int]]) -> None:
        """Take first, then give what is free, and tell the nodes."""
        target = {name: self._offered(name, runs[name], target[name]) for name in runs if name in target}
        running = [name for name in target if self._entries[name].phase == "running"]
        for name in running:
            self._resize(name, runs[name], target[name], {})
        free = self._free()
        for name in running:
            self._give(free, name, lambda name=name: self._resize(name, runs[name], target[name], free))
        for name, run in runs.items():
            if self._entries[name].phase == "waiting" and target.get(name):
                self._give(free, name, lambda name=name, run=run: self._start(name, run, target[name], free))
        for name, entry in [*self._entries.items(), *self._taken_out.items()]:
            self._leave_requests.ask_again(name, entry)
        self.tell()

    def tell(self) -> None:
        """Write what each node should have. A run and one that was taken out never both have parts under one name."""
        wanted: dict[str, dict[str, WantedPart]] = {}
        for name, entry in [*self._entries.items(), *self._taken_out.items()]:
            for node, part in entry.parts.items():
                wanted.setdefault(node, {})[name] = self._wanted(entry, part)
        try:
            self._nodes.want(wanted)
        except OSError as error:
            self._say_once(f"the nodes cannot be told what they should have: {error}")

    def leave(self, name: str, entry: RunEntry) -> None:
        """Have a run save and end, on all nodes."""
        entry.ends_run = True
        for node in entry.parts:
            self._leave_requests.ask(name, entry, node)
        entry.replicas = 0
        self._changed()

    def _offered(self, name: str, run: PoolRun, target: Mapping[str, int]) -> Mapping[str, int]:
        """Return a run's target without the nodes that do not get a part of it to work now. It stays as it is where it
        cannot do without them.
        """
        entry = self._entries[name]
        rest = {
            node: replicas
            for node, replicas in target.items()
            if node in entry.parts or self._start_tries.is_due((name, node))
        }
        if len(rest) == len(target) or entry.phase != "running":
            return rest
        return rest if entry.is_open and sum(rest.values()) >= run.least else entry.shares

    def _resize(self, name: str, run: PoolRun, target: Mapping[str, int], free: Mapping[str, int]) -> None:
        """Bring a run closer to its target, with what is free."""
        entry = self._entries[name]
        now, seen = entry.shares, self._seen.get(name, Observed())
        if not target:
            self._stuck_since.pop(name, None)
            self.pause(name, entry)
        elif now == target or not self.may_resize(name, entry):
            self._stuck_since.pop(name, None)
            if now == target and seen.replicas == entry.replicas:
                self._forget_refusal(name)
        elif not entry.is_live or (not entry.is_open and set(target) != set(now)):
            self.pause(name, entry)
        else:
            present = {node: seen.at_work_on.get(self._host(node), 0) // run.workers_each for node in now}
            then = next_shares(
                now, target, present, self._without_parting(entry, free), least=run.least, workers_each=run.workers_each
            )
            is_refused = then == self._refused_shares.get(name) and not self._resize_tries.is_due(name)
            if then != now and not is_refused:
                self._stuck_since.pop(name, None)
                self._set_shares(name, run, entry, then)
            elif is_refused and sum(then.values()) > sum(now.values()):  # it goes on with what it has
                self._stuck_since.pop(name, None)
            elif time.monotonic() - self._stuck_since.setdefault(name, time.monotonic()) > STUCK_S:
                self.pause(name, entry)

    def _forget_refusal(self, name: str) -> None:
        self._resize_tries.forget(name)
        self._refused_shares.pop(name, None)

    def may_resize(self, name: str, entry: RunEntry) -> bool:
        """Whether a run has taken its first step, is not about to end, and is on nodes that answer."""
        seen = self._seen.get(name, Observed())
        is_ending = time.monotonic() < self._presence.get(name, Presence()).changes_after
        return seen.is_running and seen.has_stepped and not is_ending and all(map(self._nodes.is_here, entry.parts))

    def _without_parting(self, entry: RunEntry, free: Mapping[str, int]) -> dict[str, int]:
        """A node that a part leaves takes another one of the same run when that has ended."""
        return {node: 0 if node in entry.parts and entry.parts[node].leaves else count for node, count in free.items()}

    def _set_shares(self, name: str, run: PoolRun, entry: RunEntry, shares: Mapping[str, int]) -> None:
        for node in entry.shares.keys() - shares.keys():
            self._leave_requests.ask(name, entry, node)
        for node, replicas in shares.items():
            if node in entry.parts:
                entry.parts[node].replicas = replicas
            else:
                entry.parts[node] = self._new_part(entry, node, replicas, run)
                self._joining.add(entry.parts[node].start)
        self._resized(entry)

    def pause(self, name: str, entry: RunEntry) -> None:
        """Have a run save and end; it waits then."""
        entry.phase, entry.since = "leaving", clock.now()
        entry.changes += 1
        self.leave(name, entry)

    def _start(self, name: str, run: PoolRun, target: Mapping[str, int], free: Mapping[str, int]) -> None:
        """Start a run, or go on with it, on nodes where its devices are free."""
        entry = self._entries[name]
        shares = startable(target, free, least=run.least if run.is_elastic else run.most, workers_each=run.workers_each)
        if not shares:
            return
        if name in self._taken_out:
            entry.why = f"{name} waits: the run that had its name before has not ended yet."
            return
        if run_lock.is_held(Path(run.run_dir)):
            entry.why = (
                f"{name} waits: another process works in its directory still, perhaps on a node that is cut off."
            )
            return
        has_gpus = run.uses_gpus and any(self._nodes.here[node].gpus for node in shares)
        entry.fixed = sum(shares.values()) if run.is_elastic and has_gpus else None
        entry.is_live = run.is_elastic and entry.fixed is None
        first = first_nodes(shares, run.least) if entry.is_live else shares
        self._presence[name] = Presence()
        self._forget_refusal(name)
        entry.submitted, entry.run_dir, entry.workers_each = run.submitted, run.run_dir, run.workers_each
        entry.hosts, entry.workers = len(first), sum(first.values()) * run.workers_each
        entry.is_open = entry.is_live and len(self._nodes.here) > 1
        entry.ends_run = False
        entry.parts = {node: self._new_part(entry, node, replicas, run) for node, replicas in first.items()}
        entry.batch = RunPace.of(run, entry).best_batch(sum(shares.values()))
        entry.phase, entry.let_in = "running", entry.let_in if entry.moves else clock.now()
        entry.moves = {}
        self._resized(entry)

    def _new_part(self, entry: RunEntry, node: str, replicas: int, run: PoolRun) -> PartEntry:
        entry.starts += 1
        gpus = self._gpus(node, replicas * run.workers_each, run)
        return PartEntry(replicas=replicas, start=secrets.randbits(START_BITS), gpus=gpus)

    def _give(self, free: dict[str, int], name: str, give: Callable[[], None]) -> None:
        """Let a run take devices, and count them as taken."""
        before = self._held_by(name)
        give()
        for node, count in self._held_by(name).items():
            free[node] = free.get(node, 0) - max(0, count - before.get(node, 0))

    def _held_by(self, name: str) -> Counter[str]:
        found = Counter[str]()
        self._count_held(found, self._entries[name], self._seen.get(name))
        return found

    def _free(self) -> dict[str, int]:
        held = self.held()
        return {name: record.slots - held.get(name, 0) for name, record in self._nodes.here.items()}

    def _gpus(self, node: str, count: int, run: PoolRun) -> tuple[str, ...] | None:
        gpus = self._nodes.here[node].gpus
        if gpus is None or not run.uses_gpus:
            return None if gpus is None else ()
        everyone = [*self._entries.values(), *self._taken_out.values()]
        taken = [gpu for entry in everyone if node in entry.parts for gpu in entry.parts[node].gpus or ()]
        return free_gpus(gpus, taken, count)

    def _wanted(self, entry: RunEntry, part: PartEntry) -> WantedPart:
        shares = {self._host(node): replicas for node, replicas in entry.shares.items()} if entry.is_live else {}
        return WantedPart(
            start=part.start,
            submitted=entry.submitted,
            run_dir=entry.run_dir,
            replicas=part.replicas,
            hosts=entry.hosts,
            workers=entry.workers,
            is_open=entry.is_open,
            gpus=part.gpus,
            fixed=entry.fixed,
            batch=entry.batch,
            leaves=part.leaves,
            ends_run=entry.ends_run,
            asked=part.asked,
            shares=shares,
        )

    def _resized(self, entry: RunEntry) -> None:
        entry.changes += 1
        entry.since, entry.settled = clock.now(), -1
        self._count(entry)
        self._changed()

    def _count(self, entry: RunEntry) -> None:
        entry.replicas = sum(entry.shares.values())
        entry.devices = entry.replicas * entry.workers_each

    def _host(self, node: str) -> str:
        view = self._nodes.get(node)
        return node if view is None else view.record.host
