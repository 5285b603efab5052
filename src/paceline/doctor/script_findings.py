"""Whether a script's data comes as fast as its steps will take it, and what helps where it does not."""

from __future__ import annotations

import math
from collections.abc import Iterator

from paceline.doctor.findings import ClusterFinding
from paceline.doctor.measured import Examination, ReadingRate, ScriptReading, WorkerRates
from paceline.units import count_text

__all__ = ["reading_findings"]

WAITING = 0.05  # of a step's time for data: more is worth a word
IDLE = 0.25  # of a core that loaders may take from computing


def reading_findings(reading: ScriptReading, seen: Examination) -> list[ClusterFinding]:
    """Return what is wrong: of each host the worker that waits longest."""
    if reading.problem is not None:
        return [
            ClusterFinding(
                where=reading.script,
                what=f"how fast its data comes could not be measured: {reading.problem}",
                remedy="Run it with one worker first: paceline run. The measurements of the cluster stand.",
            )
        ]
    return list(_slow(reading, seen)) if reading.appetite is not None else []


def _slow(reading: ScriptReading, seen: Examination) -> Iterator[ClusterFinding]:
    appetite = reading.appetite or 0.0
    hosts: dict[str, list[tuple[ReadingRate, WorkerRates]]] = {}
    for rate, worker in zip(reading.rates, seen.workers, strict=True):
        hosts.setdefault(worker.host, []).append((rate, worker))
    for host, workers in hosts.items():
        rate, worker = min(workers, key=lambda one: one[0].samples_per_s)
        share = waiting_share(rate, appetite)
        if share <= WAITING:
            continue
        needed = sum(one.stored_per_sample for one, _ in workers) * appetite  # bytes per second of the host's disk
        if 0 < worker.disk_read < needed:
            remedy = (
                f"Put the data on a faster disk, or in memory: steps take {needed / 1e6:,.3g} MB/s of files on this "
                f"host, and the disk of the run's directory gives {worker.disk_read / 1e6:,.3g} MB/s."
            )
        else:
            remedy = _more_loaders(rate, worker, appetite, len(workers))
        yield ClusterFinding(
            where=f"worker {worker.rank} ({host})",
            what=f"waits for data {share * 100:.0f} % of the time: {_rate(rate.samples_per_s)} come with "
            f"loaders={rate.loaders}, and steps take {_rate(appetite)}",
            remedy=remedy,
        )


def waiting_share(rate: ReadingRate, appetite: float) -> float:
    """The share of a step in which it waits for data. Without loaders samples are read between computations; with them
    meanwhile, and only what is slower than the step is waited for.
    """
    load_s, step_s = 1 / rate.samples_per_s, 1 / appetite
    if not rate.loaders:
        return load_s / (load_s + step_s)
    return max(0.0, load_s - step_s) / max(load_s, step_s)


def _more_loaders(rate: ReadingRate, worker: WorkerRates, appetite: float, workers: int) -> str:
    each = rate.samples_per_s / max(1, rate.loaders)
    wanted = math.ceil(appetite / each)
    if rate.is_iterable and (wanted > 1 or rate.loaders):
        return (
            "An iterable dataset is read by one process on each worker: use a dataset with len() and [], or make its "
            "samples cheaper, for example by preparing them once."
        )
    # Training on a GPU keeps one core busy; on the CPU all of the worker's threads.
    free = max(0, worker.cores // workers - (worker.threads if worker.device == "cpu" else 1))
    needed = wanted * rate.busy_cores
    reason = (
        f"one process gives {_rate(each)}, and {wanted} {'keeps' if wanted == 1 else 'keep'} {needed:.1f} cores busy"
    )
    if needed <= free + IDLE:
        return f"Use worker.batches(..., loaders={wanted}): {reason}."
    return (
        f"loaders={wanted} would be enough: {reason}. But {free} of the host's {worker.cores} cores "
        f"{'is' if free == 1 else 'are'} free for each worker, so they slow its computing down. Make samples cheaper: "
        "prepare them once, and read what is prepared."
    )


def _rate(samples_per_s: float) -> str:
    return f"{count_text(samples_per_s)} samples/s"
