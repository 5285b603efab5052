"""An elastic run on device tensors: kill -9 inside a step, regroup, the same losses as without the loss."""

from __future__ import annotations

import json
from pathlib import Path

from device_checks.bench import Bench

NEAR = 1e-9
STEPS = 12
PLACES = ("backward", "committed")


def check(bench: Bench) -> None:
    whole: list[float] = []
    with bench.row("elastic: an undisturbed run, to compare with", asked="to run"):
        whole = _losses(bench, "nowhere")[0]
        bench.tell(
            "elastic: an undisturbed run, to compare with",
            asked="to run",
            measured=f"{len(whole)} losses",
            verdict="measured",
        )
    for place in PLACES[:: 1 if bench.on_gpu else 2] if whole else ():
        name, asked = f"elastic: kill -9 of a worker of 3, {place}", f"regroups, the same losses within {NEAR:g}"
        with bench.row(name, asked=asked):
            losses, regroups = _losses(bench, place)
            worst = max(abs(a / b - 1) for a, b in zip(losses, whole, strict=True))
            found = f"{worst:.0e} over {len(losses)} losses; {len(regroups)} regroups"
            if regroups:
                found += f", in {regroups[0]['regrouped_s']:.2f} s, {regroups[0]['steps_lost']} steps lost"
            bench.tell(name, asked=asked, measured=found, verdict=worst <= NEAR and bool(regroups))


def _losses(bench: Bench, place: str) -> tuple[list[float], list[dict[str, float]]]:
    folder = bench.folder()
    words = ["run", bench.program("elastic_net.py"), "--workers", "3", "--device", bench.job_device(3)]
    words += ["--plan", "replicas=1-3+batch(size=24,micro=4)+compute(precision=fp64)", "--max-steps", str(STEPS)]
    words += ["--run-dir", str(folder / "run"), "--no-tensorboard", "--", place, str(folder)]
    code, said = bench.paceline(*words, limit_s=60)
    if code != 0:
        raise RuntimeError(said.strip()[-300:])
    run: Path = folder / "run"
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (run / "attempt_1" / "events.jsonl").read_text().splitlines()]
    if len(losses) != STEPS:
        raise RuntimeError(f"{len(losses)} of {STEPS} steps were recorded")
    return losses, [event for event in events if event["event"] == "Regrouped"]
