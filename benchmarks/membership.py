"""How long the membership takes to decide, with very many pretended workers and a failure every (pretended) second.

    python benchmarks/membership.py [--workers 10000] [--seconds 120] [--each 1]

One core. Every second a worker is lost; now and then several at once, a worker that leaves, or a resize. Replacements
come ten seconds later. All members answer every generation. The limit of each decision is 100 ms.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import itertools
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from driving.options import options_of
from paceline.elastic.membership import Decision, EndWorker, GiveUp, Limits, Membership, StartReplica

LIMIT_MS = 100.0
START_S = 10.0


class Pretended:
    """Workers that do at once what they are told, and take note of how long each decision took."""

    def __init__(self, workers: int, each: int) -> None:
        limits = Limits(least=1, most=workers // each, workers_each=each)
        self.now = 0.0
        self.membership = Membership(limits, replicas=workers // each, now=0.0)
        self.took: defaultdict[str, list[float]] = defaultdict(list)
        self.decided: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.starting: list[tuple[float, int]] = []  # a heap: when a worker comes to its first step
        self.gone: set[int] = set()

    def ask(self, kind: str, call: Callable[[], Iterable[Decision] | None]) -> None:
        """Time one decision, and do what it says."""
        began = time.perf_counter()
        decisions = call()
        self.took[kind].append((time.perf_counter() - began) * 1e3)
        for decision in decisions or ():
            self.decided[kind][type(decision).__name__] += 1
            match decision:
                case StartReplica():
                    for worker in decision.workers:
                        self.gone.discard(worker)
                        heapq.heappush(self.starting, (self.now + START_S, worker))
                case EndWorker():
                    self.gone.add(decision.worker)
                case GiveUp():
                    raise SystemExit(f"the membership gave up: {decision.reason}")
                case _:
                    pass

    def answer(self) -> None:
        """Everybody joins the newest generation, and those that are out of it end."""
        membership = self.membership
        while not membership.is_formed:
            generation = membership.generation
            for worker in membership.left_out:
                if worker not in self.gone:
                    self.gone.add(worker)
                    self.ask("a leaver's end", lambda worker=worker: membership.ended(worker, self.now))
            for worker in membership.view.members:
                self.ask("joined", lambda worker=worker, newest=generation: membership.formed(worker, newest, self.now))
                if membership.generation != generation:
                    break
            else:
                membership.committed(membership.view.members[0], self.now)

    def second(self, number: int, chance: random.Random) -> None:
        """What happens within a second."""
        membership = self.membership
        self.now += 1.0
        for worker in membership.workers:
            if worker not in self.gone:
                membership.heard(worker, self.now)
        self.ask("look at the clock", lambda: membership.tick(self.now))
        while self.starting and self.starting[0][0] <= self.now:
            _, worker = heapq.heappop(self.starting)
            if worker not in self.gone:
                self.ask("ready", lambda worker=worker: membership.ready(worker, self.now))
        self.answer()
        members = membership.view.members
        victims = chance.sample(members, 100 if number % 30 == 29 else 1)
        kind = "loss" if len(victims) == 1 else "loss of 100"
        self.ask(kind, lambda: membership.lost(victims, self.now, reason=f"worker {victims[0]} was lost"))
        self.answer()
        if number % 5 == 4:
            leaver = chance.choice(membership.view.members)
            self.ask("leave", lambda: membership.leaving(leaver, self.now))
            self.answer()
        if number % 20 in (10, 19):
            replicas = membership.limits.most * (9 if number % 20 == 10 else 10) // 10
            self.ask("resize", lambda: membership.resize(replicas, self.now))
            self.answer()


def table(took: dict[str, list[float]], decided: dict[str, Counter[str]]) -> str:
    """Rows of text."""
    lines = ["| what happens | times | median ms | max ms | decisions |", "|---|---:|---:|---:|---|"]
    for kind, times in sorted(took.items(), key=lambda row: -max(row[1])):
        counts = ", ".join(f"{count} {name}" for name, count in decided[kind].most_common())
        lines.append(f"| {kind} | {len(times)} | {statistics.median(times):.3f} | {max(times):.3f} | {counts} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--each", type=int, default=1, help="workers of a replica")
    given = options_of(parser, takes="about 3 minutes", quick={"workers": 1000, "seconds": 10})
    world = Pretended(given.workers, given.each)
    world.answer()
    chance = random.Random(0)
    gc.collect()
    for number in range(given.seconds):
        world.second(number, chance)
    slowest = max(itertools.chain.from_iterable(world.took.values()))
    print(
        f"{given.workers} workers, {given.seconds} s with a failure in each; {world.membership.generation} generations"
    )
    print(table(world.took, world.decided))
    print(f"slowest decision: {slowest:.1f} ms, {slowest / LIMIT_MS:.2f}x of the limit ({LIMIT_MS:.0f} ms)")
    return int(slowest > LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())
