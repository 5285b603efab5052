"""Snapshots in memory: what they cost at the default interval, and how long a broken only replica stands still.

    python benchmarks/memory_restart.py [--steps 300] [--kills 5] [--layouts shard=4,stages=4,tensor=4]

The model is that of examples/gpt.py. Cost: `shard=2`, with snapshots and without, one after the other, twice; the share
is what the workers say that the copying has taken, of all steps but the first ones. Restart: one of 4 workers is killed
at a random moment, and from the files it is read when the next step was committed, from which source, and how many
steps were done again. Nothing else should use the cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from driving.options import options_of
from driving.progress import doing

PROGRAM = Path(__file__).parent / "programs" / "kept_paceline.py"
BATCH = "batch(size=8,micro=2)"
WARM_STEPS = 5  # not measured
CALM_STEPS = 15  # committed between two kills: there is a snapshot by then
LIMIT_S = 120.0
LOOK_S = 0.005
MOST_SHARE, MOST_S = 0.02, 5.0  # targets
SETTINGS = {"OMP_NUM_THREADS": "1"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Of one run."""

    step_ms: float  # median
    share: float  # of the steps' time
    every: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Restart:
    """After one kill."""

    seconds: float  # until a step was committed
    source: str
    steps_again: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--runs", type=int, default=2, help="with snapshots, and as many without")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--layouts", default="shard=4,stages=4,tensor=4")
    arguments = options_of(
        parser, takes="about 6 minutes", quick={"steps": 40, "runs": 1, "kills": 1, "layouts": "shard=4"}
    )
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        kept = [cost(place / f"kept_{n}", arguments.steps, "") for n in range(arguments.runs)]
        bare = [cost(place / f"bare_{n}", arguments.steps, "+guard(snapshot_every=0)") for n in range(arguments.runs)]
        share = max(one.share for one in kept)
        print(f"{'shard=2':<10}{'step ms':>10}{'snapshots':>16}{'of the time':>13}{'per host':>12}")
        print(
            f"{'kept':<10}{min(one.step_ms for one in kept):>10.2f}{f'every {kept[-1].every} steps':>16}{share:>13.2%}"
            f"{kept[-1].num_bytes / 2**20:>8.1f} MiB   target {MOST_SHARE:.0%}: {verdict(share <= MOST_SHARE)}"
        )
        print(f"{'bare':<10}{min(one.step_ms for one in bare):>10.2f}")
        print(f"\n{'layout':<10}{'kills':>7}{'median s':>10}{'worst s':>9}{'steps again':>13}   from")
        for layout in arguments.layouts.split(","):
            found = list(restarts(place / layout, layout, arguments.kills))
            seconds = [one.seconds for one in found]
            again = f"{min(one.steps_again for one in found)}-{max(one.steps_again for one in found)}"
            sources = ", ".join(sorted({one.source for one in found}))
            print(
                f"{layout:<10}{len(found):>7}{statistics.median(seconds):>10.2f}{max(seconds):>9.2f}{again:>13}   "
                f"{sources}   target {MOST_S:.0f} s: {verdict(max(seconds) <= MOST_S and sources == 'memory')}"
            )


def cost(run_dir: Path, steps: int, guard: str) -> Cost:
    """Run to the end; what the first worker says."""
    plan = f"shard=2+{BATCH}{guard}"
    doing(f"{plan}: {steps} steps")
    done = subprocess.run(
        [*command(run_dir, plan, 2), "--max-steps", str(steps)],
        env=os.environ | SETTINGS,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"the program failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    told = list(events(run_dir, 1, 0))
    totals = [one["seconds"]["total"] for one in told if one["event"] == "StepDone"][WARM_STEPS:]
    kept = [one for one in told if one["event"] == "StateKept"]
    return Cost(
        step_ms=statistics.median(totals) * 1e3,
        share=sum(one["seconds"] for one in kept if one["step"] >= WARM_STEPS) / sum(totals),
        every=kept[-1]["every"] if kept else 0,
        num_bytes=kept[-1]["num_bytes"] if kept else 0,
    )


def restarts(run_dir: Path, layout: str, kills: int) -> Iterator[Restart]:
    """Kill one worker after the other, each time a random one, and read what became of it."""
    draw = random.Random(layout)
    words = [*command(run_dir, f"{layout}+{BATCH}", 4)]
    doing(f"{layout}: {kills} kills")
    with subprocess.Popen(
        words, env=os.environ | SETTINGS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            for attempt in range(1, kills + 1):
                awaited(process, run_dir, attempt, CALM_STEPS + draw.randrange(CALM_STEPS))
                started = [e for w in range(4) for e in events(run_dir, attempt, w) if e["event"] == "WorkerStarted"]
                victim = draw.choice(started)["pid"]
                killed = time.time()
                os.kill(victim, signal.SIGKILL)
                first = awaited(process, run_dir, attempt + 1, 1)[0]
                (how,) = [e for e in events(run_dir, attempt + 1, None) if e["event"] == "Restarted"]
                yield Restart(
                    seconds=first["time"] - killed,
                    source=how["source"],
                    steps_again=max(0, how["at_step"] - how["step"]),
                )
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=LIMIT_S)


def awaited(process: subprocess.Popen[bytes], run_dir: Path, attempt: int, count: int) -> list[dict[str, Any]]:
    """Return an attempt's steps, when its first worker has told of so many."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        told = [one for one in events(run_dir, attempt, 0) if one["event"] == "StepDone"]
        if len(told) >= count:
            return told
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"attempt {attempt} in {run_dir} came to no {count} steps")
        time.sleep(LOOK_S)  # a file that grows wakes no process


def events(run_dir: Path, attempt: int, worker: int | None) -> Iterator[dict[str, Any]]:
    """What a worker (None: the supervisor) has said in an attempt, but for a line that is being written."""
    path = run_dir / f"attempt_{attempt}" / ("" if worker is None else f"worker_{worker}") / "events.jsonl"
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        if line.endswith("\n"):
            yield json.loads(line)


def command(run_dir: Path, plan: str, workers: int) -> list[str]:
    options = [
        "--plan",
        plan,
        "--run-dir",
        str(run_dir),
        "--workers",
        str(workers),
        "--no-tensorboard",
        "--no-save-at-end",
    ]
    return [sys.executable, "-m", "paceline", "run", str(PROGRAM), *options]


def verdict(holds: bool) -> str:
    return "holds" if holds else "MISSED"


if __name__ == "__main__":
    main()
