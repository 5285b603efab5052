"""`paceline ui` beside a real run: a commit is on the page soon, and the command ends at once."""

from __future__ import annotations

import http.client
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from live_server import ServedPage, messages, serve
from synthetic_runs import SyntheticRun

TRAIN = """
import time
import paceline, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

def train(worker):
    model = worker.prepare(nn.Linear(8, 1))
    optimizer = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    step = worker.stepper(model, optimizer, F.mse_loss)
    x = torch.randn(64, 8)
    data = TensorDataset(x, x[:, :1])
    for batch in worker.batches(data, epochs=500):
        loss = step(batch)
        worker.report(loss=loss, pace=2.0)
        time.sleep(0.1)

if __name__ == "__main__":
    paceline.run(train)
"""
SOON_S = 10.0  # far more than the second that is promised: other tests use the cores, too


@pytest.mark.thorough
def test_a_commit_of_a_real_run_is_on_the_page_soon_and_so_is_its_end(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "runs").mkdir()
    command = [sys.executable, "-m", "paceline", "run", "train.py", "--workers", "1", "--run-dir", "runs/live"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        try:
            with serve(tmp_path / "runs") as page:
                _follow(tmp_path / "runs/live", page, run)
        finally:
            if run.poll() is None:
                run.terminate()


def _follow(run_dir: Path, page: ServedPage, run: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not (run_dir / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    delays: list[float] = []
    state: dict[str, Any] = {}
    for message in messages(page.address, "/api/run/stream?run=live", limit_s=60):
        state |= message
        new = message.get("curves", {}).get("series", {}).get("time", {"points": []})["points"]
        if new and any("phase" in worker for worker in state.get("workers", [])):
            delays.append(time.time() - new[-1][2])
        if len(delays) == 5:
            break
    assert min(delays) < SOON_S, delays
    assert state["summary"]["state"] == "running"
    assert "metric/pace" in state["curves"]["series"]
    run.send_signal(signal.SIGTERM)
    assert run.wait(60) == 75
    for message in messages(page.address, "/api/run/stream?run=live", limit_s=60):
        if message.get("summary", {}).get("state") == "stopped":
            return
    pytest.fail("the page does not say that the run has stopped")


@pytest.mark.thorough
def test_ctrl_c_ends_the_command_at_once_with_pages_connected(tmp_path: Path) -> None:
    SyntheticRun(path=tmp_path / "runs/one", steps=20).write()
    with serve(tmp_path / "runs") as page:
        streams = [messages(page.address, path, limit_s=20) for path in ("/api/runs/stream", "/api/run/stream?run=one")]
        assert [next(stream) for stream in streams]
        place = urlsplit(page.address)
        idle = socket.create_connection((place.hostname or "", place.port or 0), timeout=5)  # it says nothing
        took_s = page.interrupt()
        idle.close()
        for stream in streams:
            stream.close()
        assert page.process.returncode == 130 and took_s < 5, took_s
        assert page.process.stdout is not None and "Traceback" not in page.process.stdout.read()


@pytest.mark.thorough
def test_a_port_that_is_taken_is_named_and_the_default_one_is_replaced(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        words = [sys.executable, "-m", "paceline", "ui", str(tmp_path), "--port", port]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"cannot be served on 127.0.0.1:{port}: Address already in use" in done.stderr and "--port" in done.stderr


@pytest.mark.thorough
def test_with_a_token_the_printed_address_opens_the_page(tmp_path: Path) -> None:
    with serve(tmp_path, "--token") as page:
        place = urlsplit(page.address)
        assert place.query.startswith("token=")
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=10)
        connection.request("GET", "/")
        refused = connection.getresponse()
        assert refused.status == 401 and b"token" in refused.read()
        connection.request("GET", f"/?{place.query}")
        entered = connection.getresponse()
        entered.read()
        assert entered.status == 303
        connection.request("GET", "/", headers={"cookie": str(entered.headers["set-cookie"]).partition(";")[0]})
        assert connection.getresponse().status == 200
        connection.close()
