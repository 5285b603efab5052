"""The example's GPT under Paceline in any layout: OUT.RANK holds its times and its peak memory.

WIDTH LAYERS HEADS SAMPLES STEPS MICROS OUT, where a worker runs MICROS micro-batches of SAMPLES a step.
"""

import sys
from pathlib import Path

import torch
import torch.distributed.fsdp  # as the program by hand does: whatever is imported after `StepTimes()` counts
from measured import Measured

import paceline

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt import GPT, next_byte_loss, standard_library, windows

WIDTH, LAYERS, HEADS, SAMPLES, STEPS, MICROS, OUT = (*map(int, sys.argv[1:7]), sys.argv[7])


def train(worker: paceline.Worker) -> None:
    text, _ = standard_library()
    data = windows(text, STEPS * SAMPLES * MICROS * worker.workers)
    measured = Measured()
    model = worker.prepare(GPT(WIDTH, LAYERS, HEADS))
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False))
    step = worker.stepper(model, optim, next_byte_loss)
    for batch in worker.batches(data):
        worker.report(loss=step(batch))
        measured.step()
    measured.write(OUT, worker.rank)


if __name__ == "__main__":
    paceline.run(train, threads=1, save_at_end=False, tensorboard=False)
