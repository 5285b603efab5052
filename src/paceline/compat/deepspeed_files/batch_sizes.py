"""The batch sizes of DeepSpeed's configuration, which complete each other. No torch here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, cast

from paceline.compat.deepspeed_files.config_table import count_of
from paceline.errors import PlanError

__all__ = ["BatchSizes", "settle_batch", "workers_of"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizes:
    """Samples of a step over all workers, samples of a micro-batch, and micro-batches of a worker in a step."""

    train: int
    micro: int
    accumulation: int


def settle_batch(table: Mapping[str, Any], workers: int) -> BatchSizes:
    """Return a step's batch sizes on so many workers, by DeepSpeed's rule:

    train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x workers

    Raises PlanError where none of the first two is given, and where they do not fit.
    """
    train = count_of(table, "train_batch_size")
    micro = count_of(table, "train_micro_batch_size_per_gpu")
    steps = count_of(table, "gradient_accumulation_steps")
    if train is None and micro is None:
        raise PlanError(
            "The DeepSpeed configuration has no batch size: give train_batch_size, or train_micro_batch_size_per_gpu."
        )
    if train is None:
        micro, steps = cast("int", micro), steps or 1
        train = micro * steps * workers
    elif micro is None:
        steps = steps or 1
        micro = _divided(train, steps * workers, f"{steps} accumulation steps x {workers} workers")
    elif steps is None:
        steps = _divided(train, micro * workers, f"{micro} samples a micro-batch x {workers} workers")
    if train != micro * steps * workers:
        raise PlanError(
            f"train_batch_size is {train}, but {micro} samples a micro-batch x {steps} accumulation steps x {workers} "
            f"workers are {micro * steps * workers}: change one of them, or leave one of the three out."
        )
    return BatchSizes(train=train, micro=micro, accumulation=steps)


def _divided(train: int, by: int, what: str) -> int:
    if train % by:
        raise PlanError(
            f"train_batch_size is {train}, which {what} = {by} do not divide: use {math.ceil(train / by) * by}, or "
            "another number of workers."
        )
    return train // by


def workers_of(table: Mapping[str, Any]) -> int | None:
    """The number of workers that all three batch sizes together tell."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    train, micro, steps = (count_of(table, name) for name in names)
    if train is None or micro is None or steps is None or train % (micro * steps):
        return None
    return train // (micro * steps)
