"""The list of programs: a function with `@program` is one, and returns the losses of its steps and what else is to be
compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

__all__ = ["PROGRAMS", "Outcome", "Program", "Rows", "fit", "program"]

EPOCHS = 3
LIMIT = 1e-4  # relative, in fp32, after six steps
Train = Callable[[Any], "Outcome"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a program has seen: equal under every plan, or the plan is wrong."""

    losses: list[float]
    others: dict[str, float] = dataclasses.field(
        default_factory=dict[str, float]
    )  # in the end, such as held-out losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One program, and what is particular about it."""

    name: str
    about: str
    train: Train
    limit: float  # the largest relative difference that rounding makes
    needs: str  # the package that its model is from; "": torch alone
    sees_whole_batches: (
        bool  # in plain torch: buffers, and hooks on gradients, are those of a step and of no micro-batch
    )


PROGRAMS: dict[str, Program] = {}


def program(
    about: str, *, limit: float = LIMIT, needs: str = "", sees_whole_batches: bool = False
) -> Callable[[Train], Train]:
    """Add a function to the list, under its own name."""

    def add(train: Train) -> Train:
        name = train.__name__
        if name in PROGRAMS:
            raise ValueError(f"two programs are named {name}")
        PROGRAMS[name] = Program(
            name=name, about=about, train=train, limit=limit, needs=needs, sees_whole_batches=sees_whole_batches
        )
        return train

    return add


class Rows(Dataset[tuple[Tensor, ...]]):
    """Rows of some tensors, all of one length."""

    def __init__(self, *columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, number: int) -> tuple[Tensor, ...]:
        return tuple(column[number] for column in self.columns)


def fit(
    worker: Any,
    model: nn.Module,
    optim: torch.optim.Optimizer,
    data: Dataset[Any],
    loss: Callable[[Any, Any], Any] | None = None,
    *,
    forward: Callable[[Any, Any], Any] | None = None,
    clip_norm: float | None = None,
    after_step: Callable[[], object] = lambda: None,
    held_out: Callable[[Any, Any], Any] | None = None,
    collate: Callable[[Sequence[Any]], Any] | None = None,
) -> Outcome:
    """The usual loop with a stepper; `model` and `optim` are prepared. `held_out(output, target)` is measured last."""
    step = worker.stepper(model, optim, loss, forward=forward, clip_norm=clip_norm)
    losses: list[float] = []
    for batch in worker.batches(data, epochs=EPOCHS, collate=collate):
        losses.append(float(step(batch)))
        after_step()
    measure = held_out or loss
    others = worker.evaluate(model, data, {"held_out": measure}) if measure is not None else {}
    return Outcome(losses=losses, others=others)
