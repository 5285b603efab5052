"""The example's GPT as a program of Accelerate, under either package: OUT.RANK holds its times."""

import importlib
import sys
from pathlib import Path

import torch
from measured import Measured
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt import GPT, next_byte_loss, standard_library, windows

WIDTH, LAYERS, HEADS, SAMPLES, STEPS = map(int, sys.argv[1:6])
OUT, PACKAGE = sys.argv[6:8]
Accelerator = importlib.import_module(PACKAGE).Accelerator


def main() -> None:
    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text, _ = standard_library()
    data = windows(text, STEPS * SAMPLES * accelerator.num_processes)
    loader = DataLoader(data, batch_size=SAMPLES, shuffle=True)
    model = GPT(WIDTH, LAYERS, HEADS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.999**step)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    model.train()
    measured = Measured()
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = next_byte_loss(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        loss.item()  # for a log line, as every script has
        measured.step()
    measured.write(OUT, accelerator.process_index)
    accelerator.end_training()


if __name__ == "__main__":
    main()
