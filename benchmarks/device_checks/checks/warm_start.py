"""Workers are forked from a parent that has touched no device, also where a script looks for one on import."""

from __future__ import annotations

import json
import time

from device_checks.bench import Bench

WAYS = {
    "plain": "workers start from a warm parent",
    "looks": "the script asks torch.cuda.is_available() while it is imported",
    "opens": "the script allocates on the device while it is imported",
}


def check(bench: Bench) -> None:
    for way, what in WAYS.items():
        asked = "both workers compute on the device, and the run ends well"
        with bench.row(f"warm start: {what}", asked=asked):
            folder = bench.folder()
            words = [
                "run",
                bench.program("warm_net.py"),
                "--workers",
                "2",
                "--device",
                bench.job_device(2),
                "--max-steps",
                "3",
            ]
            words += ["--run-dir", str(folder / "run"), "--no-tensorboard", "--", way]
            began = time.monotonic()
            code, said = bench.paceline(*words, limit_s=60)
            took = time.monotonic() - began
            if code != 0:
                raise RuntimeError(said.strip()[-300:])
            first = json.loads((folder / "run" / "summary.json").read_text()).get("first_commit_s")
            on = "cuda" if "DEVICE cuda" in said else "cpu"
            found = f"on {on}; first step committed after {first} s, {took:.1f} s in all"
            bench.tell(f"warm start: {what}", asked=asked, measured=found, verdict=on == bench.device)
