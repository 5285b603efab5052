"""Errors of tensor and sequence parallel layers: what crosses between whole and split tensors, and what is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from paceline.parallel.tensor import collectives, layers
from paceline.parallel.tensor.plan import ParameterSplit
from paceline.parallel.tensor.split_tensor import TensorGroupOps
from paceline.sync.allreduce.gradient_sharding import TensorParallelGradients
from paceline.worker.state import model_layout
from planted.planting import Plant, PlantedError, replaced, result, took_effect, wrap
from planted.programs import text, unequal_text

__all__ = ["ERRORS"]

WHOLE = ("model.places", "model.norm", *(f"model.blocks.*.{one}" for one in ("before", "between", "down", "out")))


def _row(only: str, change: Callable[[Any, Any, Any], Any]) -> Plant:
    """Change the forward of one row layer: change(module, ops, result)."""

    def make(before: Any) -> Any:
        def row(module: Any, kind: Any, layer: Any, ops: Any, x: Any) -> Any:
            out = before(module, kind, layer, ops, x)
            if layer.name != only or ops.size == 1:
                return out
            took_effect()
            return change(module, ops, out)

        return row

    return lambda _: layers.FORWARDS.__setitem__("row", make(layers.FORWARDS["row"]))


def _not_summed_at(wanted: str) -> Plant:
    def make(before: Any) -> Any:
        def leave(ops: Any, partial: Any, *, site: str) -> Any:
            if site != wanted or ops.size == 1:
                return before(ops, partial, site=site)
            took_effect()
            return partial

        return leave

    return lambda _: wrap(TensorGroupOps, "leave", make)


def _part(only: str, take: Callable[[Any, Any, Any, int], Any]) -> Plant:
    """Another part of one weight: take(before, split, whole, index)."""

    def make(before: Any) -> Any:
        def part(split: Any, whole: Any, index: int) -> Any:
            if only not in split.name:
                return before(split, whole, index)
            took_effect()
            return take(before, split, whole, index).clone()

        return part

    return lambda _: wrap(ParameterSplit, "part", make)


def _fused_as_one(_: Any, split: Any, whole: Any, index: int) -> Any:
    """Queries, keys and values are taken for one."""
    rows = whole.shape[0] // split.size
    return whole.narrow(0, index * rows, rows)


def _other_part(before: Any, split: Any, whole: Any, index: int) -> Any:
    return before(split, whole, split.size - 1 - index)


def _one_word_less(before: Any) -> Any:
    """The first worker leaves the last word of its range to the second one, which does not have it."""

    def found(sections: Any, *, size: int, index: int) -> Any:
        [(start, stop)] = before(sections, size=size, index=index)
        took_effect()
        return [(start, stop - 1 if index == 0 else stop)]

    return found


def _completed(times: int) -> Plant:
    def make(before: Any) -> Any:
        def complete(sharding: Any, parameters: Any) -> None:
            took_effect()
            for _ in range(times):
                before(sharding, parameters)

        return complete

    return lambda _: wrap(TensorParallelGradients, "complete", make)


def _turned_gather(tensor: Tensor, group: Any, *, dim: int, sections: Any) -> Tensor:
    """The gathered whole has its elements in another order."""
    take, _, _ = collectives._moves(group, dim, sections)

    def collect(part: Tensor) -> Tensor:
        return collectives.gathered(part, group, dim=dim, sections=sections).flip(dim)

    return collectives._cross(tensor, collect, take)


def _own_part_only(tensor: Tensor, group: Any, *, dim: int, sections: Any) -> Tensor:
    """Backward takes one's part of the gradient, and the others' are lost."""
    take, collect, _ = collectives._moves(group, dim, sections)
    return collectives._cross(tensor, collect, take)


ERRORS: tuple[PlantedError, ...] = (
    PlantedError(
        what="gradient of a column layer's input is not summed",
        plan="tensor=2",
        plant=replaced(collectives, "copy_to_group", lambda tensor, group: tensor),
        expected=("model.head",),
    ),
    PlantedError(
        what="partial results are summed and doubled",
        plan="tensor=2",
        plant=result(collectives, "total", lambda one: one * 2),
        expected=("model.words",),
    ),
    PlantedError(
        what="a row layer's partial results are not summed",
        plan="tensor=2",
        plant=_not_summed_at("blocks.0.down"),
        expected=("model.blocks.0.down",),
    ),
    PlantedError(
        what="a row layer's bias is dropped",
        plan="tensor=2",
        plant=_row("blocks.1.out", lambda module, ops, out: out - module.bias),
        is_early=True,
        expected=("model.blocks.1.out",),
    ),
    PlantedError(
        what="a row layer's bias is added by each worker",
        plan="tensor=2",
        plant=_row("blocks.0.down", lambda module, ops, out: out + module.bias * (ops.size - 1)),
        is_early=True,
        expected=("model.blocks.0.down",),
    ),
    PlantedError(
        what="wrong slice of a fused qkv",
        plan="tensor=2",
        plant=_part("blocks.0.qkv", _fused_as_one),
        is_early=True,
        expected=("model.blocks.0.qkv",),
    ),
    PlantedError(
        what="a worker loads another's part of a weight",
        plan="tensor=2",
        plant=_part("blocks.0.out.weight", _other_part),
        is_early=True,
        expected=("model.blocks.0.out",),
    ),
    PlantedError(
        what="a worker's range of the vocabulary is too short",
        plan="tensor=2",
        plant=lambda _: wrap(layers, "ranges", _one_word_less),
        expected=("model.words",),
    ),
    PlantedError(
        what="parts are gathered in another order",
        plan="tensor=2",
        plant=replaced(collectives, "gather", _turned_gather),
        expected=("model.head",),
    ),
    PlantedError(
        what="weights are not made equal at the start",
        plan="tensor=2",
        is_early=True,
        plant=replaced(model_layout, "send_from_first", lambda tensors, group: None),
        expected=("model*",),
        program=unequal_text,
        reference=text,
    ),
    PlantedError(
        what="a layer norm's gradient is not summed (Megatron-LM #1446)",
        plan="tensor=2+sequence=true",
        plant=_completed(0),
        expected=WHOLE,
    ),
    PlantedError(
        what="a layer norm's gradient is summed twice",
        plan="tensor=2+sequence=true",
        plant=_completed(2),
        expected=WHOLE,
    ),
    PlantedError(
        what="backward of gathered tokens keeps one worker's gradient",
        plan="tensor=2+sequence=true",
        plant=replaced(collectives, "gather_for_group", _own_part_only),
        expected=("model.head",),
    ),
)
