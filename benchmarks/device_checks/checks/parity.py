"""Every layout that one device allows, on workers that share it: the numbers of one process on it."""

from __future__ import annotations

import importlib.util
from typing import Any

from device_checks.bench import Bench, Refused
from paceline.cli.parity.compare import CaptureReader, compare
from paceline.errors import PlanError

STEPS, LIMIT = 4, 1e-9
BATCH = "batch(size=16,micro=4)+compute(precision=fp64)"
LAYOUTS = {
    2: (
        "replicas=2",
        "replicas=2+allreduce(algorithm=ring)",
        "shard=2",
        "shard=2+zero=1",
        "shard=2+zero=2",
        "tensor=2",
        "tensor=2+sequence=true",
        "stages=2",
        "stages=2+schedule=zero-bubble",
        "context=2",
        "experts=2",
    ),
    4: ("replicas=2+shard=2", "shard=2+tensor=2", "tensor=2+stages=2", "shard=2+context=2", "replicas=2+experts=2"),
}


def check(bench: Bench) -> None:
    import torch

    import models

    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # what it imports, it imports once, for all workers
    has_experts = importlib.util.find_spec("transformers") is not None
    if has_experts:
        models.of_transformers("mixtral")
    references: dict[str, CaptureReader] = {}
    for workers, layouts in LAYOUTS.items():
        for layout in layouts[:: 1 if bench.on_gpu else 4]:
            model = "mixtral" if "experts" in layout else "transformer"
            asked = f"as one process, within {LIMIT:g} in fp64"
            with bench.row(f"{layout} of {model}", asked=asked):
                if model == "mixtral" and not has_experts:
                    raise Refused("transformers, which has the model, is not installed here")
                if model not in references:
                    references[model] = _captured(bench, models, model, "replicas=1", 1)
                found = compare(_captured(bench, models, model, layout, workers), references[model])
                figures = found.loss.value, found.first_gradients.value
                bench.tell(
                    f"{layout} of {model}",
                    asked=asked,
                    measured=f"loss {figures[0]:.0e}, gradients {figures[1]:.0e}",
                    verdict=max(figures) <= LIMIT,
                )


def _captured(bench: Bench, models: Any, model: str, layout: str, workers: int) -> CaptureReader:
    models.NAME = model
    captured = bench.folder() / "captured"
    try:
        bench.forked(models.train, f"{layout}+{BATCH}", workers, max_steps=STEPS, capture_dir=str(captured))
    except PlanError as error:
        raise Refused(str(error)) from None
    return CaptureReader(captured)
