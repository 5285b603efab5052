"""A real Prometheus scrapes a run, evaluates every query of the dashboard and every alert rule, and fires alerts."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import psutil
import pytest
import yaml

from paceline.monitor.records.run_record import RunRecord
from programs import child_environment

FOLDER = Path(str(resources.files("paceline.monitor.export") / "grafana"))
RULES = FOLDER / "paceline-alerts.yml"
LIMIT_S = 60.0
T = TypeVar("T")
SCRIPT = """\
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset
import time, paceline

def train(worker):
    model = worker.prepare(torch.nn.Linear(4, 2))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    step = worker.stepper(model, optim, functional.cross_entropy)
    data = TensorDataset(torch.randn(4096, 4), torch.randint(2, (4096,)))
    for batch in worker.batches(data, epochs=1000):
        worker.report(loss=step(batch), lr=0.1)
        if worker.step == 5:
            worker.evaluate(model, data, {"loss": functional.cross_entropy})
            worker.save()
        time.sleep(0.02)

if __name__ == "__main__":
    paceline.run(train, workers=2)
"""


def wait_for(what: Callable[[], T | None], name: str) -> T:
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        with contextlib.suppress(URLError, ConnectionError, ValueError):
            if found := what():
                return found
        time.sleep(0.2)
    raise AssertionError(f"{name} did not come within {LIMIT_S:.0f} s")


@contextlib.contextmanager
def process(words: list[str], folder: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    with open(folder / f"{name}.log", "wb") as log:
        started = subprocess.Popen(words, cwd=folder, stdout=log, stderr=subprocess.STDOUT, env=child_environment())
    try:
        yield started
    finally:
        started.send_signal(signal.SIGTERM)
        try:
            started.wait(30)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


class Prometheus:
    """A server that scrapes one target; the rules' limits are seconds here."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **query: str) -> Any:
        with urlopen(f"{self.url}/api/v1/{path}?{urlencode(query)}", timeout=10) as answer:
            said = json.loads(answer.read())
        assert said["status"] == "success", said
        return said["data"]

    def query(self, expression: str) -> list[Any]:
        return self.get("query", query=expression)["result"]

    def rules(self) -> dict[str, dict[str, Any]]:
        return {rule["name"]: rule for group in self.get("rules")["groups"] for rule in group["rules"]}


def quick_rules(folder: Path) -> Path:
    """The rules with seconds for minutes."""
    text = re.sub(r"for: \d+m", "for: 1s", RULES.read_text()).replace("> 300", "> 3")
    path = folder / "alerts.yml"
    path.write_text(text)
    return path


@contextlib.contextmanager
def prometheus(folder: Path, target: str) -> Iterator[Prometheus]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(quick_rules(folder))],
        "scrape_configs": [{"job_name": "paceline", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    words = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    with process([*words, f"--web.listen-address=127.0.0.1:{port}"], folder, "prometheus"):
        server = Prometheus(f"http://127.0.0.1:{port}")
        wait_for(lambda: server.query("up"), "the first scrape")
        yield server


@pytest.mark.needs("promtool")
def test_promtool_accepts_the_rules() -> None:
    done = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "7 rules found" in done.stdout, done.stdout + done.stderr


@pytest.mark.needs("prometheus")
def test_prometheus_evaluates_every_query_and_rule_and_fires_where_a_run_stands_still(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    run = [sys.executable, "-m", "paceline", "run", "train.py", "--run-dir", "run", "--metrics-port", "0"]
    with process(run, tmp_path, "run"):
        url = wait_for(lambda: RunRecord.load(tmp_path / "run").metrics_url, "the endpoint")
        with prometheus(tmp_path, url.removeprefix("http://").removesuffix("/metrics")) as server:
            wait_for(lambda: server.query("paceline_evaluation and on() paceline_last_step > 20"), "an evaluation")
            wait_for(lambda: server.query("paceline_checkpoint_seconds_count > 0"), "a checkpoint")
            time.sleep(4.0)  # rates need several scrapes
            dashboard = json.loads((FOLDER / "paceline-dashboard.json").read_text())
            silent = set[str]()
            for panel in dashboard["panels"]:
                for target in panel["targets"]:
                    text = target["expr"].replace("$__rate_interval", "10s").replace('"$job"', '".*"')
                    if not server.query(text.replace('"$instance"', '".*"')):
                        silent.add(panel["title"])
            assert silent <= {"Gradient noise scale"}, "a panel without a series"
            assert not server.query('{__name__=~"paceline_.*_created"}')
            rules = server.rules()
            assert len(rules) == 7
            assert {rule["health"] for rule in rules.values()} == {"ok"}, rules
            assert rules["PacelineRunDoesNotMove"]["state"] == "inactive"

            workers = psutil.Process(RunRecord.load(tmp_path / "run").pid).children(recursive=True)
            for worker in workers:
                worker.suspend()
            try:
                wait_for(lambda: server.rules()["PacelineRunDoesNotMove"]["state"] == "firing" or None, "the alert")
            finally:
                for worker in workers:
                    worker.resume()
            wait_for(
                lambda: server.rules()["PacelineRunDoesNotMove"]["state"] == "inactive" or None, "the end of the alert"
            )
