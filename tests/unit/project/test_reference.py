"""The reference pages say what the code says: public names, commands, fields of plans, events and metrics."""

from __future__ import annotations

import argparse
import dataclasses
import re
import types
import typing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Counter, Gauge, Summary

import paceline
from paceline import config, events, plan, testing
from paceline.cli import main
from paceline.monitor.export import prometheus
from paceline.monitor.export.metrics_jsonl import metrics_line
from paceline.monitor.records.steps import Step

REFERENCE = Path(__file__).resolve().parent.parent.parent.parent / "docs" / "reference"
DIRECTIVE = re.compile(r"^\.\. auto\w+:: paceline\.(\S+)$", re.MULTILINE)
PARTS = [getattr(plan, name) for name in paceline.__all__ if hasattr(plan, name) and name not in ("Plan", "Job")]
EVENTS = [getattr(events, name) for name in events.__all__ if name in events.Event.kinds]


def page(name: str) -> str:
    return (REFERENCE / name).read_text()


def section(text: str, heading: str) -> str:
    """What stands below a heading, until the next one of any level."""
    found = re.search(rf"^#+ {re.escape(heading)}(?: \([^\n]*\))?\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"no heading {heading!r}"
    return found[1]


def cells(text: str) -> list[list[str]]:
    """The rows of a page's tables, without their heads."""
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def test_every_public_name_has_one_entry() -> None:
    entries = [name for path in REFERENCE.glob("api-*.md") for name in DIRECTIVE.findall(path.read_text())]
    assert sorted(name for name in entries if "." not in name) == sorted(paceline.__all__)
    of_testing = page("api-testing.md")
    assert all(f"testing.{name}" in entries or f"`{name}`" in of_testing for name in testing.__all__)


def commands() -> dict[str, argparse.ArgumentParser]:
    return dict(main._parser()[1].choices)


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_option_of_a_command_is_explained(name: str) -> None:
    def row(action: argparse.Action) -> list[str]:
        value = action.metavar or action.dest.upper()
        names = ", ".join(action.option_strings)
        shown = " ".join(filter(None, [names, "" if names and action.nargs == 0 else str(value)]))
        return [f"`{shown}`".replace("|", r"\|"), (action.help or "").replace("|", r"\|").replace("\n", " ")]

    expected = [row(action) for action in commands()[name]._actions if action.dest != "help"]
    assert cells(section(page("cli.md"), f"paceline {name}")) == expected


def test_every_command_is_listed() -> None:
    assert re.findall(r"^## paceline (\w+)$", page("cli.md"), re.MULTILINE) == list(commands())


def shown(annotation: Any) -> str:
    """A type as the plan's page writes it."""
    if annotation is types.NoneType:
        return "None"
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(map(str, arguments))
    if typing.get_origin(annotation) is tuple:
        return f"({shown(arguments[0])}, ...)"
    return " or ".join(map(shown, arguments)) if arguments else str(annotation.__name__)


@pytest.mark.parametrize("part", [plan.Plan, *PARTS], ids=lambda part: str(part.__name__))
def test_every_field_of_a_plan_is_explained(part: type[Any]) -> None:
    types_of = config.annotations_of(part)
    expected: list[tuple[str, str, str]] = []
    for field in dataclasses.fields(part):
        default = "required" if field.default is dataclasses.MISSING else str(field.default)
        if isinstance(field.default_factory, type):
            default = f"{field.default_factory.__name__}()"
        expected.append((f"`{field.name}`", shown(types_of[field.name]), default))
    heading = "The six parts of a plan" if part is plan.Plan else part.__name__
    rows = cells(section(page("plan-language.md"), heading))
    assert [tuple(row[:3]) for row in rows] == expected
    assert all(row[3] for row in rows)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: str(event.__name__))
def test_every_field_of_an_event_is_explained(event: type[Any]) -> None:
    rows = cells(section(page("events-and-metrics.md"), event.__name__))
    types_of = {field.name: str(field.type).replace("|", "or") for field in dataclasses.fields(event)}
    assert {row[0].strip("`"): row[1] for row in rows} == types_of
    assert all(row[2] for row in rows)


def test_every_prometheus_metric_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, tuple[str, str]] = {}

    def noting(kind: type[Counter | Gauge | Summary]) -> Any:
        def make(name: str, about: str, labels: Any = (), **options: Any) -> Any:
            ending = {Counter: "_total", Summary: "_sum`, `" + name + "_count"}.get(kind, "")
            made[f"`{name}{ending}`"] = (kind.__name__.lower(), ", ".join(f"`{label}`" for label in labels))
            return kind(name, about, labels, **options)

        return make

    for kind in (Counter, Gauge, Summary):
        monkeypatch.setattr(prometheus, kind.__name__, noting(kind))
    endpoint = prometheus.PrometheusEndpoint("127.0.0.1", 0, workers=1)
    endpoint.accept(step_row(noise_scale=100.0))
    endpoint.close()
    rows = cells(section(page("events-and-metrics.md"), "Prometheus"))
    assert {row[0]: (row[1], row[2]) for row in rows} == made


def test_every_key_of_a_line_of_metrics_is_listed() -> None:
    row = step_row(
        noise_scale=100.0,
        num_dropped=1,
        num_wire_bytes=1,
        num_raw_bytes=2,
        optimizer={"lr": 1, "lr/1": 2, "grad_norm": 3, "loss_scale": 4, "overflows": 5},
    )
    listed = [cell[0].strip("`") for cell in cells(section(page("events-and-metrics.md"), "metrics.jsonl"))]
    assert listed == list(metrics_line(row, attempt=1))


def step_row(**fields: Any) -> Step:
    known: dict[str, Any] = {"step": 1, "epoch": 0, "time": 1.0, "num_samples": 8, "loss": 1.0, "metrics": {}}
    known |= {"seconds": {"total": 1.0}, "samples_per_s": 8.0, "skipped": False, "num_bytes_sent": 0, "workers": (0,)}
    known |= {"num_wire_bytes": 0, "num_raw_bytes": 0, "waited_s": {}, "took_s": {0: 1.0}, "noise_scale": None}
    everything: dict[str, Any] = {"num_dropped": 0} | known | fields
    return Step(**everything)
