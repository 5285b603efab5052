"""Other workers, networks, devices and batches than one has: `workers=16,32 link=25Gbit` as cases to be priced."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from paceline.config import suggest
from paceline.errors import PlanError
from paceline.plan import Plan
from paceline.plan.compute import defaults_but_of
from paceline.planner.cluster import Catalogue, Cluster

__all__ = ["CHANGES", "Variation", "rate_of", "read_changes", "variations", "with_workers"]

CHANGES = {
    "workers": "workers of the job: 16",
    "batch": "samples of a step: 512, or so many for each worker: 8/worker",
    "link": "network of a host, in one direction: 25Gbit, or 3GB a second",
    "device_link": "link between devices of a host, in one direction: 450GB",
    "per_host": "devices of a host: 8",
    "memory": "memory of a device: 40GB",
    "device": "another device of the catalogue: h200",
    "precision": "of compute: bf16, fp16, fp8 or fp32",
}
MOST_WORKERS = 10_000_000
MOST = 1000  # cases of one question
BYTES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
RATE = re.compile(r"([\d.]+(?:e[+-]?\d+)?)\s*([kmgt]?)(bits?|b|bytes?)?(?:/s|ps)?", re.IGNORECASE)

Changes = Mapping[str, Sequence[str]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Variation:
    """One case: what is changed, and all of what it is about. `plan` is None where its layout does not take `workers`;
    `asked` has the batch and precision in any case.
    """

    changed: Mapping[str, str]
    workers: int
    cluster: Cluster
    asked: Plan
    plan: Plan | None


def read_changes(words: Iterable[str]) -> dict[str, list[str]]:
    """Read `workers=16,32` and the like; PlanError for names that are not known, and for too many combinations."""
    found: dict[str, list[str]] = {}
    for word in itertools.chain.from_iterable(text.split() for text in words):
        name, equals, values = word.partition("=")
        if not equals or name not in CHANGES:
            known = "; ".join(f"{key}: {what}" for key, what in CHANGES.items())
            raise PlanError(f"{word!r} is nothing that may be changed.{suggest(name, CHANGES)} Known are {known}.")
        found[name] = found.get(name, []) + [value for value in values.split(",") if value]
        if not found[name]:
            raise PlanError(f"{word!r} has no value; write {CHANGES[name]}, or several with commas.")
    if math.prod(map(len, found.values())) > MOST:
        raise PlanError(f"These are {math.prod(map(len, found.values())):,} cases; ask for at most {MOST:,} at once.")
    return found


def rate_of(text: str) -> float:
    """Return bytes per second (or bytes): "25Gbit" and "25Gb" are bits, "3GB" bytes; PlanError for anything else."""
    matched = RATE.fullmatch(text.strip())
    number = _number(matched[1]) if matched else 0.0
    if matched is None or not 0 < number < math.inf:
        raise PlanError(f"{text!r} is no rate: write bits a second as 25Gbit, or bytes as 3GB.")
    unit = matched[3] or "B"
    bits = unit.lower().startswith("bit") or unit == "b"
    return number * BYTES[matched[2].lower()] / (8 if bits else 1)


def variations(
    plan: Plan, cluster: Cluster, known: Catalogue, changes: Changes, *, workers: int
) -> Iterator[Variation]:
    """Yield a case for each combination of values, in the order of `changes`; the last name's values go by first.

    A plan's cuts stay as they are: other workers mean more or fewer replicas. A cluster has as many hosts as they need.
    """
    for values in itertools.product(*changes.values()):
        changed = dict(zip(changes, values, strict=True))
        count = _whole(changed, "workers") or workers
        yield Variation(
            changed=changed,
            workers=count,
            cluster=_cluster(cluster, known, changed, count),
            asked=(asked := _asked(plan, changed, count)),
            plan=with_workers(asked, count),
        )


def with_workers(plan: Plan, workers: int) -> Plan | None:
    """Return the plan with as many replicas as so many workers make, or None where they do not."""
    each = plan.layout.workers_each
    if workers % each:
        return None
    made = dataclasses.replace(plan, layout=dataclasses.replace(plan.layout, replicas=workers // each))
    return None if made.check(workers=workers) else made


def _asked(plan: Plan, changed: Mapping[str, str], workers: int) -> Plan:
    batch, compute = plan.batch, plan.compute
    if "batch" in changed:
        text, per_worker, _ = changed["batch"].partition("/worker")
        size = (_whole({"batch": text}, "batch") or 1) * (workers if per_worker else 1)
        micro = min(batch.resolved_micro, size // workers if per_worker else size)
        batch = dataclasses.replace(batch, size=size, micro=max(1, micro))
    if "precision" in changed:
        if changed["precision"] not in ("bf16", "fp16", "fp8", "fp32"):
            raise PlanError(f"precision={changed['precision']} has no rates: write bf16, fp16, fp8 or fp32.")
        precision: Any = changed["precision"]
        compute = dataclasses.replace(compute, precision=precision, **defaults_but_of(precision))
    return dataclasses.replace(plan, batch=batch, compute=compute)


def _cluster(cluster: Cluster, known: Catalogue, changed: Mapping[str, str], workers: int) -> Cluster:
    device = known.device(changed["device"]) if "device" in changed else cluster.device
    if "memory" in changed:
        device = dataclasses.replace(device, memory=rate_of(changed["memory"]))
    if "device_link" in changed:
        device = dataclasses.replace(device, link=rate_of(changed["device_link"]))
    per_host = _whole(changed, "per_host") or cluster.devices_per_host
    network = rate_of(changed["link"]) if "link" in changed else cluster.network
    hosts = max(1, math.ceil(workers / per_host))
    return dataclasses.replace(cluster, device=device, hosts=hosts, devices_per_host=per_host, network=network)


def _whole(changed: Mapping[str, str], name: str) -> int | None:
    if name not in changed:
        return None
    number = _number(changed[name])
    if not 1 <= number <= MOST_WORKERS or number != int(number):
        raise PlanError(f"{name}={changed[name]} is no whole number from 1: write {CHANGES[name]}.")
    return int(number)


def _number(text: str) -> float:
    """Not a number where the text is none: then it lies in no range."""
    try:
        return float(text)
    except ValueError:
        return math.nan
