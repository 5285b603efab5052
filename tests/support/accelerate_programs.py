"""A program written for Accelerate, and what it tells: the same text runs under Accelerate, but for its import.

It has what such programs have: shuffled data whose length nothing divides, a schedule, clipping, an evaluation in each
epoch, states that are saved and loaded, and gradients that are accumulated in three ways.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from programs import PACELINE, run

__all__ = ["run_program", "steps_of", "write_accelerate_program"]

PROGRAM = '''\
"""Learns which half of twenty numbers has the larger sum."""

import argparse
import contextlib
import json
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.compat.accelerate import Accelerator, DataLoaderConfiguration
from paceline.compat.accelerate.utils import set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--loop", default="accumulate", choices=["accumulate", "manual", "ahead"])
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--buffers", action="store_true")
parser.add_argument("--drop-last", action="store_true")
parser.add_argument("--split-batches", action="store_true")
parser.add_argument("--mixed-precision", default=None)
parser.add_argument("--matmul-loss", action="store_true", help="a loss whose matrix work is not the model's")
parser.add_argument("--save-at", type=int, default=None, help="batches of the second epoch, then save and end")
parser.add_argument("--first-saves", action="store_true", help="only the first process calls save_state")
parser.add_argument("--own-order", action="store_true", help="samples are shuffled by a generator of the loader's own")
parser.add_argument("--save-after-epoch", action="store_true", help="save after the first epoch, and end")
parser.add_argument("--state", default="state")
parser.add_argument("--load", action="store_true")
parser.add_argument("--weights", default=None)
args = parser.parse_args()


def main():
    own = args.accumulate if args.loop != "manual" else 1
    accelerator = Accelerator(
        gradient_accumulation_steps=own,
        mixed_precision=args.mixed_precision,
        dataloader_config=DataLoaderConfiguration(split_batches=args.split_batches),
        cpu=True,
    )
    set_seed(3)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(101, 20, generator=generator)
    y = (x[:, :10].sum(dim=1) > x[:, 10:].sum(dim=1)).long()
    own_order = torch.Generator().manual_seed(5) if args.own_order else None
    train = DataLoader(
        TensorDataset(x, y), batch_size=args.batch, shuffle=True, drop_last=args.drop_last, generator=own_order
    )
    test = DataLoader(TensorDataset(x[:37], y[:37]), batch_size=8)
    hidden = nn.BatchNorm1d(32) if args.buffers else nn.Identity()
    first = nn.Linear(20, 32, bias=not args.buffers)
    model = nn.Sequential(first, hidden, nn.Tanh(), nn.Dropout(args.dropout), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.98 ** (step // 4))
    model, optimizer, train, test, schedule = accelerator.prepare(model, optimizer, train, test, schedule)
    mixing = torch.tensor([[0.9, 0.3], [0.2, 1.1]])
    begin, skipped = 0, 0
    if args.load:
        accelerator.load_state(args.state)
        begin, skipped = 1, args.save_at or 0
    losses, measures, lengths = [], [], []

    def take(batch, number):
        inputs, target = batch
        output = model(inputs)
        if args.matmul_loss:
            inside = accelerator.autocast() if number % 2 else contextlib.nullcontext()
            with inside:
                output = output @ mixing
            assert output.dtype == (torch.bfloat16 if number % 2 else torch.float32), output.dtype
        loss = F.cross_entropy(output.float(), target)
        losses.append(loss.item())
        if args.loop == "manual":
            loss = loss / args.accumulate
        accelerator.backward(loss)
        if args.loop == "accumulate" or (args.loop == "manual" and (number + 1) % args.accumulate == 0):
            step()

    def step():
        if args.loop != "accumulate" or accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    for epoch in range(begin, args.epochs):
        model.train()
        loader = accelerator.skip_first_batches(train, skipped) if skipped else train
        lengths.append(len(train))
        if args.loop == "ahead":
            batches, ahead = iter(loader), []
            while True:
                ahead = [batch for _, batch in zip(range(args.accumulate), batches)]
                for number, batch in enumerate(ahead):
                    take(batch, number)
                if ahead:
                    step()
                if len(ahead) < args.accumulate:
                    break
        else:
            for number, batch in enumerate(loader):
                with accelerator.accumulate(model) if args.loop == "accumulate" else contextlib.nullcontext():
                    take(batch, number)
                if epoch == 1 and args.save_at == number + 1 and not args.load:
                    if accelerator.is_main_process or not args.first_saves:
                        accelerator.save_state(args.state)
                    accelerator.end_training()
                    tell(accelerator, losses=losses, measures=measures, lengths=lengths)
                    return
        skipped = 0
        model.eval()
        found = []
        for inputs, target in test:
            with torch.no_grad():
                guess = model(inputs).argmax(dim=-1)
            found.append(accelerator.gather_for_metrics((guess, target)))
        guesses, targets = (torch.cat(parts) for parts in zip(*found))
        assert torch.equal(targets.cpu(), y[:37]), "the evaluation has other samples, or another order"
        measures.append((guesses == targets).float().mean().item())
        if args.save_after_epoch and not args.load:
            accelerator.save_state(args.state)
            tell(accelerator, losses=losses, measures=measures, lengths=lengths)
            return
    if args.weights is not None:
        accelerator.wait_for_everyone()
        accelerator.save_model(model, args.weights)
    weight = float(sum(value.double().abs().sum() for value in accelerator.get_state_dict(model).values()))
    rate = schedule.get_last_lr()[0]
    tell(accelerator, losses=losses, measures=measures, lengths=lengths, weight=weight, rate=rate)
    accelerator.end_training()


def tell(accelerator, **values):
    if accelerator.is_main_process:
        print("told " + json.dumps(values))


if __name__ == "__main__":
    main()
'''


def write_accelerate_program(folder: Path, *, package: str = "paceline.compat.accelerate") -> Path:
    """Write the program; `package`: from which it imports."""
    path = folder / f"{package.split('.')[0]}_program.py"
    path.write_text(PROGRAM.replace("paceline.compat.accelerate", package))
    return path


def run_program(
    program: Path, *words: str, workers: int | None = None, run_dir: Path | None = None, **more: Any
) -> dict[str, Any]:
    """Run the program, by `paceline run` where it is given workers, and return what it tells. `launcher`: what starts
    it in place of Python."""
    options, launcher = more.pop("options", ()), more.pop("launcher", ())
    start: tuple[Any, ...] = (sys.executable, *launcher, program, *words)
    if workers is not None:
        place = ("--run-dir", run_dir) if run_dir is not None else ()
        start = (*PACELINE, "run", program, "--workers", workers, "--no-tensorboard", *place, *options, "--", *words)
    code, output = run(*start, cwd=program.parent, **more)
    told = [line.removeprefix("told ") for line in output.splitlines() if line.startswith("told ")]
    if code != 0 or len(told) != 1:
        raise AssertionError(output)
    return json.loads(told[0])


def steps_of(run_dir: Path) -> list[float]:
    """The loss of each step of a run."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if row.get("loss") is not None]
