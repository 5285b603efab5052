"""A Llama under Paceline's tensor parallelism: OUT.RANK holds its times and its peak memory.

WIDTH LAYERS HEADS SAMPLES STEPS MICROS OUT, where a step has MICROS micro-batches of SAMPLES.
"""

import sys
from typing import Any

import torch
from measured import Measured
from tensor_model import llama, next_byte_loss, text

import paceline

WIDTH, LAYERS, HEADS, SAMPLES, STEPS, MICROS, OUT = (*map(int, sys.argv[1:7]), sys.argv[7])


def loss_of(model: Any, micro: Any) -> torch.Tensor:
    return next_byte_loss(model(input_ids=micro[0]).logits, micro[1])


def train(worker: paceline.Worker) -> None:
    data = text(STEPS * SAMPLES * MICROS)
    measured = Measured()
    model = worker.prepare(llama(WIDTH, LAYERS, HEADS))
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False))
    step = worker.stepper(model, optim, forward=loss_of)
    for batch in worker.batches(data):
        worker.report(loss=step(batch))
        measured.step()
    measured.write(OUT, worker.rank)


if __name__ == "__main__":
    paceline.run(train, threads=1, save_at_end=False, tensorboard=False)
