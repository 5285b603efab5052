"""An examination as a cluster file, which `paceline plan --cluster FILE` reads."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence

from paceline.doctor.measured import CollectiveTime, Examination, WorkerRates
from paceline.planner.constants import Constants, built_in

__all__ = ["cluster_toml"]

LEAST_S = 1e-6  # that is told apart from nothing
REFERENCE_WATTS = 400 / 312e12  # of an A100, for each operation: with it, no throttling is added to what was measured


def cluster_toml(seen: Examination, *, name: str, when: str) -> str:
    """Return the file's text: the slowest worker as the device, the slowest pair as the network.

    The planner takes a share of each link and of the network, because published rates are nominal. What was measured is
    already that share, so it is written as the rate of which it would be.
    """
    return "\n".join(_lines(seen, name, when)) + "\n"


def _lines(seen: Examination, name: str, when: str) -> Iterator[str]:
    constants = built_in().constants
    slowest = min(seen.workers, key=lambda one: one.matmul["fp32"])
    source = f"measured by paceline doctor on {when}, {len(seen.workers)} workers at once, torch {seen.torch}"
    yield "# Measured by paceline doctor; the slowest worker and pair count. paceline plan SCRIPT --cluster THIS-FILE"
    yield ""
    yield f"[devices.{json.dumps(name)}]"
    yield f"memory_gb = {min(one.memory for one in seen.workers) / 1e9:.4g}"
    yield f"memory_gb_s = {min(one.memory_bandwidth for one in seen.workers) / 1e9:.4g}"
    rates = ", ".join(f"{key} = {_least(seen, key) / constants.matmul / 1e12:.4g}" for key in slowest.matmul)
    yield f"tflops = {{ {rates} }}"
    yield f"best_matmul = {{ {', '.join(f'{key} = 1.0' for key in slowest.matmul)} }}"
    attention = min(one.attention for one in seen.workers) / constants.attention / 1e12
    yield f"attention = {{ flash = {attention:.4g}, vendor = {attention:.4g} }}"
    yield "units = 1"
    yield f"watts = {_least(seen, 'bf16') / constants.matmul * REFERENCE_WATTS:.4g}"
    yield f"link_gb_s = {_link(seen, slowest, constants) / 1e9:.4g}"
    yield f"network_gb_s = {_network(seen, slowest, constants) / 1e9:.4g}"
    if seen.all_reduce:
        smallest_s = min(seen.all_reduce, key=lambda one: one.num_bytes).seconds
        doublings = math.log2(len(seen.workers)) + 1
        yield f"latency_us = {smallest_s / 2 / doublings * 1e6:.4g}  # an all-reduce is two collectives"
    if seen.sync_wait_s:
        yield f"sync_wait_us = {seen.sync_wait_s * 1e6:.4g}  # after a millisecond of work"
    for kind, times in (("gather", seen.gathers), ("scatter", seen.reduce_scatters)):
        if times:
            yield f"{kind}_gb_s = {_parted_rate(times, len(seen.workers)) / 1e9:.4g}"
    if seen.gathers:
        yield f"gather_latency_us = {seen.gathers[0].seconds * 1e6:.4g}"
    if seen.sharding:
        first, last = seen.sharding[0], seen.sharding[-1]
        for what, small_s, large_s in (
            ("gather", first.gather_s, last.gather_s),
            ("sum", first.sum_s, last.sum_s),
        ):
            yield f"shard_{what}_us = {max(small_s, LEAST_S) * 1e6:.4g}"
            more_s = max(large_s - small_s, LEAST_S)
            yield f"shard_{what}_gb_s = {(last.num_bytes - first.num_bytes) / more_s / 1e9:.4g}"
    if slowest.device == "cpu":
        yield f"runtime_gb = {max(one.runtime for one in seen.workers) / 1e9:.4g}"
        yield f"launch_us = {statistics.median(one.launch_s for one in seen.workers) * 1e6:.4g}"
        yield "synchronous = true"
    yield f"source = {json.dumps(source)}"
    yield ""
    yield f"[clusters.{json.dumps(name)}]"
    yield f"device = {json.dumps(name)}"
    yield f"hosts = {seen.hosts}"
    if seen.hosts > 1 and not seen.all_reduce and all(pair.bandwidth is None for pair in seen.pairs):
        yield "# no pair of hosts could be measured: network_gb_s is that within a host, not of the network"
    yield f"devices_per_host = {seen.per_host}"
    yield f"network_gb_s = {_network(seen, slowest, constants) / 1e9:.4g}"
    yield f"source = {json.dumps(source)}"
    for pair in seen.pairs:
        yield ""
        yield "[[pairs]]"
        yield f"hosts = {json.dumps([pair.first, pair.second])}"
        if pair.error is not None:
            yield f"error = {json.dumps(pair.error)}"
            continue
        yield f"latency_us = {(pair.latency_s or 0.0) * 1e6:.4g}"
        yield f"gb_s = {(pair.bandwidth or 0.0) / 1e9:.4g}"
        yield f"clock_ahead_ms = {(pair.clock_ahead_s or 0.0) * 1e3:.4g}"


def _parted_rate(times: Sequence[CollectiveTime], workers: int) -> float:
    """Bytes per second that reach each worker, beyond what a small tensor takes: (n - 1) / n of the whole one."""
    small, large = times[0], times[-1]
    more_s = max(large.seconds - small.seconds, 0.1 * large.seconds)
    return (large.num_bytes - small.num_bytes) * (workers - 1) / workers / more_s


def _least(seen: Examination, precision: str) -> float:
    return min(one.matmul[precision] for one in seen.workers)


def _link(seen: Examination, slowest: WorkerRates, constants: Constants) -> float:
    """Within a host: what an all-reduce reached, or, with one worker on each, half of what its memory moves."""
    measured = seen.bus_bandwidth if seen.hosts == 1 else seen.host_link
    return (measured or slowest.memory_bandwidth / 2) / constants.link


def _network(seen: Examination, slowest: WorkerRates, constants: Constants) -> float:
    """Of a host: what its slowest pair reached, or the all-reduce if that is less; on one host as much as within it."""
    rates = [pair.bandwidth for pair in seen.pairs if pair.bandwidth is not None]
    rates += [seen.network_rate] if seen.network_rate is not None else []
    return min(rates) / constants.network if rates else _link(seen, slowest, constants)
