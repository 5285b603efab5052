"""How large are the records of a long run, and how long does it take to read them?

    python benchmarks/long_runs.py [--steps 1000000] [--workers 32] [--shares equal] [--folder DIR] [--json]

The writers of a real run (event log, sample ledger, metrics file, TensorBoard file) write the steps of worker 0 as fast
as they can. Nothing is trained. The other workers' files are its own with their number and their own positions in each
batch. Then `paceline status`, `audit` and `report` read the directory. An epoch has 100 batches of 512 and one of 256.

`--shares balanced` and `--shares turns` are irregular: workers whose parts of a batch change every ten steps, as with
`--balance` on machines that get slow and fast again, and replicas that take whole batches in no fixed order, as with
asynchronous updates. Each worker's ledger is then written by its own writer.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import gzip
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from driving.options import options_of
from paceline.events import EventLog, RunFinished, RunStarted, StepDone, WorkerFinished, WorkerStarted
from paceline.logs.log_reader import lines_of
from paceline.logs.sealed_log import SealedMark, sealed_path
from paceline.monitor.export.metrics_jsonl import MetricsFile
from paceline.monitor.export.tensorboard import TensorBoardFile
from paceline.monitor.records.run_record import RunRecord
from paceline.monitor.records.steps import Step
from paceline.schedule.micro_batches import MicroBatch, split_by_speed
from paceline.worker.data.load_balancing import EVERY_STEPS
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.record.sample_ledger import ResumeOrigin, SampleLedger

BATCH, LAST, FULL = 512, 256, 100  # samples of a batch, of the last one of an epoch; batches before that one
SAMPLES = BATCH * FULL + LAST
MICRO = 4  # samples of a micro-batch, where shares are irregular
POLL_EVERY = 1000  # steps
COMMANDS = (("status",), ("audit",), ("report", "--no-html"))
LOOK_S = 0.02  # between two looks at the memory of a command


def positions(step: int, workers: int) -> tuple[int, int, int, int]:
    """Epoch of a step, where its batch begins and ends, and how much of it a worker has."""
    epoch, place = divmod(step - 1, FULL + 1)
    size = BATCH if place < FULL else LAST
    return epoch, place * BATCH, place * BATCH + size, size // workers


def batch_of(step: int, workers: int) -> tuple[StepBatch, list[MicroBatch]]:
    epoch, start, stop, size = positions(step, workers)
    micros = [MicroBatch(0, start, start + size)]
    nothing: Any = None  # the ledger takes no samples
    about: dict[str, Any] = {"stream": "train", "step": step, "epoch": epoch, "start": start, "stop": stop}
    batch = StepBatch(**about, micros=micros, ends_epoch=None, fetch=nothing, run_pass=nothing)
    return batch, micros


def share_of(step: int, number: int, workers: int, shares: str) -> tuple[int, int] | None:
    """Where a worker's part of an irregular step begins and ends; None: it has none."""
    _, start, stop, _ = positions(step, workers)
    if shares == "turns":
        return (start, stop) if random.Random(step).randrange(workers) == number else None
    part = balanced(step // EVERY_STEPS, (stop - start) // MICRO, workers)[number]
    return start + part.start * MICRO, start + part.stop * MICRO


@functools.lru_cache(maxsize=4)
def balanced(number: int, num_micro: int, workers: int) -> tuple[range, ...]:
    """The parts of the steps between two comparisons of speed: a quarter of the workers is slow."""
    speeds = random.Random(number)
    return split_by_speed(num_micro, [speeds.choice((1.0, 1.0, 1.0, 2.0)) for _ in range(workers)])


def write_irregular_ledger(run: Path, steps: int, workers: int, shares: str, number: int) -> None:
    path = run / "attempt_1" / f"worker_{number}" / "ledger.jsonl"
    for former in (path, sealed_path(path)):
        former.unlink(missing_ok=True)
    ledger = opened_ledger(path, workers)
    for step in range(1, steps + 1):
        if (part := share_of(step, number, workers, shares)) is not None:
            batch, _ = batch_of(step, workers)
            takes_turns = shares == "turns"
            batch.behind = random.Random(-step).randrange(min(step, workers)) if takes_turns else None
            ledger.committed(batch, [MicroBatch(0, *part)], step=step, skipped=False, is_whole=takes_turns)
    ledger.close()


def opened_ledger(path: Path, workers: int) -> SampleLedger:
    ledger = SampleLedger(path, attempt=1, origin=ResumeOrigin())
    ledger.opened(
        "train",
        drawn=dict,  # of no mixture
        shares={},
        samples=SAMPLES,
        batch=BATCH,
        micro=BATCH // workers,
        seed=0,
        shuffle=True,
        drop_last=False,
    )
    return ledger


def write_worker(run: Path, steps: int, workers: int) -> None:
    """Worker 0's files, and those of the supervisor, by their own writers."""
    place = run / "attempt_1" / "worker_0"
    place.mkdir(parents=True)
    supervisor = EventLog(run / "attempt_1" / "events.jsonl", worker=None)
    supervisor.emit(
        RunStarted(run_dir=str(run), attempt=1, workers=workers, hosts=1, program="made up", launcher="local")
    )
    log = EventLog(place / "events.jsonl", worker=0, seals=True)
    started = WorkerStarted(
        rank=0, workers=workers, host="a", pid=1, device="cpu", startup_s=1.0, plan="replicas=32", resumed_from_step=0
    )
    log.emit(started)
    ledger = opened_ledger(place / "ledger.jsonl", workers)
    metrics, tensorboard = MetricsFile(run / "metrics.jsonl", attempt=1), TensorBoardFile(run / "tensorboard")
    rng, begun = random.Random(0), time.time()
    for step in range(1, steps + 1):
        batch, micros = batch_of(step, workers)
        ledger.committed(batch, micros, step=step, skipped=False, is_whole=False)
        noise = rng.random()
        seconds = {"data": 0.0001 + noise * 1e-5, "compute": 0.01 + noise * 1e-3, "communication": 0.002 - noise * 1e-4}
        seconds |= {"optimizer": 0.001 + noise * 1e-5, "total": 0.0135 + noise * 1e-3}
        loss, samples = 2.0 / step**0.1 + noise * 0.01, batch.num_samples
        counts: dict[str, Any] = {"num_wire_bytes": 4_000_000, "num_raw_bytes": 4_000_000}
        log.emit(
            StepDone(
                step=step, epoch=batch.epoch, num_samples=samples, loss=loss, metrics={"lr": 0.001}, seconds=seconds,
                num_bytes_sent=4_000_000, **counts,
            )
        )  # fmt: skip
        row = Step(
            step=step, epoch=batch.epoch, time=begun + step * 0.0135, num_samples=samples, loss=loss, seconds=seconds,
            metrics={"lr": 0.001}, samples_per_s=samples / seconds["total"], skipped=False, num_bytes_sent=4_000_000,
            workers=tuple(range(workers)), waited_s=dict.fromkeys(range(workers), seconds["communication"]),
            took_s=dict.fromkeys(range(workers), seconds["total"]), **counts,
        )  # fmt: skip
        metrics.accept(row)
        tensorboard.accept(row)
        if step % POLL_EVERY == 0:
            tensorboard.poll(step * 1.0)
    log.emit(WorkerFinished(rank=0, step=steps, peak_memory_bytes=1 << 30))
    supervisor.emit(RunFinished(state="finished", exit_code=0, duration_s=steps * 0.0135))
    for file in (supervisor, log, ledger, metrics, tensorboard):
        file.close()


def copied(path: Path, target: Path, change: Any) -> None:
    """Write a log and its sealed file again, with every line changed."""
    with open(path, encoding="utf-8") as file:
        own = file.read().splitlines()
    first: list[str] = []
    if (mark := SealedMark.parse(own[0])) is not None:
        sealed = [change(line) for line in _sealed(path, own)]
        member = gzip.compress(("\n".join(sealed) + "\n").encode(), compresslevel=6, mtime=0)
        sealed_path(target).write_bytes(member)
        first, own = [SealedMark(bytes=len(member), lines=mark.lines).text()], own[1:]
    target.write_text("\n".join([*first, *map(change, own)]) + "\n")


def _sealed(path: Path, own: list[str]) -> list[str]:
    """The sealed lines alone."""
    return list(lines_of(path))[: -(len(own) - 1)]


def of_worker(number: int, line: str) -> str:
    """A line of worker 0's events or ledger as this worker would have written it."""
    fields = json.loads(line)
    if "event" in fields:
        fields["worker"] = number
        return json.dumps(fields | ({"rank": number} if "rank" in fields else {}))
    for one in fields.get("runs", [fields]):
        if "ranges" in one:
            one["ranges"] = [[a + (b - a) * number, b + (b - a) * number] for a, b in one["ranges"]]
    return json.dumps(fields)


def copy_worker(run: Path, number: int) -> None:
    source, place = run / "attempt_1" / "worker_0", run / "attempt_1" / f"worker_{number}"
    place.mkdir()
    for name in ("events.jsonl", "ledger.jsonl"):
        copied(source / name, place / name, lambda line: of_worker(number, line))


def sizes(run: Path) -> Iterator[tuple[str, int, int]]:
    """Kind of file, bytes that do not grow any more, and bytes that grow with the steps."""

    def total(pattern: str) -> int:
        return sum(path.stat().st_size for path in run.glob(pattern))

    for name in ("events", "ledger"):
        yield name, total(f"attempt_1/worker_*/{name}.jsonl"), total(f"attempt_1/worker_*/{name}.sealed.jsonl.gz")
    yield "metrics.jsonl", 0, total("metrics.jsonl")
    yield "tensorboard", 0, total("tensorboard/*")


def read(run: Path, *words: str) -> tuple[float, float, int, int]:
    """Run a command on the directory: seconds of wall and processor, peak kB, exit status."""
    began, peak = time.perf_counter(), 0
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "paceline", words[0], str(run), *words[1:]]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak = max(peak, _peak_kb(process.pid))
            time.sleep(LOOK_S)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, cpu_s, peak, process.returncode


