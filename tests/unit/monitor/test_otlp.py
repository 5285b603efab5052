"""A run's spans reach a collector over HTTP, and a file as OTLP's JSON."""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from paceline.cli.main import main
from paceline.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    EventLog,
    RunFinished,
    RunStarted,
    StepDone,
    WorkerLost,
    WorkerStarted,
)
from paceline.monitor.records.run_record import RunRecord
from paceline.monitor.report import otlp
from paceline.monitor.report.attempt_log import read_attempts
from paceline.monitor.report.run_spans import run_spans

SECONDS = {"data": 0.1, "compute": 0.5, "communication": 0.2, "optimizer": 0.1, "total": 1.0}
STEPS = 3


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two workers and three steps, with an evaluation, a checkpoint, and a worker that is lost in the end."""
    directory = tmp_path / "digits"
    record = RunRecord.begin_attempt(directory, job={}, workers=2, plan="replicas=2")
    saved = CheckpointSaved(step=2, path="p", num_bytes=7, stall_s=0.1, write_s=0.2)
    between: list[Event] = [Evaluated(step=2, num_samples=5, metrics={"accuracy": 0.5}, duration_s=0.5), saved]
    supervisor: list[Event] = [
        RunStarted(run_dir=str(directory), attempt=1, workers=2, hosts=1, program="t.py", launcher="local"),
        WorkerLost(rank=1, host="a", step=3, reason="killed by signal 9"),
        RunFinished(state="failed", exit_code=1, duration_s=9.0),
    ]
    for worker in (None, 0, 1):
        place = directory / "attempt_1" / ("" if worker is None else f"worker_{worker}")
        place.mkdir(parents=True, exist_ok=True)
        log = EventLog(place / "events.jsonl", worker=worker)
        for event in supervisor if worker is None else events_of(worker, between):
            log.emit(event)
        log.close()
    record.end_attempt("failed", 1)
    return directory


def events_of(worker: int, between: list[Event]) -> list[Event]:
    begin = WorkerStarted(
        rank=worker, workers=2, host="a", pid=100 + worker, device="cpu", startup_s=1.0, plan="replicas=2",
        resumed_from_step=0,
    )  # fmt: skip
    steps = [
        StepDone(step=step, epoch=0, num_samples=8, loss=1.0, metrics={}, seconds=SECONDS)
        for step in range(1, STEPS + 1)
    ]
    return [begin, *steps, *(between if worker == 0 else [])]


class Collector:
    """Takes OTLP over HTTP, and decodes it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.paths: list[str] = []
        self.spans: list[tuple[dict[str, Any], Any]] = []  # attributes of the resource, span

    def named(self, name: str) -> list[tuple[dict[str, Any], Any]]:
        return [(resource, span) for resource, span in self.spans if span.name == name]


def values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@contextlib.contextmanager
def collector(status: int = 200) -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            message: Any = ExportTraceServiceRequest()
            message.ParseFromString(body)
            there.paths.append(self.path)
            there.spans += [
                (values(group.resource.attributes), span)
                for group in message.resource_spans
                for scope in group.scope_spans
                for span in scope.spans
            ]
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    there = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield there
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_collector_gets_run_attempt_workers_steps_and_parts_below_each_other(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with collector() as there:
        assert main(["trace", str(run), "--otlp", there.url]) == 0
    assert set(there.paths) == {"/v1/traces"}
    by_id = {span.span_id: span for _, span in there.spans}
    assert len(by_id) == len(there.spans) and len({span.trace_id for _, span in there.spans}) == 1

    def above(span: Any) -> list[str]:
        parent = by_id.get(span.parent_span_id)
        return [] if parent is None else [parent.name, *above(parent)]

    steps = there.named("step")
    assert len(steps) == 2 * STEPS
    assert {tuple(above(span)) for _, span in steps} == {
        (f"worker {worker}", "attempt 1", "run digits") for worker in (0, 1)
    }
    resource, step = steps[-1]
    assert resource["service.name"] == "paceline" and resource["service.instance.id"] == "worker 1"
    assert (resource["process.pid"], resource["host.name"], resource["paceline.plan"]) == (101, "a", "replicas=2")
    assert step.end_time_unix_nano - step.start_time_unix_nano == pytest.approx(1e9, rel=1e-6)
    parts = [span for _, span in there.spans if span.parent_span_id == step.span_id]
    assert [part.name for part in parts] == ["data", "compute", "communication", "optimizer", "other"]
    assert parts[0].start_time_unix_nano == step.start_time_unix_nano
    assert parts[-1].end_time_unix_nano == pytest.approx(step.end_time_unix_nano, abs=1000)
    ((_, evaluation),) = there.named("evaluation")
    assert values(evaluation.attributes)["paceline.eval.accuracy"] == 0.5 and above(evaluation)[0] == "worker 0"
    ((_, saved),) = there.named("checkpoint")
    assert values(saved.attributes)["paceline.bytes"] == 7
    ((_, lost),) = there.named("WorkerLost")
    assert lost.status.code == 2 and lost.status.message == "killed by signal 9" and above(lost)[0] == "attempt 1"
    assert f"{len(there.spans)} spans sent to {there.url}/v1/traces" in capsys.readouterr().out


def test_the_file_has_the_same_spans_with_hexadecimal_identifiers(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "AT_ONCE", 10)
    path = tmp_path / "spans.jsonl"
    assert main(["trace", str(run), "--otlp", str(path)]) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) > 1
    found = [
        span
        for line in lines
        for group in line["resourceSpans"]
        for one in group["scopeSpans"]
        for span in one["spans"]
    ]
    record = RunRecord.load(run)
    expected = list(run_spans(record, read_attempts(record), steps=100))
    assert {(span["traceId"], span["spanId"]) for span in found} == {
        (f"{span.trace_id:032x}", f"{span.span_id:016x}") for span in expected
    }, "the same when they are made again"
    assert all(span.get("parentSpanId", "") != "" or span["name"] == "run digits" for span in found)


def test_only_the_newest_steps_are_sent(run: Path) -> None:
    with collector() as there:
        assert main(["trace", str(run), "--otlp", there.url, "--steps", "1"]) == 0
    assert {values(span.attributes)["paceline.step"] for _, span in there.named("step")} == {STEPS}


def test_a_collector_that_refuses_is_reported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with collector(status=400) as there:
        assert main(["trace", str(run), "--otlp", f"{there.url}/v1/traces"]) == 1
    assert "did not take the spans" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--otlp", "grpc://a:4317"], "--otlp is 'grpc://a:4317'; it must be http://HOST:PORT"),
        (["--otlp", "x.jsonl", "--out", "y.json"], "--otlp and --out are two forms of one timeline"),
    ],
)
def test_a_wrong_address_is_refused(run: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    assert main(["trace", str(run), *words]) == 2
    assert says in capsys.readouterr().err


def test_a_missing_package_is_refused_with_the_command_that_installs_it(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["trace", str(run), "--otlp", "x.jsonl"]) == 2
    assert "pip install 'paceline[otel]'" in capsys.readouterr().err
