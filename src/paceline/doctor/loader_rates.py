"""How fast a script's data comes: its own dataset and options, read as `worker.batches` would; nothing is computed."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from paceline.doctor.measured import ReadingRate
from paceline.parallel.meta.tensor_tree import tensors_in
from paceline.schedule.micro_batches import MicroBatch, micro_batches, split_evenly, step_ranges
from paceline.worker.data.data_loading import (
    MapReader,
    MicroBatchRequest,
    ReadOptions,
    StepItems,
    StreamReader,
    open_loader,
    require_fit,
)
from paceline.worker.data.data_request import is_map_style
from paceline.worker.data.lane_steps import lane_steps
from paceline.worker.script_inspection import ScriptData

__all__ = ["reading_rate"]

PROC = Path("/proc")
FIRST_S = 10.0  # at most, for what loaders have read before the clock starts; after it the first micro-batch counts
ENDLESS = 1 << 40  # epochs


def reading_rate(
    data: ScriptData, *, index: int, readers: int, seconds: float, pin: bool, timeout_s: float
) -> ReadingRate:
    """Return the rate at which a worker gets its micro-batches, where `readers` workers share each step and this is
    the one with `index`.

    The start of loader processes and what they read ahead of it do not count. Measured for about `seconds`. Raises what
    the dataset raises; ValueError for an empty one; RuntimeError where loaders give nothing for `timeout_s`.
    """
    request, started = data.request, time.perf_counter()
    before = {child.pid for child in psutil.Process().children()}
    items = _items(data, index=index, readers=readers, pin=pin, timeout_s=timeout_s)
    _, num_bytes = next(items)
    first_s = time.perf_counter() - started
    for _ in range(request.loaders * request.prefetch):
        if time.perf_counter() - started > FIRST_S:
            break
        next(items)
    own = psutil.Process()
    processes = [one for one in own.children() if one.pid not in before] if request.loaders else [own]
    (by_calls, from_disk), busy_s = _bytes_read(processes), _processor_s(processes)
    began, samples, num_bytes = time.perf_counter(), 0, 0
    while samples == 0 or time.perf_counter() - began < seconds:
        more, size = next(items)
        samples, num_bytes = samples + more, num_bytes + size
    took = time.perf_counter() - began
    calls_later, disk_later = _bytes_read(processes)
    stored, busy_s = max(0, calls_later - by_calls, disk_later - from_disk), max(0.0, _processor_s(processes) - busy_s)
    return ReadingRate(
        samples_per_s=samples / took,
        bytes_per_sample=num_bytes / samples,
        stored_per_sample=stored / samples,
        busy_cores=busy_s / took / max(1, len(processes)),
        first_s=first_s,
        loaders=request.loaders,
        prefetch=request.prefetch,
        is_iterable=not is_map_style(request.dataset),
    )


def _items(data: ScriptData, *, index: int, readers: int, pin: bool, timeout_s: float) -> Iterator[tuple[int, int]]:
    """Samples and bytes of each micro-batch, without end."""
    batch, request = data.plan.batch, data.request
    dataset, draws, loaders, prefetch = request.dataset, request.draws, request.loaders, request.prefetch
    num_samples = len(dataset) if is_map_style(dataset) else 0
    if draws is not None:
        require_fit(draws, "train", num_samples=num_samples, shuffle=batch.shuffle)
        num_samples = draws.num_samples
    reading = ReadOptions(dataset, request.collate, num_samples, batch.seed, batch.shuffle and num_samples > 0, draws)

    def mine(start: int, stop: int) -> tuple[MicroBatch, ...]:
        micros = micro_batches(start, stop, batch.resolved_micro)
        own = split_evenly(len(micros), readers)[index]
        return micros[own.start : own.stop]

    if request.lanes:
        steps = lane_steps(
            reading,
            request.lanes,
            request.mixing,
            batch=batch,
            epochs=ENDLESS,
            mine=mine,
            loaders=loaders,
            prefetch=prefetch,
            pin=pin,
            timeout_s=timeout_s,
        )
        for _, start, found in steps:
            for micro, one in zip(mine(start, start + found.num_samples), found.data, strict=True):
                yield micro.num_samples, _num_bytes(one)
        return
    if not is_map_style(dataset):
        reader = StreamReader(
            reading,
            size=batch.size,
            micro=batch.resolved_micro,
            drop_last=batch.drop_last,
            first_epoch=0,
            epochs=ENDLESS,
            position=0,
            mine=mine,
        )
        loader = open_loader(reader, None, loaders=loaders, prefetch=prefetch, pin=pin, timeout_s=timeout_s)
        yield from _of_steps(loader, mine)
        return

    def of_epoch() -> Iterator[MicroBatch]:
        for step in step_ranges(num_samples=num_samples, size=batch.size, drop_last=batch.drop_last):
            yield from mine(*step)

    if next(of_epoch(), None) is None:
        raise ValueError(f"{num_samples} samples in steps of {batch.size} give worker {index} of {readers} none")
    requests, counted = itertools.tee(
        MicroBatchRequest(epoch, micro) for epoch in range(ENDLESS) for micro in of_epoch()
    )
    loader = open_loader(MapReader(reading), requests, loaders=loaders, prefetch=prefetch, pin=pin, timeout_s=timeout_s)
    for request, micro in zip(counted, loader, strict=True):
        yield request.micro.num_samples, _num_bytes(micro)


def _of_steps(
    loader: Iterator[StepItems], mine: Callable[[int, int], Sequence[MicroBatch]]
) -> Iterator[tuple[int, int]]:
    """The same of an iterable, whose items come by steps. Raises ValueError after an epoch without any of ours."""
    position, ours = 0, 0
    for items in loader:
        if items.num_samples == 0:  # the end of an epoch
            if not ours:
                raise ValueError("an epoch of the iterable dataset gives this worker no sample")
            position = ours = 0
            continue
        micros = mine(position, position + items.num_samples)
        position += items.num_samples
        for micro, one in zip(micros, items.data, strict=True):
            ours += micro.num_samples
            yield micro.num_samples, _num_bytes(one)


def _num_bytes(micro: Any) -> int:
    return sum(one.numel() * one.element_size() for one in tensors_in(micro))


def _bytes_read(processes: Sequence[psutil.Process]) -> tuple[int, int]:
    """What processes have read from files since they began: by calls, from the cache too, and from the disk itself
    (also files that are mapped into memory). 0 where the kernel does not tell.
    """
    by_calls = from_disk = 0
    for process in processes:
        with contextlib.suppress(OSError):
            text = (PROC / str(process.pid) / "io").read_text()
            fields = dict(line.split(": ") for line in text.splitlines())
            by_calls += int(fields["rchar"])
            from_disk += int(fields["read_bytes"])
    return by_calls, from_disk


def _processor_s(processes: Sequence[psutil.Process]) -> float:
    """Processor time of processes; one that has ended is left out."""
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total
