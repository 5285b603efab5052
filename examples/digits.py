"""Reads handwritten digits (scikit-learn's): `python examples/digits.py`, with exact evaluation after each epoch."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline import Batch, Plan

EPOCHS = 8


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,797 pictures of 8 x 8 points; every fifth is kept for evaluation."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    kept = torch.arange(len(y)) % 5 == 0
    return TensorDataset(x[~kept], y[~kept]), TensorDataset(x[kept], y[kept])


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.3), nn.Linear(32 * 4 * 4, 10)),
    )


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(dim=1) == target).float().mean()


def train(worker: paceline.Worker) -> None:
    training, evaluation = digits()
    model = worker.prepare(network())
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01))
    step = worker.stepper(model, optim, F.cross_entropy)
    for batch in worker.batches(training, epochs=EPOCHS):
        worker.report(loss=step(batch))
        if batch.ends_epoch:
            # Exact: 360 pictures are 360 pictures on any number of workers, none left out and none counted twice.
            # The console shows the values, as "held out"; they are returned as well.
            worker.evaluate(model, evaluation, {"loss": F.cross_entropy, "accuracy": accuracy})


if __name__ == "__main__":
    paceline.run(train, workers=2, plan=Plan(batch=Batch(size=64, micro=16)))
