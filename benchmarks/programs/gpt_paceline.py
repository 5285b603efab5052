"""The example's GPT under Paceline: OUT.RANK holds its times."""

import sys
from pathlib import Path

import torch
from measured import Measured

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
    measured = Measured()
    for batch in worker.batches(windows(text, STEPS * SAMPLES * worker.workers)):
        worker.report(loss=step(batch))
        measured.step()
    measured.write(OUT, worker.rank)


if __name__ == "__main__":
    paceline.run(
        train,
        workers=2,
        plan=Plan(batch=Batch(size=2 * SAMPLES, micro=SAMPLES)),
        threads=1,
        save_at_end=False,
        tensorboard=False,
    )
