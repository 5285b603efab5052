"""Errors of buffers: one worker's value, a sum that is missing or doubled, a cache that has grown old."""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor

from paceline.parallel.context import collectives as context_collectives
from paceline.parallel.context.group_ops import ContextGroupOps
from paceline.worker.step.model_buffers import BufferAverager
from paceline.worker.step.tracked_buffer import TrackedBuffer
from planted.planting import PlantedError, replaced, took_effect, wrap
from planted.programs import normed, rotary

__all__ = ["ERRORS"]

NUM_TABLES = 2 * 2 * 4  # that a forward slices: of two blocks, for queries and keys, (cos, sin, sin, cos)


def _own_buffers(_: Any) -> None:
    def make(before: Any) -> Any:
        def combine(buffers: Any, changed: Any, *, num_samples: int, groups: Any, **options: Any) -> Any:
            took_effect()
            return before(buffers, changed, num_samples=buffers._num_captured or num_samples, groups=[], **options)

        return combine

    wrap(BufferAverager, "combine", make)


def _not_rewound(_: Any) -> None:
    """Each micro-batch goes on with the buffers of the one before."""

    def make(before: Any) -> Any:
        def rewind(buffers: Any, *, afresh: bool = False) -> None:
            took_effect()

        return rewind

    wrap(BufferAverager, "rewind", make)


def _counted_twice(_: Any) -> None:
    def make(before: Any) -> Any:
        def commit(buffer: Any, share: Tensor, *args: Any) -> None:
            if buffer.name == "seen":
                took_effect()
                share = share * 2
            before(buffer, share, *args)

        return commit

    wrap(TrackedBuffer, "commit", make)


def _positions_of_first(ops: Any, tensor: Any, *, dim: int, sections: Any) -> Any:
    index = 0 if tensor.is_floating_point() else ops.index  # positions begin at 0 on every worker
    ranges = context_collectives.slices(sections, size=ops.size, index=index)
    return context_collectives.slice_from(tensor, dim=dim, ranges=ranges)


def _old_positions(_: Any) -> None:
    """A worker keeps its slices of the rotary tables from the first micro-batch on."""
    kept: list[Tensor] = []
    number = itertools.count()

    def make(before: Any) -> Any:
        def scatter(ops: Any, tensor: Any, *, dim: int, sections: Any) -> Any:
            now = before(ops, tensor, dim=dim, sections=sections)
            if tensor.requires_grad or not tensor.is_floating_point() or tensor.ndim != 2:
                return now
            place = next(number) % NUM_TABLES
            if len(kept) < NUM_TABLES:
                kept.append(now.clone())
            elif not kept[place].equal(now):
                took_effect()
            return kept[place]

        return scatter

    wrap(ContextGroupOps, "scatter", make)


ERRORS: tuple[PlantedError, ...] = (
    PlantedError(
        what="buffers of one worker only",
        plan="replicas=2",
        plant=_own_buffers,
        expected=("model.norm",),
        program=normed,
    ),
    PlantedError(
        what="a micro-batch begins with the buffers of the one before",
        plan="replicas=2",
        plant=_not_rewound,
        expected=("model.norm",),
        program=normed,
    ),
    PlantedError(
        what="only a counter that no forward reads is summed twice",
        plan="replicas=2",
        plant=_counted_twice,
        expected=("model",),
        program=normed,
    ),
    PlantedError(
        what="positions begin at 0 on every worker",
        plan="context=2",
        plant=replaced(ContextGroupOps, "scatter", _positions_of_first),
        expected=("model", "model.places"),
    ),
    PlantedError(
        what="a stale cache of rotary positions",
        plan="context=2",
        plant=_old_positions,
        expected=("model.blocks.0", "model.places"),
        program=rotary,
    ),
)
