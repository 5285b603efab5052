"""How long training stands still for a checkpoint that is written behind it, from the run's own record."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from device_checks.bench import Bench
from device_checks.gpt_steps import Size

GB_S = 10.0  # copied from the device, pinned: half of what its link gives


def check(bench: Bench) -> None:
    size, steps, every = (Size(2048, 12, 16, 32), 48, 12) if bench.on_gpu else (Size(128, 4, 4, 4), 8, 4)
    asked = f"the copy alone: state at {GB_S:g} GB/s or faster" if bench.on_gpu else "to be recorded"
    with bench.row("stall of a checkpoint", asked=asked):
        folder = bench.folder()
        words = ["run", bench.program("gpt_steps_of.py"), "--workers", "1", "--device", bench.job_device(1)]
        words += ["--plan", size.plan("bf16"), "--max-steps", str(steps), "--save-every", str(every), "--keep", "1"]
        words += ["--run-dir", str(folder / "run"), "--no-tensorboard", "--"]
        words += [*map(str, (size.width, size.layers, size.heads, size.samples, steps))]
        code, said = bench.paceline(*words, limit_s=80)
        if code != 0:
            raise RuntimeError(said.strip()[-300:])
        saves = [event for event in _events(folder / "run") if event["event"] == "CheckpointSaved"]
        num_bytes, stalls = saves[0]["num_bytes"], [event["stall_s"] for event in saves]
        later = statistics.median(stalls[1:] or stalls)
        rate = num_bytes / later / 1e9
        found = f"{1000 * later:.1f} ms for {num_bytes / 1e9:.3f} GB ({rate:.1f} GB/s), first {1000 * stalls[0]:.1f} ms"
        written = statistics.median(event["write_s"] for event in saves)
        verdict = rate >= GB_S if bench.on_gpu else "measured"
        bench.tell(
            "stall of a checkpoint",
            asked=asked,
            measured=f"{found}; written in {written:.1f} s behind it",
            verdict=verdict,
        )


def _events(run: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in sorted(run.glob("attempt_*/**/events.jsonl")):
        found += [json.loads(line) for line in path.read_text().splitlines()]
    return found
