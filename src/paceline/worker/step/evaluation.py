"""Exact evaluation over uneven shares: every sample is counted once, on one worker, and nothing is padded.

Samples in dataset order are split into micro-batches that do not depend on the number of workers. Each worker runs a
contiguous part; sums and counts are all-reduced once, at the end, in float64.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.comm.group import WorkerGroup, total
from paceline.parallel.fully_sharded.sharded_model import ShardedModels
from paceline.parallel.precision import computing, input_dtype
from paceline.schedule.micro_batches import micro_batches, split_among_replicas
from paceline.worker.data import random_state
from paceline.worker.data.evaluation_data import EvaluationData
from paceline.worker.data.step_batch import to_device
from paceline.worker.step.model_buffers import BufferAverager
from paceline.worker.topology.parallel_groups import ParallelGroups, single_worker_replicas

if TYPE_CHECKING:
    from paceline.worker.step.pipeline_stages import PipelineModel, PipelinePass

__all__ = ["Measure", "evaluate"]

Measure = Callable[[Any, Any], Any]
ROUNDS = 2  # micro-batches in the pipeline at once, for each stage


def evaluate(
    model: nn.Module,
    data: EvaluationData,
    measures: Mapping[str, Measure],
    *,
    group: WorkerGroup,
    device: torch.device,
    precision: str,
    seeds: tuple[int, ...],
    timeout_s: float = 0.0,
    forward: Callable[[nn.Module, Any], tuple[Any, Any]] | None = None,
    axes: ParallelGroups | None = None,
    shards: ShardedModels | None = None,
    staged: PipelineModel | None = None,
) -> dict[str, float]:
    """Return each measure's exact mean over the data, equal on all workers; all must call it.

    A measure gets (output, target) of a micro-batch and returns its mean (weighted by the number of samples) or (sum,
    count). `forward(model, micro)` returns (output, target) for datasets that do not give (input, target). The model is
    in eval mode meanwhile, without gradients. Random state is seeded for each micro-batch from `seeds`, and restored
    afterwards; buffers that change in eval mode (observers, say) are put back after each micro-batch. Where `axes`
    split replicas, all of their workers make as many forwards, some of them void; `shards` are their models. A pipeline
    parallel model (`staged`) is measured by the worker of its last stage.
    """
    axes = single_worker_replicas(group) if axes is None else axes
    buffers = BufferAverager()
    buffers.add(model)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    sums = {name: [0.0, 0.0] for name in measures}
    if shards is not None:
        shards.close()  # what was gathered before is out of date
    try:
        with torch.no_grad(), random_state.PreservedRandomState():
            runs = (
                (number, count, to_device(micro, device, input_dtype(precision)), is_void)
                for number, count, micro, is_void in _micros(data, group, seeds, axes, timeout_s)
            )

            def output_of(moved: Any) -> tuple[Any, Any]:
                return forward(model, moved) if forward else _run_pair(model, moved)

            def measure_all(output: Any, target: Any, count: int) -> None:
                for name, measure in measures.items():
                    value, weight = _sum_and_count(name, measure(output, target), count)
                    sums[name][0] += value
                    sums[name][1] += weight

            if staged is not None:
                pipelined = staged.evaluation(output_of, key=getattr(forward, "__code__", forward))
                for count, (output, target) in _through_pipeline(runs, pipelined, axes.stages.size, buffers, seeds):
                    with computing(precision, device):
                        measure_all(output, target, count)
                runs = ()
            for number, count, moved, is_void in runs:
                random_state.seed_all(*seeds, number)
                with computing(precision, device):
                    output, target = output_of(moved)
                    if not is_void and axes.counts:
                        measure_all(output, target, count)
                buffers.give_up()
    finally:
        buffers.give_up()
        if shards is not None:
            shards.close()
        for module, mode in modes:
            module.training = mode
    flat = total(group, [number for pair in sums.values() for number in pair], what="evaluation", device=device)
    return {name: flat[2 * i] / flat[2 * i + 1] if flat[2 * i + 1] else math.nan for i, name in enumerate(measures)}


def _through_pipeline(
    runs: Iterable[tuple[int, int, Any, bool]],
    pipelined: PipelinePass,
    num_stages: int,
    buffers: BufferAverager,
    seeds: tuple[int, ...],
) -> Iterator[tuple[int, tuple[Any, Any]]]:
    """(number of samples, (output, target)) of each run that counts, on the last stage's worker; several are in
    the pipeline at once."""

    @contextlib.contextmanager
    def around(some: list[tuple[int, int, Any, bool]], number: int) -> Iterator[None]:
        random_state.seed_all(*seeds, some[number][0])
        yield
        buffers.give_up()

    waiting = iter(runs)
    while some := list(itertools.islice(waiting, ROUNDS * num_stages)):
        outputs = pipelined.evaluate(
            [moved for _, _, moved, _ in some],
            around=functools.partial(around, some),
        )
        for (_, count, _, is_void), output in zip(some if outputs else (), outputs, strict=True):
            if not is_void:
                yield count, output


def _micros(
    data: EvaluationData, group: WorkerGroup, seeds: tuple[int, ...], axes: ParallelGroups, timeout_s: float
) -> Iterator[tuple[int, int, Any, bool]]:
    """(index, number of samples, collated data, is void) of this worker's runs."""
    micros = micro_batches(0, len(data.dataset), data.micro)
    index, size = axes.share_of(group)
    each = axes.micro_batch_peers.size
    share = split_among_replicas(len(micros), replicas=size // each, each=each)[index]
    read = data.read([micros[number] for number in share.reads], seeds=seeds, timeout_s=timeout_s)
    found: Any = None
    for number in range(share.num_runs):
        item = micros[share.reads[min(number, len(share.reads) - 1)]]
        if number < len(share.reads):
            found = next(read)
        yield item.index, item.num_samples, found, number >= len(share.own)


def _run_pair(model: nn.Module, data: Any) -> tuple[Any, Any]:
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        raise ValueError(
            "worker.evaluate() needs (input, target) samples; for others pass forward=fn, where fn(model, micro) "
            "returns (output, target)"
        )
    return model(data[0]), data[1]


def _sum_and_count(name: str, value: Any, num_samples: int) -> tuple[float, float]:
    if isinstance(value, (tuple, list)):
        if len(value) != 2:
            raise ValueError(f"measure {name!r} returned {len(value)} values; return the mean, or (sum, count)")
        return float(value[0]), float(value[1])
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(
            f"measure {name!r} returned shape {list(value.shape)}; return the mean over the micro-batch, or (sum, "
            "count)"
        )
    return float(value) * num_samples, float(num_samples)
