"""Errors of the norm for clipping, and of clipping: what counts in the norm, and how often gradients are scaled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.sync.allreduce.gradient_norm import GradientNorm
from paceline.sync.allreduce.gradient_reducer import GradientReducer
from paceline.sync.allreduce.gradient_sharding import TensorParallelGradients
from planted.planting import ALL, Plant, PlantedError, replaced, took_effect, wrap
from planted.programs import mixture, text

__all__ = ["ERRORS"]

SPLIT = ("model.words", "model.head", *(f"model.blocks.*.{one}" for one in ("qkv", "up", "down", "out")))
WHOLE = ("model.places", "model.norm", *(f"model.blocks.*.{one}" for one in ("before", "between", "down", "out")))
ROUTED = ("model.blocks.?.experts", "model.blocks.?.experts.*")


def _counted(counts: Callable[[Any, Any], bool]) -> Plant:
    return replaced(TensorParallelGradients, "counts", counts)


def _clips_twice(_: Any) -> None:
    def make(before: Any) -> Any:
        def clip(gradients: Any, max_norm: float, norm: Any) -> None:
            took_effect()
            before(gradients, max_norm, norm)
            before(gradients, max_norm, norm)

        return clip

    wrap(GradientReducer, "clip", make)


def _clips_by_own_norm(_: Any) -> None:
    """The norm that is told is right; a worker clips by that of its own parts."""

    def make(before: Any) -> Any:
        def clip(gradients: Any, max_norm: float, norm: Any) -> None:
            took_effect()
            before(gradients, max_norm, norm.new_tensor(gradients._norms.own_square(gradients.parameters)).sqrt())

        return clip

    wrap(GradientReducer, "clip", make)


ERRORS: tuple[PlantedError, ...] = (
    PlantedError(
        what="norm leaves out split parameters (Megatron-LM #7452)",
        plan="tensor=2",
        plant=_counted(lambda one, p: one.group.index == 0 and not one.has_part(p)),
        expected=SPLIT,
    ),
    PlantedError(
        what="norm counts whole parameters on each worker",
        plan="tensor=2",
        plant=_counted(lambda one, p: True),
        expected=WHOLE,
    ),
    PlantedError(
        what="norm counts only the first worker's parts",
        plan="tensor=2",
        plant=_counted(lambda one, p: one.group.index == 0),
        expected=SPLIT,
    ),
    PlantedError(
        what="norm of each worker's own rows",
        plan="shard=2",
        plant=replaced(GradientNorm, "_other_parts", lambda _: []),
        expected=ALL,
    ),
    PlantedError(
        what="norm leaves out another stage's parameters",
        plan="stages=2",
        plant=replaced(GradientNorm, "_other_parts", lambda _: []),
        expected=("model", "model.words", "model.blocks.*", "model.norm"),
    ),
    PlantedError(
        what="norm leaves out experts' parameters (Megatron-LM #5916)",
        plan="experts=2",
        plant=_counted(lambda one, p: one.group.index == 0 and not one.has_part(p)),
        expected=ROUTED,
        program=mixture,
    ),
    PlantedError(
        what="a worker clips by the norm of its own rows",
        plan="shard=2",
        plant=_clips_by_own_norm,
        expected=ALL,
    ),
    PlantedError(what="gradients are clipped twice", plan="replicas=2", plant=_clips_twice, expected=ALL, program=text),
)
