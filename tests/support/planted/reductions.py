"""Errors of sums over workers, missing, doubled, stale or over the wrong group: replicas, shard and context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from paceline.comm.sharded_tensors import local_part
from paceline.parallel.context import collectives as context_collectives
from paceline.parallel.fully_sharded.collectives import ShardAllGather, ShardReduceScatter
from paceline.sync.allreduce.buckets import Bucket
from paceline.sync.allreduce.gradient_buckets import GradientBuckets
from paceline.sync.allreduce.gradient_reducer import GradientReducer
from planted.planting import ALL, Plant, PlantedError, after_land, bound, replaced, took_effect, wrap
from planted.programs import unclipped_text

__all__ = ["ERRORS", "scaled", "scaled_land", "unsummed"]


def scaled(name: str, factor: float, *, on: Callable[[Any], bool] = lambda _: True) -> Plant:
    """The summed gradient of one parameter is another on some workers."""

    def change(worker: Any, parameters: Any) -> None:
        if name in parameters and on(worker):
            took_effect()
            local_part(parameters[name].grad).mul_(factor)

    return after_land(change)


def scaled_land(factor: float) -> Plant:
    """All gradients are divided by another count."""

    def make(before: Any) -> Any:
        def land(gradients: Any, *, scale: float) -> None:
            took_effect()
            before(gradients, scale=scale * factor)

        return land

    return lambda _: wrap(GradientReducer, "land", make)


def unsummed(name: str) -> Plant:
    """Each worker keeps its own gradient of one parameter."""
    own: dict[str, Tensor] = {}

    def plant(_: Any) -> None:
        def begin(before: Any) -> Any:
            def call(bucket: Any) -> None:
                for one, parameter in zip(bucket.names, bucket.parameters, strict=True):
                    if one == name and parameter.grad is not None:
                        own[name] = local_part(parameter.grad).clone()
                before(bucket)

            return call

        def land(before: Any) -> Any:
            def call(gradients: Any, *, scale: float) -> None:
                before(gradients, scale=scale)
                named = dict(zip(gradients.names, gradients.parameters, strict=True))
                if name in own:
                    took_effect()
                    local_part(named[name].grad).copy_(own.pop(name)).mul_(scale)

            return call

        wrap(Bucket, "_begin", begin)
        wrap(GradientReducer, "land", land)

    return plant


def _stale(name: str) -> Plant:
    kept: dict[str, Tensor] = {}

    def change(worker: Any, parameters: Any) -> None:
        now = parameters[name].grad.clone()
        if name in kept:
            took_effect()
            parameters[name].grad.copy_(kept[name])
        kept[name] = now

    return after_land(change)


def _in_bf16(worker: Any, parameters: Any) -> None:
    took_effect()
    for parameter in parameters.values():
        parameter.grad.copy_(parameter.grad.bfloat16().to(parameter.grad.dtype))


def _over_other_workers(_: Any) -> None:
    """What is whole on the workers of a tensor parallel group is summed over these, and not over the replicas."""

    def make(before: Any) -> Any:
        def group_of(buckets: Any, parameter: Any) -> Any:
            [sharding] = buckets._shardings
            if sharding.has_part(parameter):
                return before(buckets, parameter)
            took_effect()
            return sharding.group

        return group_of

    wrap(GradientBuckets, "_group_of", make)


def _scattered(unit: str, change: Callable[[Tensor, Tensor], object]) -> Plant:
    """Change what comes of a unit's sum by rows: change(rows, what was sent)."""

    def make(before: Any) -> Any:
        def scatter(one: Any, *args: Any, **kwargs: Any) -> Any:
            if unit not in one._unit:
                return before(one, *args, **kwargs)
            took_effect()
            given = bound(before, one, *args, **kwargs)
            sent = given["input_tensor"].clone()
            work = before(one, *args, **kwargs)
            if work is not None:
                work.wait()
            change(given["output_tensor"], sent.view(2, -1)[one._over.index])
            return work

        return scatter

    return lambda _: wrap(ShardReduceScatter, "__call__", make)


