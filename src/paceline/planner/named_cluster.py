"""Clusters by the names that users give: of the catalogue, or of a TOML file of their own."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from paceline.config import load_toml
from paceline.errors import PlanError
from paceline.planner.cluster import Catalogue, Cluster, catalogue, load_catalogue
from paceline.units import gigabytes_text

__all__ = ["NamedCluster", "cluster_named"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NamedCluster:
    """A cluster with the name that the user gave, and the catalogue that it is from. `receipts`: the file beside the
    user's own, where measured steps are kept; None for a cluster of the catalogue.
    """

    name: str
    cluster: Cluster
    known: Catalogue
    receipts: Path | None = None

    def __str__(self) -> str:
        device = self.cluster.device
        return (
            f"{self.name}: {self.cluster.hosts} x {self.cluster.devices_per_host} {device.name}, "
            f"{gigabytes_text(device.memory)} GB each, {self.cluster.network / 1e9:g} GB/s between hosts"
        )


def cluster_named(name: str, workers: int) -> NamedCluster:
    """Return the cluster of the catalogue, or of a TOML file of the same form, with hosts for so many workers.

    A file may be followed by the cluster's name in it: `mine.toml:two-hosts`.
    """
    path, _, wanted = name.partition(":")
    known = catalogue()
    if not path.endswith(".toml"):
        found = known.cluster(name)
        hosts = max(found.hosts, math.ceil(workers / found.devices_per_host))
        return NamedCluster(name=name, cluster=dataclasses.replace(found, hosts=hosts), known=known)
    names = list(load_toml(Path(path)).get("clusters", {}))
    wanted = wanted or (names[0] if len(names) == 1 else "")
    if not wanted:
        raise PlanError(f"{path} describes {len(names)} clusters: name one of them, as {path}:NAME.")
    known = load_catalogue(Path(path), base=known)
    found = known.cluster(wanted)
    if wanted in names and workers > found.devices:
        raise PlanError(
            f"{path}: [clusters.{wanted}] has {found.hosts} hosts of {found.devices_per_host} devices, too few for "
            f"{workers} workers: give it hosts = {math.ceil(workers / found.devices_per_host)}."
        )
    return NamedCluster(name=wanted, cluster=found, known=known, receipts=Path(path).with_suffix(".receipts.jsonl"))
