"""Devices and clusters as the planner sees them: rates and sizes, from the catalogue or a TOML file like it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config import load_toml, suggest
from paceline.errors import PlanError

__all__ = ["Catalogue", "Cluster", "Device", "catalogue", "load_catalogue"]

GB = 1e9
LAUNCH_S = 8e-6  # in eager torch: 5 to 10 us (PyTorch's CUDA graphs blog, 2021)
HOST_LINK = 25e9  # PCIe 4.0 x16 has 31.5 GB/s in each direction; copies of pinned memory reach 24 to 26
HOST_MEMORY = 300e9  # two sockets of 8 channels of DDR4-3200 have 410 GB/s; STREAM reaches three quarters
HOST_BYTES = 512e9  # of memory: what hosts of 8 devices have at least
DISK = 3e9  # one NVMe drive on PCIe 4.0 writes 3 to 5 GB/s for long
RUNTIME = 4e9  # CUDA context and libraries, some 1 GB; buffers of NCCL, workspaces of products
PER_SECOND = 1000.0**0.5  # waits after a second of work over those after a millisecond (doctor/sync_waits.py)
PRECISIONS = {"bf16", "fp16", "fp8", "fp32"}
BUILT_IN = Path(__file__).with_name("catalogue.toml")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """Measured in a step, with the copies around both: seconds of each unit that is gathered, and of each whose
    gradients are summed, and the bytes per second of both beyond that.
    """

    gather_s: float
    gather: float
    sum_s: float
    sum: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """An accelerator. Rates are bytes or operations per second, `link` in one direction to other devices of its host.

    `peak` and `best_matmul` are by precision ("bf16", "fp16", "fp8", "fp32"), `attention` by kernel ("flash",
    "vendor"), with half of the pairs of a causal model. `network` is what a host of such devices usually has.
    `host_link`: to the host's memory, for copies, in one direction. `gather` and `scatter`: bytes per second that reach
    a worker in an all-gather and a reduce-scatter among all of a host, and `gather_latency` the seconds of a small one,
    where they differ from an all-reduce's (CPUs). `sharding`: what splitting a model by rows adds to a step, where
    nothing of it is hidden, and `sync_wait` the seconds that workers wait for each other after a second of work (CPUs).
    """

    name: str
    memory: float
    memory_bandwidth: float
    peak: Mapping[str, float]
    best_matmul: Mapping[str, float]
    attention: Mapping[str, float]
    units: int
    watts: float
    link: float
    network: float
    source: str
    runtime: float = RUNTIME
    launch_s: float = LAUNCH_S
    is_synchronous: bool = False
    latency: float | None = None
    gather: float | None = None
    scatter: float | None = None
    gather_latency: float | None = None
    sharding: Sharding | None = None
    sync_wait: float | None = None
    host_link: float = HOST_LINK

    def peak_of(self, precision: str) -> float:
        """The peak in a precision; in one that the device lacks, that of bf16."""
        return self.peak.get(precision, self.peak["bf16"])

    def best_of(self, precision: str) -> float:
        """The best measured rate of a product, as a share of `peak_of`."""
        return self.best_matmul.get(precision if precision in self.peak else "bf16", self.best_matmul["bf16"])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """`hosts` hosts of `devices_per_host` devices each; `network` is bytes per second of one host in one direction, and
    so are its memory's bandwidth and its disk's. Its devices share them, and `host_memory`, in bytes.
    """

    device: Device
    hosts: int
    devices_per_host: int
    network: float
    host_memory: float = HOST_BYTES
    host_memory_bandwidth: float = HOST_MEMORY
    disk: float = DISK

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.devices_per_host < 1:
            raise PlanError(
                f"A cluster has {self.hosts} hosts of {self.devices_per_host} devices; give at least 1 each."
            )
        if not (math.isfinite(self.network) and self.network > 0):
            raise PlanError(f"A cluster's network is {self.network} bytes per second; it must be above 0.")

    @property
    def devices(self) -> int:
        return self.hosts * self.devices_per_host

    @classmethod
    def of(cls, device: Device, devices: int, *, devices_per_host: int, network: float | None = None) -> Cluster:
        """Return the cluster of so many devices; the last host may be only partly used."""
        per_host = min(devices, devices_per_host)
        return cls(
            device=device,
            hosts=math.ceil(devices / per_host),
            devices_per_host=per_host,
            network=network or device.network,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Catalogue:
    """Devices and clusters by name."""

    devices: Mapping[str, Device]
    clusters: Mapping[str, Cluster]
    aliases: Mapping[str, str]  # other names of devices, in lower case

    def device(self, name: str) -> Device:
        """Return the device of this name or alias; PlanError, with the nearest name, where there is none."""
        key = self.aliases.get(name.lower(), name.lower())
        if key in self.devices:
            return self.devices[key]
        raise PlanError(f"No device is called {name!r}.{suggest(name, self.devices)} Known: {', '.join(self.devices)}.")

    def cluster(self, name: str, *, hosts: int | None = None) -> Cluster:
        """Return the cluster of this name, with so many hosts."""
        if name not in self.clusters:
            raise PlanError(
                f"No cluster is called {name!r}.{suggest(name, self.clusters)} Known: {', '.join(self.clusters)}."
            )
        found = self.clusters[name]
        return found if hosts is None else dataclasses.replace(found, hosts=hosts)


@functools.cache
def catalogue() -> Catalogue:
    """The devices and clusters that Paceline knows."""
    return load_catalogue(BUILT_IN)


def load_catalogue(path: Path, *, base: Catalogue | None = None) -> Catalogue:
    """Read a TOML file of devices and clusters; its entries replace those of `base` of the same name.

    Raises PlanError that names the file, the table and what is wrong with it.
    """
    tables = load_toml(path)
    odd = tables.keys() - {"devices", "clusters", "pairs"}  # pairs: what `paceline doctor` notes of single ones
    if odd:
        raise PlanError(f"{path} has a table {sorted(odd)[0]!r}; it may have [devices.NAME] and [clusters.NAME].")
    devices = dict(base.devices) if base else {}
    aliases = dict(base.aliases) if base else {}
    clusters = dict(base.clusters) if base else {}
    for name, table in tables.get("devices", {}).items():
        devices[name] = _read(path, f"devices.{name}", lambda table=table, name=name: _device(name, table))
        aliases |= {str(other).lower(): name for other in table.get("names", [])}
    for name, table in tables.get("clusters", {}).items():
        clusters[name] = _read(path, f"clusters.{name}", lambda table=table: _cluster(table, devices, aliases))
    return Catalogue(devices=devices, clusters=clusters, aliases=aliases)


def _read(path: Path, where: str, make: Any) -> Any:
    try:
        return make()
    except KeyError as error:
        raise PlanError(f"{path}: [{where}] lacks {error.args[0]!r}, or names what is not there.") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise PlanError(f"{path}: [{where}] is not understood: {error}.") from error


def _number(table: Mapping[str, Any], key: str, *, most: float = math.inf) -> float:
    value = table[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most or math.isinf(value):
        raise ValueError(
            f"{key} is {value!r}; give a number above 0" + (f" and at most {most:g}" if most < 1e9 else "")
        )
    return float(value)


def _yes(table: Mapping[str, Any], key: str) -> bool:
    if not isinstance(table.get(key, False), bool):
        raise ValueError(f"{key} is {table[key]!r}; give true or false")
    return table.get(key, False)


def _whole(table: Mapping[str, Any], key: str) -> int:
    if not isinstance(table[key], int) or isinstance(table[key], bool):
        raise ValueError(f"{key} is {table[key]!r}; give a whole number")
    return int(_number(table, key))


def _known(table: Mapping[str, Any], keys: set[str]) -> None:
    for key in table.keys() - keys:
        raise ValueError(f"{key!r} is not known.{suggest(key, keys)}")


SHARDING_KEYS = ("shard_gather_us", "shard_gather_gb_s", "shard_sum_us", "shard_sum_gb_s")
DEVICE_KEYS = {
    *("names", "memory_gb", "memory_gb_s", "tflops", "best_matmul", "attention", "units", "watts", "link_gb_s"),
    *("network_gb_s", "source", "runtime_gb", "launch_us", "synchronous", "latency_us", "host_link_gb_s"),
    *("gather_gb_s", "scatter_gb_s", "gather_latency_us"),
    *SHARDING_KEYS,
    "sync_wait_us",
}
CLUSTER_KEYS = {
    *("device", "hosts", "devices_per_host", "network_gb_s", "source"),
    *("host_memory_gb", "host_memory_gb_s", "disk_gb_s"),
}


def _device(name: str, table: Mapping[str, Any]) -> Device:
    _known(table, DEVICE_KEYS)
    peak, best, attention = (dict(table[key]) for key in ("tflops", "best_matmul", "attention"))
    _known(peak, PRECISIONS)
    for part in (peak, best):
        _number(part, "bf16")
    return Device(
        name=name,
        memory=_number(table, "memory_gb") * GB,
        memory_bandwidth=_number(table, "memory_gb_s") * GB,
        peak={key: _number(peak, key) * 1e12 for key in peak},
        best_matmul={key: _number(best, key, most=1) for key in best},
        attention={key: _number(attention, key) * 1e12 for key in ("flash", "vendor")},
        units=_whole(table, "units"),
        watts=_number(table, "watts"),
        link=_number(table, "link_gb_s") * GB,
        network=_number(table, "network_gb_s") * GB,
        source=str(table["source"]),
        runtime=_number(table, "runtime_gb") * GB if "runtime_gb" in table else RUNTIME,
        launch_s=_number(table, "launch_us") / 1e6 if "launch_us" in table else LAUNCH_S,
        is_synchronous=_yes(table, "synchronous"),
        latency=_number(table, "latency_us") / 1e6 if "latency_us" in table else None,
        gather=_number(table, "gather_gb_s") * GB if "gather_gb_s" in table else None,
        scatter=_number(table, "scatter_gb_s") * GB if "scatter_gb_s" in table else None,
        gather_latency=_number(table, "gather_latency_us") / 1e6 if "gather_latency_us" in table else None,
        sharding=_sharding(table),
        sync_wait=_number(table, "sync_wait_us") / 1e6 * PER_SECOND if "sync_wait_us" in table else None,
        host_link=_number(table, "host_link_gb_s") * GB if "host_link_gb_s" in table else HOST_LINK,
    )


def _sharding(table: Mapping[str, Any]) -> Sharding | None:
    """All of it, or nothing."""
    if not any(key in table for key in SHARDING_KEYS):
        return None
    for key in SHARDING_KEYS:
        if key not in table:
            raise ValueError(f"{key} is missing: give all of {', '.join(SHARDING_KEYS)}, or none")
    return Sharding(
        gather_s=_number(table, "shard_gather_us") / 1e6,
        gather=_number(table, "shard_gather_gb_s") * GB,
        sum_s=_number(table, "shard_sum_us") / 1e6,
        sum=_number(table, "shard_sum_gb_s") * GB,
    )


def _cluster(table: Mapping[str, Any], devices: Mapping[str, Device], aliases: Mapping[str, str]) -> Cluster:
    _known(table, CLUSTER_KEYS)
    name = str(table["device"])
    return Cluster(
        device=devices[aliases.get(name.lower(), name)],
        hosts=_whole(table, "hosts"),
        devices_per_host=_whole(table, "devices_per_host"),
        network=_number(table, "network_gb_s") * GB,
        host_memory=_number(table, "host_memory_gb") * GB if "host_memory_gb" in table else HOST_BYTES,
        host_memory_bandwidth=_number(table, "host_memory_gb_s") * GB if "host_memory_gb_s" in table else HOST_MEMORY,
        disk=_number(table, "disk_gb_s") * GB if "disk_gb_s" in table else DISK,
    )
