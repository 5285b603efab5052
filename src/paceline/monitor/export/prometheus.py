"""Serves an attempt's state to Prometheus: base units, `_total` and `_seconds` names, no label that grows with the run.

One thread answers scrapes (`scrape_server`); the reader of the run's events sets the numbers. It listens on loopback
unless the job says otherwise, and it serves nothing but these numbers.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Collection

from prometheus_client import CollectorRegistry, Counter, Gauge, Summary

from paceline.events import (
    CheckpointFailed,
    CheckpointSaved,
    Evaluated,
    Record,
    UploadDone,
    UploadFailed,
    WorkerStarted,
)
from paceline.monitor.export.scrape_server import ScrapeServer
from paceline.monitor.records.steps import Step, parts_of

__all__ = ["PrometheusEndpoint"]

IDLE_STEPS = 20  # over about so many an idle share is smoothed


class PrometheusEndpoint:
    """Listens on `host:port` (0: any free port) until `close()`; `url` says where. Raises LaunchError if it cannot."""

    def __init__(self, host: str, port: int, *, workers: int) -> None:
        self._registry = registry = CollectorRegistry()
        self._steps = Counter("paceline_steps", "Committed steps of this attempt.", registry=registry)
        about = "Number of the last committed step, over all attempts."
        self._step_number = Gauge("paceline_last_step", about, registry=registry)
        about = "Steps that no worker took because gradients were not finite."
        self._skipped = Counter("paceline_skipped_steps", about, registry=registry)
        self._samples = Counter("paceline_samples", "Samples used in committed steps.", registry=registry)
        about = "Bytes that the workers of this host sent to others."
        self._sent = Counter("paceline_sent_bytes", about, registry=registry)
        about = "Of these, bytes of gradients between replicas."
        self._wire = Counter("paceline_wire_bytes", about, registry=registry)
        about = "What the gradients between replicas would have been without a codec."
        self._raw = Counter("paceline_raw_bytes", about, registry=registry)
        about = "Seconds between two commits, mean over workers, by phase; the phases add up to the whole."
        self._seconds = Summary("paceline_step_seconds", about, ["phase"], registry=registry)
        about = "Seconds of a checkpoint, by part: stall (training stood still), write and upload (in the background)."
        self._checkpoint = Summary("paceline_checkpoint_seconds", about, ["part"], registry=registry)
        self._checkpoint_bytes = Gauge("paceline_checkpoint_bytes", "Size of the newest checkpoint.", registry=registry)
        self._failures = Counter("paceline_checkpoint_failures", "Checkpoints that failed.", registry=registry)
        about = "What was sent to the run's remote_dir."
        self._uploaded_bytes = Counter("paceline_uploaded_bytes", about, registry=registry)
        about = "Checkpoints that could not be sent to the run's remote_dir, each time."
        self._upload_failures = Counter("paceline_upload_failures", about, registry=registry)
        self._loss = Gauge("paceline_loss", "Loss of the last step, over its global batch.", registry=registry)
        self._noise: Gauge | None = None  # once it is known
        about = "Last value of a reported metric, mean over the workers that reported it; and of lr and grad_norm."
        self._metric = Gauge("paceline_metric", about, ["name"], registry=registry)
        about = "Last evaluation, exact over all workers, by measure."
        self._evaluation = Gauge("paceline_evaluation", about, ["name"], registry=registry)
        self._epoch = Gauge("paceline_epoch", "Epoch of the last step, counted from 0.", registry=registry)
        about = "When the last step was committed, in seconds since 1970."
        self._commit_time = Gauge("paceline_last_commit_timestamp_seconds", about, registry=registry)
        about = "Seconds from the command until the slowest worker of this host was ready."
        self._startup = Gauge("paceline_startup_seconds", about, registry=registry)
        self._workers = _WorkerMetrics(registry)
        self._workers.follow(range(workers))
        self._server = ScrapeServer(host, port, registry)
        self.url = _url(host, self._server.port)

    def accept(self, item: Record | Step) -> None:
        if isinstance(item, Step):
            self._step(item)
            return
        match item.event:
            case Evaluated(metrics=metrics):
                for name, value in metrics.items():
                    self._evaluation.labels(name).set(value)
            case CheckpointSaved(num_bytes=num_bytes, stall_s=stall_s, write_s=write_s):
                self._checkpoint_bytes.set(num_bytes)
                self._checkpoint.labels("stall").observe(stall_s)
                self._checkpoint.labels("write").observe(write_s)
            case CheckpointFailed():
                self._failures.inc()
            case UploadDone(num_sent_bytes=sent, upload_s=upload_s):
                self._uploaded_bytes.inc(sent)
                self._checkpoint.labels("upload").observe(upload_s)
            case UploadFailed():
                self._upload_failures.inc()
            case WorkerStarted(rank=worker, startup_s=startup_s):
                if self._workers.started(worker, startup_s):
                    so_far = self._registry.get_sample_value("paceline_startup_seconds") or 0.0
                    self._startup.set(max(startup_s, so_far))
            case _:
                pass

    def follow(self, workers: Collection[int]) -> None:
        """These take part now, on all hosts."""
        self._workers.follow(workers)

    def close(self) -> None:
        """Stop listening; scrapes under way are cut."""
        self._server.close()

    def _step(self, row: Step) -> None:
        self._steps.inc()
        self._step_number.set(row.step)
        self._skipped.inc(row.skipped)
        self._samples.inc(row.num_samples)
        self._sent.inc(row.num_bytes_sent)
        self._wire.inc(row.num_wire_bytes)
        self._raw.inc(row.num_raw_bytes)
        self._epoch.set(row.epoch)
        self._commit_time.set(row.time)
        if row.loss is not None:
            self._loss.set(row.loss)
        if row.noise_scale is not None:
            about = "Gradient noise scale, in samples: larger batches pay up to about that size."
            self._noise = self._noise or Gauge("paceline_noise_scale", about, registry=self._registry)
            self._noise.set(row.noise_scale)
        for phase, seconds in parts_of(row.seconds).items():
            self._seconds.labels(phase).observe(seconds)
        for name, value in row.measured.items():
            self._metric.labels(name).set(value)
        self._workers.step(row)


class _WorkerMetrics:
    """The metrics of each worker that takes part; those of a worker that left are removed."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._num = Gauge("paceline_workers", "Workers that take part now, on all hosts.", registry=registry)
        about = "Seconds in which a worker waited for the others; over its step seconds: its idle share."
        self._waited = Counter("paceline_worker_waiting_seconds", about, ["worker"], registry=registry)
        about = "Seconds between the commits of a worker."
        self._took = Counter("paceline_worker_step_seconds", about, ["worker"], registry=registry)
        about = f"Share of its time in which a worker waited for the others, over about the last {IDLE_STEPS} steps."
        self._idle = Gauge("paceline_worker_idle_ratio", about, ["worker"], registry=registry)
        about = "Seconds until a worker was ready: from the command, or from its own start where it came later."
        self._startup = Gauge("paceline_worker_startup_seconds", about, ["worker"], registry=registry)
        self._members: frozenset[int] = frozenset()
        self._shares: dict[int, float] = {}
        self._startup_s: dict[int, float] = {}  # of the process that holds the place, or is about to

    def follow(self, workers: Collection[int]) -> None:
        gone = self._members - frozenset(workers)
        self._members = frozenset(workers)
        self._num.set(len(self._members))
        for worker in gone:
            self._shares.pop(worker, None)
            for metric in (self._waited, self._took, self._idle, self._startup):
                with contextlib.suppress(KeyError):  # older versions of prometheus_client raise it
                    metric.remove(str(worker))
        for worker in self._members & self._startup_s.keys():
            self._startup.labels(str(worker)).set(self._startup_s[worker])

    def started(self, worker: int, startup_s: float) -> bool:
        """Note how long a worker took; returns whether it is its place's first, and so part of the run's start."""
        is_first = worker in self._members and worker not in self._startup_s
        self._startup_s[worker] = startup_s
        if worker in self._members:
            self._startup.labels(str(worker)).set(startup_s)
        return is_first

    def step(self, row: Step) -> None:
        for worker, seconds in row.took_s.items():
            if worker not in self._members or seconds <= 0:
                continue
            waited_s = row.waited_s.get(worker, 0.0)
            self._waited.labels(str(worker)).inc(waited_s)
            self._took.labels(str(worker)).inc(seconds)
            share = min(1.0, waited_s / seconds)
            before = self._shares.get(worker, share)
            self._shares[worker] = share = before + (share - before) / IDLE_STEPS
            self._idle.labels(str(worker)).set(share)


def _url(host: str, port: int) -> str:
    if host in ("", "0.0.0.0", "::"):  # every address: name the one by which others know this host
        host = socket.gethostname()
    return f"http://[{host}]:{port}/metrics" if ":" in host else f"http://{host}:{port}/metrics"
