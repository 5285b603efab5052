"""`paceline trace RUN --otlp URL|FILE`: sends a run's spans to an OpenTelemetry collector, or writes them as JSON.

The file has one `ExportTraceServiceRequest` in a line, in OTLP's JSON encoding, where identifiers are hexadecimal. The
variables of the OpenTelemetry SDK count, such as OTEL_EXPORTER_OTLP_HEADERS.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from paceline.errors import PlanError, writing
from paceline.monitor.records.run_files import local_path
from paceline.monitor.records.run_record import RunRecord
from paceline.monitor.report.attempt_log import read_attempts
from paceline.monitor.report.run_spans import RunSpan, run_spans

__all__ = ["main_otlp"]

PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
AT_ONCE = 500  # spans of a request
TIMEOUT_S = 10.0  # of a request, with its repetitions
PATH = "/v1/traces"
NS = 1_000_000_000


def main_otlp(run_dir: Path, *others: Path, to: str, steps: int) -> int:
    """Send or write the newest `steps` steps of each worker; returns 0, 1 where a collector did not take them, or 2
    where there is no run or no step. Raises PlanError where the package is missing or the address is none.
    """
    _require_package()
    url = _url(to)
    try:
        record = RunRecord.load(run_dir)
    except ValueError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    spans = list(run_spans(record, read_attempts(record, others=others), steps=steps))
    if not any(span.name == "step" for span in spans):
        print(f"paceline: {run_dir} has no step yet: nothing can be shown.", file=sys.stderr)
        return 2
    if url is None:
        _write(Path(to), spans)
        print(f"trace  {local_path(Path(to))}: {len(spans)} spans, as lines of OTLP JSON")
        return 0
    if not _send(url, spans):
        print(f"paceline: {url} did not take the spans. Is a collector there, with OTLP over HTTP?", file=sys.stderr)
        return 1
    print(f"trace  {len(spans)} spans sent to {url}, trace {spans[0].trace_id:032x}")
    return 0


def _require_package() -> None:
    for name in PACKAGES:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # a package above it is missing
            found = None
        if found is None:
            raise PlanError(f"--otlp needs {name}, which this Python does not have: pip install 'paceline[otel]'.")


def _url(to: str) -> str | None:
    """The address of a collector, with OTLP's path where it has none; None where `to` is a file."""
    if "://" not in to:
        return None
    parts = urlsplit(to)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise PlanError(f"--otlp is {to!r}; it must be http://HOST:PORT or https://HOST:PORT, or the name of a file.")
    return to if parts.path.strip("/") else to.rstrip("/") + PATH


def _send(url: str, spans: Sequence[RunSpan]) -> bool:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import SpanExportResult

    exporter = OTLPSpanExporter(endpoint=url, timeout=TIMEOUT_S)
    try:
        return all(exporter.export(batch) is SpanExportResult.SUCCESS for batch in _batches(spans))
    finally:
        exporter.shutdown()


def _write(path: Path, spans: Sequence[RunSpan]) -> None:
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    with writing(path), path.open("w", encoding="utf-8") as file:
        for batch in _batches(spans):
            said = _with_hexadecimal(MessageToDict(encode_spans(batch)))
            file.write(json.dumps(said) + "\n")


def _with_hexadecimal(said: Any) -> Any:
    """Protocol buffers write bytes as base64; OTLP's JSON has hexadecimal identifiers."""
    if isinstance(said, list):
        return [_with_hexadecimal(each) for each in said]
    if not isinstance(said, dict):
        return said
    ids = ("traceId", "spanId", "parentSpanId")
    return {
        name: base64.b64decode(value).hex() if name in ids else _with_hexadecimal(value) for name, value in said.items()
    }


def _batches(spans: Sequence[RunSpan]) -> Iterator[list[Any]]:
    resources: dict[tuple[tuple[str, object], ...], Any] = {}
    for first in range(0, len(spans), AT_ONCE):
        yield [_readable(span, _resource(span.resource, resources)) for span in spans[first : first + AT_ONCE]]


def _resource(said: Mapping[str, Any], known: dict[tuple[tuple[str, object], ...], Any]) -> Any:
    from opentelemetry.sdk.resources import Resource

    key = tuple(said.items())
    if key not in known:
        known[key] = Resource(dict(said))
    return known[key]


def _readable(span: RunSpan, resource: Any) -> Any:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    def context(number: int) -> SpanContext:
        return SpanContext(span.trace_id, number, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    return ReadableSpan(
        name=span.name,
        context=context(span.span_id),
        parent=None if span.parent_id is None else context(span.parent_id),
        resource=resource,
        attributes=span.attributes,
        kind=SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
        start_time=round(span.begin * NS),
        end_time=round(span.end * NS),
        instrumentation_scope=InstrumentationScope("paceline"),
    )
