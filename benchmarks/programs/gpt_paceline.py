"""The example's GPT under Paceline, timed: prints one line of JSON with the milliseconds of each step."""

import json
import sys
import time
from pathlib import Path

import torch

import paceline
from paceline import Batch, Plan

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt import GPT, next_byte_loss, standard_library, windows

WIDTH, LAYERS, HEADS, SAMPLES, STEPS, OUT = (*map(int, sys.argv[1:6]), sys.argv[6])


def train(worker: paceline.Worker) -> None:
    text, _ = standard_library()
    model = worker.prepare(GPT(WIDTH, LAYERS, HEADS))
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    step = worker.stepper(model, optim, next_byte_loss, clip_norm=1.0)
    took, began = [], time.perf_counter()
    for batch in worker.batches(windows(text, STEPS * SAMPLES * worker.workers)):
        worker.report(loss=step(batch))
        now = time.perf_counter()
        took.append(1000 * (now - began))
        began = now
    if worker.is_first:
        Path(OUT).write_text(json.dumps(took))


if __name__ == "__main__":
    paceline.run(
        train,
        workers=2,
        plan=Plan(batch=Batch(size=2 * SAMPLES, micro=SAMPLES)),
        threads=1,
        save_at_end=False,
        tensorboard=False,
    )
