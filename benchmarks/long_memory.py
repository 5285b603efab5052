"""Does the memory of a long run grow? A real run of many steps, with the memory of all its processes.

    python benchmarks/long_memory.py [--steps 100000] [--folder DIR]

Two workers train a tiny model (programs/long_work.py) with a checkpoint each thousand steps. At each tenth of the steps
the memory that each process holds (VmRSS) is read. Growth is counted from the second tenth on: in the first one buffers
of logs and caches of code fill up. Afterwards `paceline audit` reads the run. The exit status is 1 where a process has
grown by more than 32 MB, or the audit is not clean.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from driving.options import options_of
from driving.progress import doing

WORK = Path(__file__).parent / "programs" / "long_work.py"
TENTHS, MOST_GROWN_MB, LOOK_S = 10, 32.0, 0.5


def held_mb(pid: int) -> float:
    """What a process holds of memory; 0: it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:")), 0.0)


def processes(run: Path) -> dict[str, int]:
    """The supervisor and the workers of a run, by name; {} before they have started."""
    try:
        found = {"supervisor": int(json.loads((run / "run.json").read_text())["pid"])}
        for number in range(2):
            with open(run / "attempt_1" / f"worker_{number}" / "events.jsonl") as events:
                found[f"worker {number}"] = int(json.loads(events.readline())["pid"])
    except (OSError, ValueError, KeyError):
        return {}
    return found


def newest_step(run: Path) -> int:
    """The last step of `metrics.jsonl`."""
    try:
        with open(run / "metrics.jsonl", "rb") as rows:
            rows.seek(max(0, rows.seek(0, 2) - 4096))
            return int(json.loads(rows.read().splitlines()[-2])["step"])
    except (OSError, ValueError, KeyError, IndexError):
        return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="where the run directory is made, and left")
    options = options_of(parser, takes="about 10 minutes", quick={"steps": 3000})
    with tempfile.TemporaryDirectory() as made:
        run, rows = (options.folder or Path(made)) / "run", list[tuple[int, dict[str, float]]]()
        began, known, due = time.monotonic(), dict[str, int](), options.steps // TENTHS
        command = [sys.executable, str(WORK), str(options.steps), str(run)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as job:
            while job.poll() is None:
                known, step = known or processes(run), newest_step(run)
                if known and step >= due:
                    rows.append((step, {name: held_mb(pid) for name, pid in known.items()}))
                    doing(f"step {step:,} after {time.monotonic() - began:.0f} s")
                    due = (step * TENTHS // options.steps + 1) * options.steps // TENTHS
                time.sleep(LOOK_S)
        passed_s = time.monotonic() - began
        audit = subprocess.run([sys.executable, "-m", "paceline", "audit", str(run)], capture_output=True, text=True)
    if not rows:
        raise SystemExit(f"the run ended before step {due:,}, with exit status {job.returncode}")
    names = list(rows[0][1])
    print(f"{options.steps:,} steps in {passed_s:.0f} s, exit status {job.returncode}")
    print(f"| step | {', MB | '.join(names)}, MB |\n|{'---|' * (len(names) + 1)}")
    for step, held in rows:
        print(f"| {step:,} | {' | '.join(f'{held[name]:.0f}' for name in names)} |")
    ends = [held for _, held in rows if all(held.values())]  # the last look may come when they have ended
    grown = {name: ends[-1][name] - ends[min(1, len(ends) - 1)][name] for name in names}
    print(f"grown since the second row, MB: {', '.join(f'{name} {mb:.1f}' for name, mb in grown.items())}")
    print(f"audit: {audit.stdout.splitlines()[-1] if audit.stdout else audit.stderr.strip()}")
    return int(job.returncode != 0 or audit.returncode != 0 or max(grown.values()) > MOST_GROWN_MB)


if __name__ == "__main__":
    sys.exit(main())
