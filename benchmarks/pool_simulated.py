"""Sharing devices among runs: completion times of Paceline's policy beside Pollux, Tiresias and Optimus, simulated.

    python benchmarks/pool_simulated.py [--loads 1.0,1.5] [--workloads 1,2,3,4] [--cases speed,fast] [--most-runs 1000]

16 nodes of 4 devices; 160 or 240 measured training runs come within 8 hours; a decision every 60 s; a run whose devices
change stands still for 30 s (benchmarks/data/pollux). The figures of Pollux and Optimus, and of Tiresias "published",
are those of the artifact's own simulator. Tiresias "here" is the same policy in this simulator: its check.

The first table has the mean completion time of each workload, in seconds, and the ratio to Pollux of that and of the
99th percentile. `unknown`: no run says what it has left. `known`: each run does. Runs know their speed only as far as
they have seen it, and are optimistic beyond. The second table has both ratios under other conditions: a speed that is
known exactly (`speed`) or with an error of 15 % at each size, and runs that resize in 1 s with a decision every 5 s
(`fast`). The last one has what a decision takes, with ten devices for each run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from driving.options import options_of
from driving.progress import doing
from paceline.pool.policy import PoolJob, decide
from pooling.applications import DATA, Application, load_applications, load_submissions
from pooling.cluster import PoolOutcome, Times, simulate
from pooling.runs import Knowledge
from pooling.shared import paceline_policy
from pooling.tiresias import tiresias

AS_SEEN, EXACT = Knowledge(sees_all=False), Knowledge()
USUAL, FAST = Times(), Times(interval_s=5.0, stand_still_s=1.0)
Key = tuple[str, int]  # load and workload


@dataclasses.dataclass(frozen=True, slots=True)
class PoolCase:
    """Conditions of the second table; `option` is what asks for it."""

    option: str
    title: str
    knowledge: Knowledge
    times: Times = USUAL


CASES = [
    PoolCase("speed", "speed known exactly", EXACT),
    PoolCase("speed", "as seen, 15 % error at each size", Knowledge(sees_all=False, error=0.15)),
    PoolCase("fast", "as seen, 1 s to resize, decided every 5 s", AS_SEEN, FAST),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", default="1.0,1.5", help="1.0: 160 runs in 8 hours; 1.5: 240")
    parser.add_argument("--workloads", default="1,2,3,4")
    parser.add_argument("--cases", default="speed,fast", help="of the second table")
    parser.add_argument("--most-runs", type=int, default=1000, help="of the last table")
    options = options_of(
        parser,
        takes="about 5 minutes",
        quick={"loads": "1.0", "workloads": "1,3", "cases": "speed", "most_runs": 200},
    )
    keys = [(load, int(workload)) for load in options.loads.split(",") for workload in options.workloads.split(",")]
    reference = json.loads((DATA / "reference.json").read_text())
    apps = load_applications()
    published = {key: reference[f"load {key[0]}"][f"workload-{key[1]}"] for key in keys}
    print_policies(keys, published, apps)
    print_cases(keys, published, apps, options.cases.split(","))
    print_decisions([runs for runs in (10, 100, 200, 500, 1000) if runs <= options.most_runs])
    return 0


def print_policies(keys: Sequence[Key], published: Mapping[Key, Any], apps: Mapping[str, Application]) -> None:
    print("| load | workload | Pollux | Tiresias published | here | Optimus, knows all | unknown | ratio | p99 ratio |"
          " known | ratio | p99 ratio |")  # fmt: skip
    print("|" + "---|" * 12)
    for key in keys:
        own = published[key]["pollux"]
        check = of_tiresias(key, apps)
        cells = [f"{published[key][name]['mean_jct_s']:,.0f}" for name in ("pollux", "tiresias", "optimus")]
        cells.insert(2, f"{check.mean_s:,.0f}")
        for known in (False, True):
            found = of_paceline(key, apps, AS_SEEN, USUAL, known=known)
            cells += [f"{found.mean_s:,.0f}", *_ratios([found], [own])]
        print(f"| {key[0]} | {key[1]} | {' | '.join(cells)} |", flush=True)


def print_cases(
    keys: Sequence[Key], published: Mapping[Key, Any], apps: Mapping[str, Application], asked: Sequence[str]
) -> None:
    """Print ratios of means over the workloads of a load."""
    print("\n| runs know | load | unknown | p99 | known | p99 | resizes of a run, unknown | known |")
    print("|" + "---|" * 8)
    for case in [PoolCase("", "as seen", AS_SEEN), *(case for case in CASES if case.option in asked)]:
        for load in dict.fromkeys(load for load, _ in keys):
            these = [key for key in keys if key[0] == load]
            cells: list[str] = []
            resizes: list[str] = []
            for known in (False, True):
                found: list[PoolOutcome] = []
                for key in these:
                    doing(f"{case.title}: load {key[0]}, workload {key[1]}")
                    found.append(of_paceline(key, apps, case.knowledge, case.times, known=known))
                cells += _ratios(found, [published[key]["pollux"] for key in these])
                resizes.append(f"{sum(one.restarts for one in found) / sum(len(one.jct_s) for one in found):.1f}")
            print(f"| {case.title} | {load} | {' | '.join([*cells, *resizes])} |", flush=True)


def print_decisions(sizes: Sequence[int]) -> None:
    """Print what a first decision takes, and one in which all have devices; seconds."""
    print("\n| runs | devices | first decision | next decision | speed-ups asked for |")
    print("|---|---|---|---|---|")
    for runs in sizes:
        nodes = {f"node-{at:04}": 8 for at in range(runs * 10 // 8)}
        asked = [0]
        jobs = {f"run-{at:04}": made_up(at, asked) for at in range(runs)}
        began = time.perf_counter()
        decision = decide(jobs, nodes, 0.0)
        first, calls = time.perf_counter() - began, asked[0]
        later = {
            name: dataclasses.replace(job, allocation=decision.allocations[name], age=job.age + 600.0)
            for name, job in jobs.items()
        }
        began = time.perf_counter()
        decide(later, nodes, 600.0)
        print(
            f"| {runs:,} | {sum(nodes.values()):,} | {first:.3f} s | {time.perf_counter() - began:.3f} s | {calls:,} |"
        )


def made_up(at: int, asked: list[int]) -> PoolJob:
    """Return a run of a made-up trace: sizes with a heavy tail, speed-ups that are the powers 0.5 to 0.9."""
    power = 0.5 + 0.4 * (at * 37 % 100) / 100

    def speedup(nodes: int, replicas: int) -> float:
        asked[0] += 1
        return replicas**power * (1.0 if nodes == 1 else 0.9)

    service = 100.0 / (1 - (at * 61 % 1000) / 1001)
    return PoolJob(speedup=speedup, max_replicas=256, age=float(at * 7 % 5000), attained=service)


def of_tiresias(key: Key, apps: Mapping[str, Application]) -> PoolOutcome:
    return simulate(load_submissions(*key), apps, tiresias, knowledge=EXACT, fixed_batch=True)


def of_paceline(
    key: Key, apps: Mapping[str, Application], knowledge: Knowledge, times: Times, *, known: bool
) -> PoolOutcome:
    knowledge = dataclasses.replace(knowledge, says_remaining=known)
    return simulate(load_submissions(*key), apps, paceline_policy(times), knowledge=knowledge, times=times)


def _ratios(found: Sequence[PoolOutcome], pollux: Sequence[Mapping[str, float]]) -> list[str]:
    """Return mean and 99th percentile over those of Pollux, each of the mean over workloads."""
    mean = sum(one.mean_s for one in found) / sum(one["mean_jct_s"] for one in pollux)
    p99 = sum(one.p99_s for one in found) / sum(one["p99_jct_s"] for one in pollux)
    return [f"{mean:.2f}", f"{p99:.2f}"]


if __name__ == "__main__":
    sys.exit(main())
