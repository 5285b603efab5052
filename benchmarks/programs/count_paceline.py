"""A Llama under Paceline's tensor parallelism: OUT.RANK holds what its last step sent.

WIDTH LAYERS HEADS SAMPLES STEPS MICROS OUT, as for tensor_paceline.py.
"""

import sys
from typing import Any

import torch
from counted import Counts, watch_groups
from tensor_model import llama, next_byte_loss, text

import paceline

WIDTH, LAYERS, HEADS, SAMPLES, STEPS, MICROS, OUT = (*map(int, sys.argv[1:7]), sys.argv[7])


def loss_of(model: Any, micro: Any) -> torch.Tensor:
    return next_byte_loss(model(input_ids=micro[0]).logits, micro[1])


def train(worker: paceline.Worker) -> None:
    counts = Counts()
    model = worker.prepare(llama(WIDTH, LAYERS, HEADS))
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False))
    step = worker.stepper(model, optim, forward=loss_of)
    watch_groups(counts, lambda what: what.endswith("of a tensor parallel layer"))
    for batch in worker.batches(text(STEPS * SAMPLES * MICROS)):
        counts.found.clear()
        worker.report(loss=step(batch))
        counts.write(OUT, worker.rank)


if __name__ == "__main__":
    paceline.run(train, threads=1, save_at_end=False, tensorboard=False)
