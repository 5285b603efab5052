"""Errors of losses and counts: what a micro-batch, or a worker, counts for in the step, and what is reported."""

from __future__ import annotations

import dataclasses
from typing import Any

from paceline.events import StepDone
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.record.run_files import RunFiles
from paceline.worker.step import gradient_pass
from planted.planting import ALL, PlantedError, took_effect, wrap
from planted.programs import unclipped_text
from planted.reductions import scaled_land

__all__ = ["ERRORS"]


def _own_loss_weight(worker: Any) -> None:
    """The losses of the first worker count twice."""

    def make(before: Any) -> Any:
        def loss_and_weight(losses: Any) -> tuple[float, float]:
            loss, weight = before(losses)
            if worker.rank != 0:
                return loss, weight
            took_effect()
            return loss * 2.0, weight

        return loss_and_weight

    wrap(gradient_pass, "loss_and_weight", make)


def _full_micro_batches(_: Any) -> None:
    def make(before: Any) -> Any:
        def weighed(loss: Any, num_micro: int, num_step: int) -> Any:
            if num_micro != 3:
                took_effect()
            return before(loss, 3, num_step)

        return weighed

    wrap(gradient_pass, "weighed", make)


def _one_less(_: Any) -> None:
    def make(before: Any) -> Any:
        def runs(batch: Any) -> Any:
            every = list(before(batch))
            if len(every) > 1:
                took_effect()
            return iter(every[:-1] if len(every) > 1 else every)

        return runs

    wrap(StepBatch, "runs", make)


def _other_report(_: Any) -> None:
    """The first worker writes another value than the script has reported."""

    def make(before: Any) -> Any:
        def emit(files: Any, event: Any) -> None:
            if isinstance(event, StepDone) and event.metrics:
                took_effect()
                event = dataclasses.replace(event, metrics={key: 1.01 * one for key, one in event.metrics.items()})
            before(files, event)

        return emit

    wrap(RunFiles, "emit", make)


ERRORS: tuple[PlantedError, ...] = (
    PlantedError(
        what="the loss is divided by the worker's own count",
        plan="replicas=2",
        plant=scaled_land(2.0),
        expected=ALL,
        program=unclipped_text,
    ),
    PlantedError(
        what="one worker's losses count twice in the mean",
        plan="replicas=2",
        plant=_own_loss_weight,
        expected=ALL,
    ),
    PlantedError(
        what="the last partial micro-batch counts as a full one",
        plan="replicas=2",
        plant=_full_micro_batches,
        expected=ALL,
    ),
    PlantedError(what="accumulation is off by one", plan="replicas=2", plant=_one_less, expected=ALL),
    PlantedError(what="only what is reported differs", plan="replicas=2", plant=_other_report, expected=ALL),
)
