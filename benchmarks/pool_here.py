"""How soon six runs are done on two cores: in a pool, first in first out, and with equal static shares.

    python benchmarks/pool_here.py [--rounds 2] [--scale 1.0]

Runs of different lengths come one after the other. First in first out: each gets both cores. Equal static shares: each
core has a run of its own, in the order in which they came. In a pool: both, and who gives and takes is decided while
they train. Each way is measured in each round, in turns. Then the losses of each run are compared with those of the
same run alone on one worker.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from driving.options import options_of

PROGRAM = Path(__file__).parent / "programs" / "pooled.py"
PACELINE = [sys.executable, "-m", "paceline"]
SLOTS = 2
LIMIT_S = 1200.0


@dataclasses.dataclass(frozen=True, slots=True)
class QueuedRun:
    """A run that comes `at` so many seconds after the first, and takes so many steps."""

    name: str
    at: float
    steps: int


RUNS = (
    QueuedRun("long-1", 0.0, 1600),
    QueuedRun("short-1", 6.0, 100),
    QueuedRun("middle-1", 9.0, 400),
    QueuedRun("short-2", 12.0, 100),
    QueuedRun("long-2", 15.0, 1200),
    QueuedRun("short-3", 30.0, 150),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0, help="of the runs' steps")
    parser.add_argument("--runs", type=int, default=len(RUNS), help="so many of the six, from the first")
    options = options_of(parser, takes="15 minutes", quick={"rounds": 1, "scale": 0.03, "runs": 2})
    runs = [dataclasses.replace(one, steps=max(5, round(one.steps * options.scale))) for one in RUNS[: options.runs]]
    ways = {"first in, first out": fifo, "equal static shares": shares, "pool": pool}
    means: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory(prefix="pool-here-") as folder:
        alone = {one.name: run_alone(Path(folder), one) for one in runs}
        print("| way | mean completion | " + " | ".join(f"{one.name} ({one.steps} steps)" for one in runs) + " |")
        print("|---|---|" + "---|" * len(runs))
        for number in range(options.rounds):
            for name, way in ways.items():
                place = Path(folder) / f"{name.replace(' ', '-').replace(',', '')}-{number}"
                place.mkdir()
                took = way(place, runs)
                means[name].append(statistics.mean(took.values()))
                row = " | ".join(f"{took[one.name]:.0f} s" for one in runs)
                print(f"| {name} | {means[name][-1]:.1f} s | {row} |", flush=True)
                for one in runs:
                    same_losses(place / one.name, alone[one.name])
    middle = {name: statistics.median(found) for name, found in means.items()}
    best = min(middle["first in, first out"], middle["equal static shares"])
    print(f"\npool: {middle['pool'] / best:.2f} of the better of the others; losses of each run are those of it alone")


def run_alone(folder: Path, one: QueuedRun) -> list[float]:
    """The losses of a run with the machine for itself, on one worker."""
    done = subprocess.run(run_words(folder / f"alone-{one.name}", one, 1), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return losses(folder / f"alone-{one.name}")


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def same_losses(run_dir: Path, expected: Sequence[float]) -> None:
    """Raise RuntimeError where a loss differs by more than the rounding of sums on other numbers of workers."""
    found = losses(run_dir)
    worst = max((abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)), default=0.0)
    if worst > 1e-4:
        raise RuntimeError(f"losses of {run_dir.name} differ by {worst:.1e} from those of the run alone")


def run_words(run_dir: Path, one: QueuedRun, workers: int) -> list[str]:
    words = [*PACELINE, "run", str(PROGRAM), "--workers", str(workers), "--threads", "1", "--run-dir", str(run_dir)]
    return [*words, "--max-steps", str(one.steps), "--no-tensorboard", "--cluster", "off", "--save-every-s", "0"]


def fifo(folder: Path, runs: Sequence[QueuedRun]) -> dict[str, float]:
    return in_order(folder, runs, at_once=1, workers=SLOTS)


def shares(folder: Path, runs: Sequence[QueuedRun]) -> dict[str, float]:
    return in_order(folder, runs, at_once=SLOTS, workers=1)


def in_order(folder: Path, runs: Sequence[QueuedRun], *, at_once: int, workers: int) -> dict[str, float]:
    """Seconds from when each run came to when it was done; so many run at once, with so many workers each."""
    began, took = time.monotonic(), dict[str, float]()
    waiting, running = list(runs), dict[str, subprocess.Popen[bytes]]()
    with contextlib.ExitStack() as stack:
        while waiting or running:
            now = time.monotonic() - began
            for one in runs:
                if one.name in running and running[one.name].poll() is not None:
                    if running.pop(one.name).returncode:
                        raise RuntimeError(f"{one.name} failed")
                    took[one.name] = now - one.at
            while waiting and waiting[0].at <= now and len(running) < at_once:
                one = waiting.pop(0)
                process = subprocess.Popen(
                    run_words(folder / one.name, one, workers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
                stack.callback(process.wait)
                stack.callback(process.terminate)
                running[one.name] = process
            if now > LIMIT_S:
                raise RuntimeError(f"not done after {LIMIT_S:.0f} s")
            time.sleep(0.1)
    return took


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[None]:
    with (folder / "pool.out").open("w") as out:
        process = subprocess.Popen([*PACELINE, "pool", str(folder / "pool"), "--slots", str(SLOTS)], stdout=out)
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(120)


def pool(folder: Path, runs: Sequence[QueuedRun]) -> dict[str, float]:
    """As `in_order`, in a pool."""
    took, waiting = dict[str, float](), list(runs)
    with serving(folder):
        began = time.monotonic()
        while len(took) < len(runs):
            now = time.monotonic() - began
            while waiting and waiting[0].at <= now:
                one = waiting.pop(0)
                queue = [*PACELINE, "run", "--pool", str(folder / "pool"), "--detach"]
                words = run_words(folder / one.name, one, SLOTS)[len(PACELINE) + 1 :]
                subprocess.run([*queue, *words], check=True, stdout=subprocess.DEVNULL)
            with contextlib.suppress(FileNotFoundError, ValueError):
                entries = json.loads((folder / "pool" / "pool.json").read_text())["runs"]
                for one in runs:
                    phase = entries.get(one.name, {}).get("phase")
                    if phase in ("failed", "stopped"):
                        raise RuntimeError(f"{one.name} has {phase}: {(folder / 'pool.out').read_text()}")
                    if phase == "finished" and one.name not in took:
                        took[one.name] = time.monotonic() - began - one.at
            if now > LIMIT_S:
                raise RuntimeError(f"not done after {LIMIT_S:.0f} s")
            time.sleep(0.1)
    return took


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    main()
