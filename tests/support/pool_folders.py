"""Pools for tests, as their users start them: on this machine, or on hosts that share its files."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from network_hosts import NamespaceHost
from paceline.monitor.status.status import status

__all__ = ["PACELINE", "PoolFolder", "is_over"]

SCRIPT = """
import argparse, os, time
import torch, paceline
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--fails-at", type=int, default=-1)
parser.add_argument("--step-s", type=float, default=0.0)
parser.add_argument("--seconds", type=float, default=0.1)  # of a step on one worker
options = parser.parse_args()


def train(worker):
    print("sees GPUs", os.environ.get("CUDA_VISIBLE_DEVICES"))
    torch.manual_seed(0)
    model = worker.prepare(nn.Linear(8, 3))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    step = worker.stepper(model, optim, F.cross_entropy)
    data = TensorDataset(torch.randn(16 * options.steps, 8), torch.arange(16 * options.steps) % 3)
    for batch in worker.batches(data):
        time.sleep(options.step_s or options.seconds / worker.workers)
        if worker.step == options.fails_at:
            raise RuntimeError("its data is broken")
        step(batch)


if __name__ == "__main__":
    paceline.run(train, plan="replicas=1-2+batch(size=16)")
"""
PACELINE = [sys.executable, "-m", "paceline"]


class PoolFolder:
    """A folder with the script and a pool, and what its user types there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "train.py").write_text(SCRIPT)

    @contextlib.contextmanager
    def served(
        self, *words: str, host: NamespaceHost | None = None, command: Sequence[str] = PACELINE
    ) -> Iterator[subprocess.Popen[str]]:
        """Serve it meanwhile; whatever happens, its process and its runs are gone afterwards."""
        prefix = [] if host is None else host.prefix
        serving = subprocess.Popen(
            [*prefix, *command, "pool", "pool", "--slots", "2", *words],
            cwd=self.folder,
            stdout=(self.folder / "pool.out").open("a"),
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield serving
        finally:
            serving.terminate()
            serving.wait(90)

    def queue(self, name: str, *words: str, replicas: str | None = None, options: tuple[str, ...] = ()) -> None:
        if replicas is not None:
            options = ("--plan", f"replicas={replicas}+batch(size=16)", *options)
        done = subprocess.run(
            [*PACELINE, "run", "--pool", "pool", "--detach", "--run-dir", f"runs/{name}", *options, "train.py", *words],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert f"queued in pool as {name}" in done.stdout

    def facts(self) -> dict[str, Any]:
        try:
            return json.loads((self.folder / "pool" / "pool.json").read_text())
        except FileNotFoundError:
            return {"runs": {}}

    def entry(self, name: str) -> dict[str, Any]:
        return self.facts()["runs"].get(name, {"phase": "", "replicas": 0, "step": 0, "batch": 0, "parts": {}})

    def nodes(self) -> dict[str, str]:
        """The nodes that it has, each with its state."""
        return {name: node["state"] for name, node in self.facts().get("nodes", {}).items()}

    def shares(self, name: str) -> dict[str, int]:
        """The replicas that a run has on each node, and those that leave."""
        return {node: part["replicas"] for node, part in self.entry(name)["parts"].items()}

    def workers_on(self, name: str) -> dict[str, int]:
        """The workers of a run that have taken a step, and go on, by the names of their hosts."""
        try:
            workers = status(self.folder / "runs" / name).workers
        except ValueError:
            return {}
        return dict(Counter(one.host for one in workers if one.state == "running" and one.idle is not None))

    def until_later(self, name: str, steps: int) -> None:
        """Return when a run has taken so many more steps."""
        step = len(self.losses(name))
        self.until(lambda: len(self.losses(name)) >= step + steps, what=f"{name} at step {step + steps}")

    def until(self, is_so: Any, *, what: str, limit_s: float = 60.0) -> None:
        deadline = time.monotonic() + limit_s
        while not is_so():
            assert time.monotonic() < deadline, f"not {what}: {self.facts()}\n{self.said}"
            time.sleep(0.1)

    @property
    def said(self) -> str:
        return (self.folder / "pool.out").read_text()

    def losses(self, name: str) -> list[float]:
        rows = (self.folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(row)["loss"] for row in rows]


def is_over(pool: PoolFolder, *names: str) -> bool:
    return all(pool.entry(name)["phase"] in ("finished", "failed", "stopped") for name in names)
