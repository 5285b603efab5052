"""Errors of optimizers and codecs: steps taken twice, state that is lost or another, error feedback that is lost."""

from __future__ import annotations

from typing import Any

from paceline.codec.error_feedback import ErrorFeedback
from paceline.comm.sharded_tensors import local_part
from paceline.sync.allreduce.gradient_reducer import GradientReducer
from planted.planting import ALL, Plant, PlantedError, took_effect, wrap
from planted.programs import tied_adam, unclipped_text

__all__ = ["ERRORS"]


def _after_apply(change: Any) -> Plant:
    """Called after each step: change(worker, optimizer, {name: parameter})."""

    def plant(worker: Any) -> None:
        def make(before: Any) -> Any:
            def apply(gradients: Any, optimizers: Any) -> None:
                before(gradients, optimizers)
                change(worker, optimizers[0], dict(zip(gradients.names, gradients.parameters, strict=True)))

            return apply

        wrap(GradientReducer, "apply", make)

    return plant


def _steps_twice(_: Any) -> None:
    def make(before: Any) -> Any:
        def apply(gradients: Any, optimizers: Any) -> None:
            took_effect()
            before(gradients, optimizers)
            before(gradients, optimizers)

        return apply

    wrap(GradientReducer, "apply", make)


def _forgets_momentum(worker: Any, optimizer: Any, named: Any) -> None:
    if worker.rank == 0:
        took_effect()
        optimizer.state.pop(named["model.blocks.0.up.weight"], None)


def _other_state(worker: Any, optimizer: Any, named: Any) -> None:
    """Only the last step: no weight has moved by it yet."""
    parameter = named.get("model.blocks.1.up.weight")
    if worker.step == 2 and parameter is not None:  # it counts up once the step is over
        took_effect()
        local_part(optimizer.state[parameter]["exp_avg_sq"]).mul_(1.5)


def _forgets_feedback(_: Any) -> None:
    def make(before: Any) -> Any:
        def settle(codec: Any, used: Any) -> None:
            took_effect()
            before(codec, used)
            if codec._residual is not None:
                codec._residual.zero_()

        return settle

    wrap(ErrorFeedback, "settle", make)


def _feedback_twice(_: Any) -> None:
    def make(before: Any) -> Any:
        def settle(codec: Any, used: Any) -> None:
            took_effect()
            before(codec, used)
            if codec._residual is not None:
                codec._residual.mul_(2)

        return settle

    wrap(ErrorFeedback, "settle", make)


ERRORS: tuple[PlantedError, ...] = (
    PlantedError(what="the optimizer steps twice", plan="replicas=2", plant=_steps_twice, expected=ALL),
    PlantedError(what="the optimizer steps twice, fully sharded", plan="shard=2", plant=_steps_twice, expected=ALL),
    PlantedError(
        what="momentum of one parameter is lost",
        plan="replicas=2",
        plant=_after_apply(_forgets_momentum),
        expected=("model.blocks.0.up",),
    ),
    PlantedError(
        what="only the optimizer's state of one parameter differs",
        plan="shard=2",
        plant=_after_apply(_other_state),
        expected=("model.blocks.1.up",),
        program=tied_adam,
    ),
    PlantedError(
        what="error feedback is lost",
        plan="replicas=2+topk(ratio=0.25)",
        plant=_forgets_feedback,
        expected=ALL,
        program=unclipped_text,
    ),
    PlantedError(
        what="error feedback is added twice",
        plan="replicas=2+int8",
        plant=_feedback_twice,
        expected=ALL,
        program=unclipped_text,
    ),
)