def _other_rows(unit: str) -> Plant:
    """Rows of another worker: the parts are sent in the reverse order."""

    def make(before: Any) -> Any:
        def scatter(one: Any, *args: Any, **kwargs: Any) -> Any:
            if unit not in one._unit:
                return before(one, *args, **kwargs)
            took_effect()
            given = bound(before, one, *args, **kwargs)
            sent = given.pop("input_tensor")
            given["input_tensor"] = sent.view(2, -1).flip(0).reshape(-1).contiguous()
            return before(given.pop("self"), **given)

        return scatter

    return lambda _: wrap(ShardReduceScatter, "__call__", make)


def _stale_gather(unit: str) -> Plant:
    kept: dict[str, Tensor] = {}

    def make(before: Any) -> Any:
        def gather(one: Any, *args: Any, **kwargs: Any) -> Any:
            work = before(one, *args, **kwargs)
            if unit in one._unit:
                took_effect()
                if work is not None:
                    work.wait()
                output = bound(before, one, *args, **kwargs)["output_tensor"]
                output.copy_(kept.setdefault(one._unit, output.clone()))
            return work

        return gather

    return lambda _: wrap(ShardAllGather, "__call__", make)


def _is_first(worker: Any) -> bool:
    return worker.rank == 0


BLOCK_0, BLOCK_1 = ((f"model.blocks.{n}", f"model.blocks.{n}.*") for n in (0, 1))

ERRORS: tuple[PlantedError, ...] = (
    PlantedError(
        what="a gradient is not summed over the replicas",
        plan="replicas=2",
        plant=unsummed("model.blocks.1.up.weight"),
        expected=("model.blocks.1.up",),
    ),
    PlantedError(
        what="a gradient is summed twice over the replicas",
        plan="replicas=2",
        plant=scaled("model.blocks.0.qkv.weight", 2.0),
        expected=("model.blocks.0.qkv",),
    ),
    PlantedError(
        what="a stale gradient of one parameter",
        plan="replicas=2",
        plant=_stale("model.blocks.1.up.weight"),
        expected=("model.blocks.1.up",),
    ),
    PlantedError(
        what="a gradient of the first worker is lost",
        plan="replicas=2",
        plant=scaled("model.blocks.1.down.weight", 0.0, on=_is_first),
        expected=("model.blocks.1.down",),
    ),
    PlantedError(
        what="gradients are summed in bfloat16",
        plan="replicas=2",
        plant=after_land(_in_bf16),
        expected=ALL,
    ),
    PlantedError(
        what="gradients are summed over the wrong group",
        plan="replicas=2+tensor=2",
        plant=_over_other_workers,
        expected=("model.places", "model.norm", "model.blocks.*.before", "model.blocks.*.between", "model.blocks.*.*"),
        program=unclipped_text,
        is_early=True,
    ),
    PlantedError(
        what="rows are not summed over the replicas",
        plan="replicas=2+shard=2",
        plant=unsummed("model.blocks.1.up.weight"),
        expected=("model.blocks.1.up",),
    ),
    PlantedError(
        what="the sum of a unit's rows is doubled",
        plan="shard=2",
        plant=_scattered("blocks.1", lambda rows, _: rows.mul_(2)),
        expected=BLOCK_1,
    ),
    PlantedError(
        what="a unit's rows are not summed",
        plan="shard=2",
        plant=_scattered("blocks.0", lambda rows, own: rows.copy_(own.view_as(rows))),
        expected=BLOCK_0,
    ),
    PlantedError(
        what="rows are scattered over the wrong group",
        plan="shard=2",
        plant=_other_rows("blocks.0"),
        expected=BLOCK_0,
    ),
    PlantedError(
        what="a stale gather of a unit's weights",
        plan="shard=2",
        plant=_stale_gather("blocks.1"),
        expected=BLOCK_1,
    ),
    PlantedError(
        what="gradients of rows are not divided by the count",
        plan="shard=2+zero=1",
        plant=scaled_land(0.5),
        expected=ALL,
        program=unclipped_text,
    ),
    PlantedError(
        what="the loss of all tokens is not summed",
        plan="context=2",
        plant=replaced(context_collectives, "total", lambda tensor, group: tensor),
        expected=ALL,
    ),
    PlantedError(
        what="gradients are not divided by the workers of a sequence",
        plan="context=2",
        plant=scaled_land(2.0),
        expected=ALL,
        program=unclipped_text,
    ),
    PlantedError(
        what="a gradient is not summed over the workers of a sequence",
        plan="context=2",
        plant=unsummed("model.blocks.1.between.weight"),
        expected=("model.blocks.1.between",),
    ),
)
