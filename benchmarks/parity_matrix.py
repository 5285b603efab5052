"""Every layout against one process, for ordinary models: the largest relative differences, by `paceline parity`.

    python benchmarks/parity_matrix.py [--models gpt2,llama,...] [--workers 2,4] [--steps 20]

The models are those of examples/models.py. A layout that a model refuses is a row with the reason.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "models.py"
MODELS = "gpt2,llama,bert,t5,vit,mixtral,resnet,transformer,mlp"
BATCH = "batch(size=16,micro=2)"
LAYOUTS = {  # by number of workers
    1: ["replicas=1"],
    2: ["replicas=2", "shard=2+zero=1", "shard=2+zero=2", "shard=2", "tensor=2", "stages=2", "context=2"],
    4: [
        "replicas=4",
        "shard=4",
        "replicas=2+shard=2",
        "tensor=4",
        "replicas=2+tensor=2",
        "shard=2+tensor=2",
        "stages=4",
        "replicas=2+stages=2",
        "context=4",
        "replicas=2+context=2",
    ],
}


def judged(model: str, workers: int, layout: str, steps: int) -> str:
    """The two figures of a cell, or why there is none."""
    words = ["-m", "paceline", "parity", str(SCRIPT), model, "--workers", str(workers), "--steps", str(steps)]
    plan = layout.removeprefix("replicas=1").removeprefix("replicas=2+").removeprefix("replicas=2")
    plan = plan.removeprefix("replicas=4").strip("+")
    command = [sys.executable, *words, "--plan", f"{plan}+{BATCH}" if plan else BATCH, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if not done.stdout.strip():
        lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("parity:")]
        return f"refused: {' '.join(lines)[:160]}"
    (row,) = json.loads(done.stdout)["configurations"]
    return f"{row['loss']['value']:.0e}, {row['first_gradients']['value']:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--workers", default="1,2,4")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    models = options.models.split(",")
    print(f"| workers | layout | {' | '.join(models)} |")
    print(f"|---|---|{'---|' * len(models)}", flush=True)
    for workers in map(int, options.workers.split(",")):
        for layout in LAYOUTS[workers]:
            cells = [judged(model, workers, layout, options.steps) for model in models]
            print(f"| {workers} | {layout} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
