"""An examination in words, as worker 0 prints it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.doctor.findings import ClusterFinding
from paceline.doctor.measured import Examination, ScriptReading
from paceline.units import bytes_text, duration_text, gigabytes_text

__all__ = ["reading_lines", "report_lines"]

SLOWER = 2  # times: a precision of half the bytes should be faster than fp32
SHOWN = 512  # bytes of a sample that were read from files: less are messages to loader processes


def report_lines(seen: Examination, found: Sequence[ClusterFinding]) -> Iterator[str]:
    """The examination in words, what is wrong at the end."""
    hosts = dict.fromkeys(one.host for one in seen.workers)
    yield (
        f"examined {len(seen.workers)} {'worker' if len(seen.workers) == 1 else 'workers'} on "
        f"{', '.join(list(hosts)[:8])}{' ...' if len(hosts) > 8 else ''}, all at once, in {duration_text(seen.took_s)}"
    )
    kinds = ", ".join(dict.fromkeys(one.device for one in seen.workers))
    yield f"devices  {kinds}, {gigabytes_text(min(one.memory for one in seen.workers))} GB for each worker"
    for name in seen.workers[0].matmul:
        rates = [one.matmul[name] for one in seen.workers]
        slower = min(one.matmul.get("fp32", 0.0) / one.matmul[name] for one in seen.workers)
        remark = f": {slower:.0f} times slower than fp32, so compute in fp32 here" if slower > SLOWER else ""
        yield f"compute  {_span(rates, 1e9, 'GFLOP/s')} of {name} matrix products{remark}"
    yield f"compute  {_span([one.attention for one in seen.workers], 1e9, 'GFLOP/s')} of fused attention"
    yield f"memory   {_span([one.memory_bandwidth for one in seen.workers], 1e9, 'GB/s')} read and written"
    yield f"launch   {_span([one.launch_s for one in seen.workers], 1e-6, 'us')} for a small operation"
    for one in seen.all_reduce:
        yield f"network  {duration_text(one.seconds)} for an all-reduce of {bytes_text(one.num_bytes)}"
    for kind, times in (("an all-gather", seen.gathers), ("a reduce-scatter", seen.reduce_scatters)):
        for one in times[-1:]:
            yield f"network  {duration_text(one.seconds)} for {kind} of {bytes_text(one.num_bytes)}"
    for one in seen.sharding[-1:]:
        yield (
            f"sharding {duration_text(one.gather_s)} to gather {bytes_text(one.num_bytes)} of a model, "
            f"{duration_text(one.sum_s)} to sum its gradients, with the copies around both"
        )
    if seen.sync_wait_s is not None:
        yield f"network  {duration_text(seen.sync_wait_s)} that workers wait for each other after 1 ms of work"
    if seen.bus_bandwidth is not None:
        yield f"network  {seen.bus_bandwidth / 1e9:.3g} GB/s of each worker's link in the largest (busbw)"
    if seen.host_link is not None:
        yield f"network  {seen.host_link / 1e9:.3g} GB/s of each worker's link within a host (busbw)"
    if seen.hosts > 1 and not seen.all_reduce:
        yield "network  no all-reduce was measured: a run needs each pair of hosts to reach each other"
    rates = [pair.bandwidth for pair in seen.pairs if pair.bandwidth is not None]
    if rates:
        delays = [pair.latency_s or 0.0 for pair in seen.pairs if pair.error is None]
        yield (
            f"hosts    {_span(rates, 1e9, 'GB/s')}, {_span(delays, 1e-6, 'us')} one way over TCP, {len(rates)} "
            f"{'pair' if len(rates) == 1 else 'pairs'}"
        )
    disks = [one for one in seen.workers if one.disk_write]
    if disks:
        yield (
            f"disk     {_span([one.disk_write for one in disks], 1e6, 'MB/s')} written, "
            f"{_span([one.disk_read for one in disks], 1e6, 'MB/s')} read"
        )
    yield from _finding_lines(found, "nothing is slower than it should be")


def reading_lines(reading: ScriptReading, found: Sequence[ClusterFinding]) -> Iterator[str]:
    """How fast a script's data comes, beside what its steps will take."""
    if reading.rates:
        rates = [one.samples_per_s for one in reading.rates]
        first = max(one.first_s for one in reading.rates)
        one = reading.rates[0]
        stored = max(one.stored_per_sample for one in reading.rates)
        files = f", {bytes_text(stored)} read from files" if stored >= SHOWN else ""
        yield (
            f"data     {_span(rates, 1, 'samples/s')} on each worker with loaders={one.loaders}, the first after "
            f"{duration_text(first)}; a sample has {bytes_text(one.bytes_per_sample)}{files}"
        )
    if reading.appetite is not None:
        yield (
            f"data     {_span([reading.appetite], 1, 'samples/s')} is what each worker's steps will take, as predicted "
            f"for {reading.plan}"
        )
    elif reading.rates:
        yield f"data     what steps will take is not known: {reading.no_appetite}"
    if found or reading.appetite is not None:
        yield from _finding_lines(found, f"the data of {reading.script} comes as fast as steps take it")


def _finding_lines(found: Sequence[ClusterFinding], none: str) -> Iterator[str]:
    if not found:
        yield f"findings none: {none}"
    for one in found:
        yield f"finding  {one.where}: {one.what}"
        yield f"         {one.remedy}"


def _span(values: Sequence[float], unit: float, name: str) -> str:
    low, high = (
        f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}" for value in (min(values) / unit, max(values) / unit)
    )
    return f"{low} {name}" if max(values) < 1.05 * min(values) else f"{low} to {high} {name}"
