"""The example's GPT: WIDTH LAYERS HEADS SAMPLES STEPS, as many steps of it."""

import sys

import torch

import paceline
from gpt import GPT, next_byte_loss, standard_library, windows

WIDTH, LAYERS, HEADS, SAMPLES, STEPS = map(int, sys.argv[1:])


def train(worker: paceline.Worker) -> None:
    torch.manual_seed(1)
    net = worker.prepare(GPT(WIDTH, LAYERS, HEADS))
    on_host = worker.plan.compute.offload == "all"
    optim = worker.prepare(torch.optim.AdamW(net.parameters(), lr=1e-4, fused=not on_host))
    step = worker.stepper(net, optim, next_byte_loss, clip_norm=1.0)
    text, _ = standard_library()
    for batch in worker.batches(windows(text, (STEPS + 1) * SAMPLES)):
        worker.report(loss=step(batch))


if __name__ == "__main__":
    paceline.run(train, save_at_end=False)
