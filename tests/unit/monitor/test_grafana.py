"""The dashboard and the alert rules that come with the package name series that a run serves."""

from __future__ import annotations

import json
import re
from importlib import resources
from typing import Any

import yaml
from prometheus_client import Counter, Gauge, Summary

from paceline.monitor.export import prometheus

FOLDER = resources.files("paceline.monitor.export") / "grafana"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "paceline-dashboard.json").read_text())
RULES: list[dict[str, Any]] = yaml.safe_load((FOLDER / "paceline-alerts.yml").read_text())["groups"][0]["rules"]
SUFFIXES = {Counter: ("_total",), Summary: ("_sum", "_count"), Gauge: ("",)}


def queries() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def served() -> set[str]:
    """The series that the endpoint's metrics have, by the calls that make them."""
    source = (resources.files("paceline.monitor.export") / "prometheus.py").read_text()
    made = re.findall(r"\b(Counter|Gauge|Summary)\(\s*\"(paceline_\w+)\"", source)
    kinds = {kind.__name__: kind for kind in SUFFIXES}
    return {name + suffix for kind, name in made for suffix in SUFFIXES[kinds[kind]]}


def test_every_query_and_rule_names_series_that_exist() -> None:
    names = served()
    assert {"paceline_steps_total", "paceline_loss", "paceline_step_seconds_sum"} <= names
    for text in [*queries(), *(rule["expr"] for rule in RULES)]:
        used = set(re.findall(r"\bpaceline_\w+", text))
        assert used and used <= names, text


def test_the_dashboard_shows_every_series_of_the_endpoint() -> None:
    shown = {name for text in queries() for name in re.findall(r"\bpaceline_\w+", text)}
    assert served() - shown == {"paceline_step_seconds_count"}  # the steps are counted by themselves


def test_panels_have_places_of_their_own_and_read_the_chosen_data_source() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_every_rule_says_what_to_do() -> None:
    for rule in RULES:
        assert rule["alert"].startswith("Paceline") and rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}


def test_the_endpoint_serves_no_created_series() -> None:
    from urllib.request import urlopen

    endpoint = prometheus.PrometheusEndpoint("127.0.0.1", 0, workers=2)
    try:
        with urlopen(endpoint.url, timeout=10) as answer:
            text = answer.read().decode()
    finally:
        endpoint.close()
    assert "paceline_steps_total 0.0" in text and "_created" not in text