def _peak_kb(pid: int) -> int:
    """The most memory that a process has held; 0: it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--shares", choices=("equal", "balanced", "turns"), default="equal", help="of a batch")
    parser.add_argument("--folder", type=Path, help="where the run directory is made, and left")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of the table")
    options = options_of(
        parser, takes="about 10 minutes (20 with irregular shares)", quick={"steps": 20_000, "workers": 8}
    )
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        run = folder / "run"
        RunRecord.begin_attempt(run, job={}, workers=options.workers)
        began = time.perf_counter()
        write_worker(run, options.steps, options.workers)
        for number in range(1, options.workers):
            copy_worker(run, number)
        if options.shares != "equal":
            with concurrent.futures.ProcessPoolExecutor() as processes:
                write = functools.partial(write_irregular_ledger, run, options.steps, options.workers, options.shares)
                list(processes.map(write, range(options.workers)))
        RunRecord.load(run).end_attempt("finished", 0)
        made_s = time.perf_counter() - began
        kinds = {kind: fixed + growing for kind, fixed, growing in sizes(run)}
        more = sum(growing for _, _, growing in sizes(run))
        at_ten = sum(kinds.values()) + more * (10_000_000 / options.steps - 1)
        commands = {words[0]: read(run, *words) for words in COMMANDS}
    if options.json:
        print(json.dumps({"bytes": kinds, "bytes_of_ten_million": at_ten, "commands": commands}))
        return
    print(f"{options.steps:,} steps, {options.workers} workers, made in {made_s:.0f} s")
    for kind, num_bytes in kinds.items():
        print(f"  {kind:<15}{num_bytes / 1e6:>10.1f} MB")
    print(f"  {'all':<15}{sum(kinds.values()) / 1e6:>10.1f} MB; 10,000,000 steps at this growth {at_ten / 1e6:,.0f} MB")
    for name, (wall_s, cpu_s, peak_kb, code) in commands.items():
        said = f"({cpu_s:.2f} s of processor){peak_kb / 1024:>8.0f} MB  exit status {code}"
        print(f"  {name:<15}{wall_s:>8.2f} s {said}")


if __name__ == "__main__":
    main()
