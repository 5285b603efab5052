"""TensorFlow's own program of two workers: what being started and watched by Paceline costs it. The same program is
started by hand, too, with its TF_CONFIG: seconds to the first step, of a step, and of the whole run.

Needs TensorFlow: `make test-tensorflow` makes an environment that has it.

    .venv-tensorflow/bin/python benchmarks/compat_tensorflow.py [--pairs 5] [--steps 200]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from driving.options import options_of
from driving.progress import doing

PROGRAM = Path(__file__).parent / "programs" / "tensorflow_loop.py"
LIMIT_S = 600.0
MEASURES = ("to the first step", "a step", "the whole run")


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def by_hand(out: Path, steps: int) -> list[subprocess.Popen[bytes]]:
    """Start the two workers as TensorFlow's guide says: each with its own TF_CONFIG."""
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(2)]}
    threads = str(max(1, (os.cpu_count() or 1) // 2))  # the share that Paceline gives them, too
    return [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(out), str(steps)],
            env={
                **os.environ,
                "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}}),
                "TF_NUM_INTRAOP_THREADS": threads,
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for index in range(2)
    ]


def by_paceline(out: Path, steps: int, run_dir: Path) -> list[subprocess.Popen[bytes]]:
    words = ["-m", "paceline", "run", "--for", "tensorflow", str(PROGRAM), "--workers", "2", "--run-dir", str(run_dir)]
    return [
        subprocess.Popen(
            [sys.executable, *words, "--", str(out), str(steps)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    ]


def measured(starter: str, steps: int) -> tuple[float, float, float]:
    """Seconds of MEASURES."""
    doing(f"two workers, started by {starter}")
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "told.json"
        began = time.time()
        started = by_hand(out, steps) if starter == "hand" else by_paceline(out, steps, Path(scratch) / "run")
        try:
            codes = [process.wait(LIMIT_S) for process in started]
        finally:
            for process in started:
                process.kill()
        took = time.time() - began
        if any(codes) or not out.exists():
            raise SystemExit(f"started by {starter}, the program failed: exit codes {codes}")
        told = json.loads(out.read_text())
        return told["first"] - began, told["step_s"], took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    options = options_of(parser, takes="about 5 minutes", quick={"pairs": 1, "steps": 30})
    if importlib.util.find_spec("tensorflow") is None:
        print("nothing is measured: this Python has no TensorFlow (make test-tensorflow makes one that has)")
        return
    rows: list[dict[str, tuple[float, float, float]]] = []
    for pair in range(options.pairs):
        order = ["hand", "paceline"] if pair % 2 == 0 else ["paceline", "hand"]
        rows.append({starter: measured(starter, options.steps) for starter in order})
    print("| seconds | started by hand | by Paceline | Paceline / by hand |\n|---|---|---|---|")
    for place, name in enumerate(MEASURES):
        ours = statistics.median(row["paceline"][place] for row in rows)
        theirs = statistics.median(row["hand"][place] for row in rows)
        print(f"| {name} | {theirs:.4g} | {ours:.4g} | **{ours / theirs:.2f}x** |")


if __name__ == "__main__":
    main()
