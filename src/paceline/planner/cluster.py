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
BUILT_IN = Path(__file__).with_name("catalogue.toml")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """An accelerator. Rates are bytes or operations per second, `link` in one direction to other devices of its host.

    `peak` and `best_matmul` are by precision ("bf16", "fp16", "fp8", "fp32"), `attention` by kernel ("flash",
    "vendor"), with half of the pairs of a causal model. `network` is what a host of such devices usually has.
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

    def peak_of(self, precision: str) -> float:
        """The peak in a precision; in one that the device lacks, that of bf16."""
        return self.peak.get(precision, self.peak["bf16"])

    def best_of(self, precision: str) -> float:
        """The best measured rate of a product, as a share of `peak_of`."""
        return self.best_matmul.get(precision if precision in self.peak else "bf16", self.best_matmul["bf16"])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """`hosts` hosts of `devices_per_host` devices each; `network` is bytes per second of one host in one direction."""

    device: Device
    hosts: int
    devices_per_host: int
    network: float

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
    odd = tables.keys() - {"devices", "clusters"}
    if odd:
        raise PlanError(f"{path} has a table {sorted(odd)[0]!r}; it may have [devices.NAME] and [clusters.NAME].")
    devices = dict(base.devices) if base else {}
    aliases = dict(base.aliases) if base else {}
    clusters = dict(base.clusters) if base else {}
    for name, table in tables.get("devices", {}).items():
        devices[name] = _read(path, f"devices.{name}", lambda table=table, name=name: _device(name, table))
        aliases |= {str(other).lower(): name for other in table.get("names", [])}
    for name, table in tables.get("clusters", {}).items():
        clusters[name] = _read(path, f"clusters.{name}", lambda table=table: _cluster(table, devices))
    return Catalogue(devices=devices, clusters=clusters, aliases=aliases)


def _read(path: Path, where: str, make: Any) -> Any:
    try:
        return make()
    except KeyError as error:
        raise PlanError(f"{path}: [{where}] lacks {error.args[0]!r}, or names what is not there.") from error
    except (TypeError, ValueError) as error:
        raise PlanError(f"{path}: [{where}] is not understood: {error}.") from error


def _device(name: str, table: Mapping[str, Any]) -> Device:
    return Device(
        name=name,
        memory=float(table["memory_gb"]) * GB,
        memory_bandwidth=float(table["memory_gb_s"]) * GB,
        peak={str(key): float(value) * 1e12 for key, value in table["tflops"].items()},
        best_matmul={str(key): float(value) for key, value in table["best_matmul"].items()},
        attention={str(key): float(value) * 1e12 for key, value in table["attention"].items()},
        units=int(table["units"]),
        watts=float(table["watts"]),
        link=float(table["link_gb_s"]) * GB,
        network=float(table["network_gb_s"]) * GB,
        source=str(table["source"]),
    )


def _cluster(table: Mapping[str, Any], devices: Mapping[str, Device]) -> Cluster:
    return Cluster(
        device=devices[str(table["device"])],
        hosts=int(table["hosts"]),
        devices_per_host=int(table["devices_per_host"]),
        network=float(table["network_gb_s"]) * GB,
    )
