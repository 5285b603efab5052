"""Errors of random state: shared by what must draw its own numbers, or split where all must draw the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.worker.data import random_state
from planted.planting import Plant, PlantedError, took_effect, wrap
from planted.programs import dropped_text, normed

__all__ = ["ERRORS"]


def _seeded(change: Callable[[Any, tuple[int, ...]], tuple[int, ...]]) -> Plant:
    def plant(worker: Any) -> None:
        def make(before: Any) -> Any:
            def seed_all(*numbers: int) -> None:
                took_effect()
                before(*change(worker, numbers))

            return seed_all

        wrap(random_state, "seed_all", make)

    return plant


def _not_at_all(worker: Any) -> None:
    """Each worker goes on with the numbers that it has."""

    def make(before: Any) -> Any:
        def seed_all(*_: int) -> None:
            took_effect()

        return seed_all

    wrap(random_state, "seed_all", make)


ERRORS: tuple[PlantedError, ...] = (
    PlantedError(
        what="all micro-batches share one random state",
        plan="replicas=2",
        plant=_seeded(lambda _, numbers: numbers[:-1]),
        expected=("model.drop",),
        program=normed,
    ),
    PlantedError(
        what="random state is split by worker",
        plan="replicas=2",
        plant=_seeded(lambda worker, numbers: (*numbers, worker.rank)),
        expected=("model.drop",),
        program=normed,
    ),
    PlantedError(
        what="random state goes on from one micro-batch to the next",
        plan="shard=2",
        plant=_not_at_all,
        expected=("model.drop",),
        program=normed,
    ),
    PlantedError(
        what="each step draws the numbers of the first",
        plan="replicas=2",
        plant=_seeded(lambda _, numbers: (*numbers[:2], 1, *numbers[3:])),
        expected=("model.drop",),
        program=normed,
    ),
    PlantedError(
        what="tensor parallel workers draw other masks",
        plan="tensor=2",
        plant=_seeded(lambda worker, numbers: (*numbers, worker.rank)),
        expected=("model.blocks.0.drop",),
        program=dropped_text,
    ),
)
