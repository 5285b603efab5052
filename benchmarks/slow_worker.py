"""What one slow worker does to the others, under every way to agree: their throughput beside the undisturbed.

    python benchmarks/slow_worker.py [--times 4] [--workers 4] [--wait-ms 100] [--pairs 3] [--plans PLAN ...]

A worker's computing is a wait of `--wait-ms` for its share of a batch (for the whole, where it takes whole batches), as
of an accelerator, so that workers hardly take the host's cores from each other; the last worker's is so many `--times`
as long. The two settings take turns, A B B A ...; what counts are the batches of the other workers by second, from a
quarter of a run on, until the first one has ended.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from driving.options import options_of
from driving.progress import doing
from paceline.plan import Plan

PROGRAM = Path(__file__).parent / "programs" / "slow_one.py"
PLANS = (
    "allreduce",
    "localsgd(every=16)",
    "parameterserver",
    "parameterserver(drop=1)",
    "parameterserver(staleness=12)",
    "parameterserver(staleness=none)",
)
WIDTH, BATCH = 256, 32
AIM = 0.95  # of the undisturbed, where workers do not wait for each other


def others_rate(plan: str, options: argparse.Namespace, *, times: float) -> float:
    """Run once; returns batches by second of all workers but the last one."""
    workers, num_batches = options.workers, options.batches
    parsed = Plan.parse(f"replicas={workers}+{plan}")
    takes_whole = parsed.is_asynchronous and not parsed.has_backup_workers
    micro = BATCH if takes_whole else BATCH // workers
    with tempfile.TemporaryDirectory(prefix="paceline-slow-") as scratch:
        command = [sys.executable, "-m", "paceline", "run", str(PROGRAM), "--workers", str(workers)]
        command += [
            "--plan",
            f"replicas={workers}+{plan}+batch(size={BATCH},micro={micro})",
            "--run-dir",
            f"{scratch}/run",
            "--",
        ]
        command += [f"{scratch}/ends", str(options.wait_ms / 1e3), str(times), str(WIDTH), str(num_batches * BATCH)]
        doing(f"{plan}: {num_batches} batches, one worker {times:g}x slower")
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)
        found = [json.loads(path.read_text()) for path in sorted(Path(scratch).glob("ends.*"))]
    if done.returncode or len(found) != workers:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    others = found[:-1]
    first, last = min(ends[0] for ends in others), min(ends[-1] for ends in others)
    since = first + (last - first) / 4
    return sum(since < end <= last for ends in others for end in ends) / (last - since)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=float, default=4.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--wait-ms", type=float, default=100.0)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--batches", type=int, default=240, help="of a run")
    parser.add_argument("--plans", nargs="*", default=PLANS)
    options = options_of(
        parser, takes="about 6 minutes", quick={"pairs": 1, "batches": 20, "plans": ["allreduce", "parameterserver"]}
    )
    print(f"| plan | undisturbed, batches/s | one worker {options.times:g}x slower | of the undisturbed | pairs |")
    print("|---|---|---|---|---|", flush=True)
    for plan in options.plans:
        rates: dict[float, list[float]] = {1.0: [], options.times: []}
        for number in range(options.pairs):
            for times in (1.0, options.times) if number % 2 == 0 else (options.times, 1.0):
                rates[times].append(others_rate(plan, options, times=times))
        even, slow = rates.values()
        ratios = [one / other for one, other in zip(slow, even, strict=True)]
        cells = [f"`{plan}`", f"{statistics.median(even):.1f}", f"{statistics.median(slow):.1f}"]
        cells += [f"**{statistics.median(ratios):.3f}**", f"{min(ratios):.3f} to {max(ratios):.3f}"]
        print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\naim for replicas that do not wait for each other: {AIM}")


if __name__ == "__main__":
    main()
