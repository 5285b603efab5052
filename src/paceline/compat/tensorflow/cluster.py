"""The cluster of a TensorFlow program, as its variable TF_CONFIG describes it: pure functions.

Without parameter servers all tasks are workers, and the first of them is the chief by TensorFlow's own convention. With
servers one more task, the chief, drives the workers (`tf.distribute.ParameterServerStrategy`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence

from paceline.plan.program_tasks import task_names

__all__ = ["TaskPlace", "address_text", "places_of", "tasks_on", "tf_config", "visible_gpus_of"]

TYPES = {"chief": "chief", "worker": "worker", "server": "ps"}  # TensorFlow's name of each kind of task


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TaskPlace:
    """One task of a cluster: what messages call it, and its type and number in TensorFlow's words."""

    name: str  # "worker 1", "chief", "server 0"
    type: str  # "worker" | "chief" | "ps"
    index: int
    has_servers: bool  # a chief drives this cluster, and the others only serve it

    @property
    def computes(self) -> bool:
        """Whether it computes gradients, and has use of a GPU."""
        return self.type == "worker"

    @property
    def drives(self) -> bool:
        """Whether the run ends when this task has."""
        return self.type == "chief"

    @property
    def serves(self) -> bool:
        """Whether it waits for the chief's orders for ever, so that it has to be ended."""
        return self.has_servers and not self.drives

    @property
    def is_replaceable(self) -> bool:
        """Whether the others go on while it is lost, so that it alone is started again: the state is on the servers."""
        return self.has_servers and self.type == "worker"


def places_of(processes: int, servers: int | None) -> tuple[TaskPlace, ...]:
    """Return the tasks of a job, by rank.

    Example::

        [(place.type, place.index) for place in places_of(4, 1)]
        # [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0)]
    """
    places: list[TaskPlace] = []
    for name in task_names(processes, servers):
        kind, _, index = name.partition(" ")
        places.append(TaskPlace(name=name, type=TYPES[kind], index=int(index or 0), has_servers=servers is not None))
    return tuple(places)


def tf_config(rank: int, places: Sequence[TaskPlace], addresses: Sequence[str]) -> str | None:
    """Return the value of TF_CONFIG for the task of this rank; `addresses` are HOST:PORT of all, by rank.

    None for a task that is alone: it is no cluster, and a program with `MirroredStrategy` would take one for remote
    devices.
    """
    if len(places) == 1:
        return None
    cluster: dict[str, list[str]] = {}
    for place, address in zip(places, addresses, strict=True):
        cluster.setdefault(place.type, []).append(address)
    own = places[rank]
    return json.dumps({"cluster": cluster, "task": {"type": own.type, "index": own.index}})


def address_text(host: str, port: int) -> str:
    """Return "HOST:PORT", an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def visible_gpus_of(
    rank: int, places: Sequence[TaskPlace], *, here: Collection[int], gpus: Sequence[str], device: str
) -> tuple[str, ...] | None:
    """Return the GPUs of this host that a task may see, an even share for each task that computes; None: as it is.

    `here` are the ranks of the tasks on this host. A task that only serves or drives gets none, nor does any with
    `device` "cpu", or where there are fewer GPUs than tasks that compute.

    Example::

        visible_gpus_of(1, places_of(2, None), here=[0, 1], gpus=["0", "1", "2", "3"], device="auto")  # ("2", "3")
    """
    if not gpus:
        return None
    sharing = [other for other in sorted(here) if places[other].computes]
    if device == "cpu" or rank not in sharing or len(gpus) < len(sharing):
        return ()
    each, place = len(gpus) // len(sharing), sharing.index(rank)
    return tuple(gpus[place * each : (place + 1) * each])


def tasks_on(told: Mapping[int, Mapping[str, object]], host_index: int) -> list[int]:
    """Return the ranks that have said that they are on this host."""
    return sorted(rank for rank, one in told.items() if one.get("host_index") == host_index)
