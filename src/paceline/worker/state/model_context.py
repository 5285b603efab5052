"""What a worker's prepared models need of it: the plan, its groups, and how to reach the other workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.comm.flight_recorder import FlightRecorder
from paceline.comm.group import WorkerGroup
from paceline.parallel.fully_sharded.sharded_model import ShardedModels
from paceline.plan import Plan
from paceline.worker.membership.consensus import RunTogether
from paceline.worker.topology.parallel_groups import ParallelGroups

if TYPE_CHECKING:
    from paceline.sync.parameter_server.client import ServerClient
    from paceline.sync.parameter_server.embedding_tables import EmbeddingTables

__all__ = ["ModelContext"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelContext:
    """What the registry of models, their layout and their gradient reducers have in common."""

    plan: Plan
    group: WorkerGroup
    axes: ParallelGroups
    shards: ShardedModels
    recorder: FlightRecorder
    together: RunTogether  # does an operation of the whole run
    note: Callable[[str], None]  # gets a text on how a model is split
    generation: Callable[[], int]  # of the members
    worker_rank: int
    servers: ServerClient | None  # None: the plan has no parameter servers
    tables: EmbeddingTables | None  # the models' embedding tables on parameter servers
