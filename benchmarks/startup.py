"""Start-up: seconds from the command to the first committed step, against torchrun with the same model; also `--help`
and `import paceline`.

python benchmarks/startup.py [--pairs 7]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from driving.options import options_of
from driving.progress import doing

PROGRAMS = Path(__file__).parent / "programs"


def first_step_s(peer: str, workers: int) -> float:
    """Start one job and return how long its first step took from the command on; waits for the job's end."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "when"
        if peer == "torchrun":
            start = [
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(workers),
                str(PROGRAMS / "tiny_ddp.py"),
            ]
        else:
            start = [
                "-m",
                "paceline",
                "run",
                str(PROGRAMS / "tiny_paceline.py"),
                "--workers",
                str(workers),
                "--run-dir",
                f"{scratch}/run",
                "--",
            ]
        doing(f"{workers} workers of {peer}")
        began = time.time()
        done = subprocess.run(
            [sys.executable, *start, str(out)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        if not out.exists():  # how the job ends is not measured (torchrun's workers may abort while they leave)
            raise SystemExit(f"{peer} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        return float(out.read_text()) - began


def command_s(*arguments: str, runs: int = 9) -> float:
    """Median wall time of a Python command."""
    took = []
    for _ in range(runs):
        began = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    options = options_of(parser, takes="about 3 minutes", quick={"pairs": 1})
    lines = []
    for workers in (2, 8):
        rows = []
        for pair in range(options.pairs):
            order = ["paceline", "torchrun"] if pair % 2 == 0 else ["torchrun", "paceline"]
            took = {peer: first_step_s(peer, workers) for peer in order}
            rows.append((took["paceline"], took["torchrun"]))
            print(
                f"{workers} workers, pair {pair + 1}: paceline {rows[-1][0]:.2f} s, torchrun {rows[-1][1]:.2f} s",
                flush=True,
            )
        ours, theirs = (statistics.median(column) for column in zip(*rows, strict=True))
        ratio = statistics.median(a / b for a, b in rows)
        lines.append(f"| {workers} | {ours:.2f} | {theirs:.2f} | **{ratio:.2f}x** |")
    print(
        "\n| workers | Paceline, s to the first committed step | torchrun, s | Paceline / torchrun |\n|---|---|---|---|"
    )
    print("\n".join(lines))
    doing("the commands alone")
    help_s, bare_s, import_s = (
        command_s("-m", "paceline", "--help"),
        command_s("-c", "pass"),
        command_s("-c", "import paceline"),
    )
    print("\n| command | seconds |\n|---|---|")
    print(
        f"| `paceline --help` | {help_s:.3f} |\n| `import paceline`, beyond an empty interpreter | "
        f"{import_s - bare_s:.3f} |"
    )


if __name__ == "__main__":
    main()
