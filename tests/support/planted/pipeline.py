"""Errors of pipeline parallel: tied weights, counts of micro-batches, and what stages send to each other."""

from __future__ import annotations

from typing import Any

from paceline.parallel.pipeline import stage_worker
from paceline.worker.step.tied_gradients import TiedStageGradients
from planted.planting import ALL, Plant, PlantedError, took_effect, wrap

__all__ = ["ERRORS"]


def _tied(times: int) -> Plant:
    def make(before: Any) -> Any:
        def add_up(tied: Any, parts: Any) -> None:
            took_effect()
            for _ in range(times):
                before(tied, parts)

        return add_up

    return lambda _: wrap(TiedStageGradients, "add_up", make)


def _alike(_: Any) -> None:
    """Micro-batches count alike, however many samples they have."""

    def make(before: Any) -> Any:
        def init(step: Any, worker: Any, pipeline: Any, forward: Any, micros: Any, weights: Any, seeds: Any) -> None:
            even = [sum(weights) / len(weights)] * len(weights) if weights else []  # evaluations have none
            if even != list(weights):
                took_effect()
            before(step, worker, pipeline, forward, micros, even, seeds)

        return init

    wrap(stage_worker._PipelineStep, "__init__", make)


def _boundary(name: str, factor: float) -> Plant:
    """What leaves a stage, or the gradient that goes back, is another."""

    def make(before: Any) -> Any:
        def call(step: Any, action: Any, arrived: Any) -> Any:
            found = before(step, action, arrived)
            if found:
                took_effect()
            return {number: one * factor for number, one in found.items()}

        return call

    return lambda _: wrap(stage_worker._PipelineStep, name, make)


ERRORS: tuple[PlantedError, ...] = (
    PlantedError(
        what="tied weights' gradients are summed twice",
        plan="stages=2",
        plant=_tied(2),
        expected=("model.words", "model.head"),
    ),
    PlantedError(
        what="tied weights' gradients are not summed",
        plan="stages=2",
        plant=_tied(0),
        expected=("model.words", "model.head"),
    ),
    PlantedError(what="micro-batches of all sizes count alike", plan="stages=2", plant=_alike, expected=ALL),
    PlantedError(
        what="what a stage sends is scaled",
        plan="stages=2",
        plant=_boundary("_do_forward", 1.01),
        expected=("model.blocks.0", "model.blocks.1", "model.blocks.1.before"),
    ),
    PlantedError(
        what="the gradient that a stage sends back is scaled",
        plan="stages=2",
        plant=_boundary("_do_backward", 1.01),
        expected=("model.blocks.0", "model.blocks.1"),
    ),
)
