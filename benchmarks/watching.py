"""What it costs to be watched: a worker's ring and its supervisor's looks, as a share of the demo model's step.

python benchmarks/watching.py [--workers 2] [--repeats 5]

The step is measured in a run of the demo model on `--workers` workers of one thread. Ring and looks are measured by
themselves, in loops long enough to tell microseconds: in one step a worker makes as many entries as the run's own rings
counted, and a supervisor looks at all workers of its host five times a second, as it does where steps are fast.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import paceline
from paceline import Batch, Plan
from paceline.comm.flight_recorder import FILE_NAME, FlightRecorder, read_flight_record
from paceline.monitor.hang.hang_monitor import LOOK_INTERVAL_S, HangMonitor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from driving.options import options_of
from gpt import GPT, next_byte_loss, standard_library, windows

STEPS, SAMPLES = 60, 16
PHASES = ("between two steps", "waiting for data", "forward and backward", "optimizer and the loop's code")
SECONDS = {"data": 0.001, "compute": 0.02, "communication": 0.001, "optimizer": 0.001}
APART_S = 0.2  # between two looks, at least
TARGET = 0.005  # of a step


def train(worker: paceline.Worker) -> list[float]:
    """Return the seconds of each step, commit to commit."""
    text, _ = standard_library()
    model = worker.prepare(GPT(128, 4, 4))
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    step = worker.stepper(model, optim, next_byte_loss, clip_norm=1.0)
    taken, began = [], time.perf_counter()
    for batch in worker.batches(windows(text, STEPS * SAMPLES)):
        worker.report(loss=step(batch))
        now = time.perf_counter()
        taken.append(now - began)
        began = now
    return taken[5:]


def run(workers: int, scratch: str) -> tuple[float, float]:
    """Return the seconds of a step, and the collectives in one, from the ring that a worker left."""
    plan = Plan(batch=Batch(size=SAMPLES, micro=SAMPLES // workers))
    run_dir = Path(scratch) / "run"
    taken = paceline.run(train, workers=workers, threads=1, plan=plan, run_dir=str(run_dir), save_at_end=False)
    image = read_flight_record(run_dir / "attempt_1" / "worker_0" / FILE_NAME)
    if image is None:
        raise RuntimeError(f"worker 0 has left no ring in {run_dir}")
    last = image.calls[-1].step if image.calls else 8
    per_step = [sum(call.step == step for call in image.calls) for step in range(last - 8, last)]
    return statistics.median(taken), statistics.median(per_step)


def timed(action: Callable[[], None], *, count: int, repeats: int) -> float:
    """Seconds of one `action`, the median of `repeats` loops over `count`."""
    rounds: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(count):
            action()
        rounds.append((time.perf_counter() - began) / count)
    return statistics.median(rounds)


def ring_costs(folder: Path, repeats: int) -> tuple[float, float]:
    """Seconds of one collective's entries, and of what else a step writes."""
    recorder = FlightRecorder.create(folder / FILE_NAME, worker=0, limit_s=600.0)
    recorder.join("generation 0", range(8), is_main=True)
    steps = iter(range(1, 1 << 30))

    def collective() -> None:
        call = recorder.enter("all_reduce", "all_reduce of blocks.3.weight", dtype=torch.float32, numel=1 << 20)
        recorder.wait(call)
        recorder.leave()

    def rest() -> None:
        step = next(steps)
        for phase in PHASES:
            recorder.begin(phase, step)
        recorder.add_work(4, SECONDS)

    return timed(collective, count=20_000, repeats=repeats), timed(rest, count=5_000, repeats=repeats)


def look_cost(attempt: Path, workers: int, repeats: int) -> float:
    """Seconds of one look at so many workers, all of whose rings are read whole: as while a worker is waited for."""
    monitor = HangMonitor(attempt, host="here", local=range(workers), control=None, say=print)
    moments = iter(range(1 << 30))
    return timed(lambda: monitor.poll(next(moments) * (LOOK_INTERVAL_S + 1)), count=200, repeats=repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    options = options_of(parser, takes="about 3 minutes", quick={"repeats": 1})
    with tempfile.TemporaryDirectory() as scratch:
        step_s, calls = run(options.workers, scratch)
        collective_s, rest_s = ring_costs(Path(scratch), options.repeats)
        look_s = look_cost(Path(scratch) / "run" / "attempt_1", options.workers, options.repeats)
    ring_share = (calls * collective_s + rest_s) / step_s
    look_share = look_s / APART_S  # of one core, which a worker may have needed
    print("\n| what | cost | share of a step |\n|---|---|---|")
    print(f"| a step of the demo model, {options.workers} workers | {step_s * 1e3:.1f} ms, {calls:.0f} collectives | |")
    print(f"| the ring, one collective | {collective_s * 1e6:.1f} us | {100 * calls * collective_s / step_s:.3f} % |")
    print(f"| the ring, the rest of a step | {rest_s * 1e6:.1f} us | {100 * rest_s / step_s:.3f} % |")
    print(
        f"| the supervisor's look, five times a second | {look_s * 1e6:.0f} us | {100 * look_share:.3f} % of a core |"
    )
    total = ring_share + look_share
    print(f"| **together** (target: {100 * TARGET:.1f} %) | | **{100 * total:.3f} %** |")


if __name__ == "__main__":
    main()
