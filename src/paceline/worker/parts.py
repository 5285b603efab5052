"""The collaborators of one worker, as `paceline.worker.build` puts them together."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from paceline.parallel.fully_sharded.sharded_model import ShardedModels
from paceline.plan import Plan
from paceline.worker.health.numerical_guard import NumericalGuard
from paceline.worker.loop.training_loop import TrainingLoop
from paceline.worker.membership.join_run import WorkerContext
from paceline.worker.membership.worker_collectives import WorkerCollectives
from paceline.worker.record.run_files import RunFiles
from paceline.worker.state.checkpoint_saving import CheckpointSaver
from paceline.worker.state.codec_state import CodecState
from paceline.worker.state.memory_checkpointing import MemoryCheckpointer
from paceline.worker.state.prepared_models import PreparedModels
from paceline.worker.state.prepared_objects import PreparedObjects
from paceline.worker.state.resumed_state import ResumedState

if TYPE_CHECKING:
    from paceline.sync.parameter_server.client import ServerClient
    from paceline.sync.parameter_server.embedding_tables import EmbeddingTables

__all__ = ["WorkerParts"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerParts:
    """What a worker is made of. `own` is the place as this worker's steps see it: under asynchronous updates a worker
    takes steps alone, so its groups have size one there. `place` has the groups of the whole run."""

    rank: int
    plan: Plan
    device: torch.device
    host: str
    timeout_s: float
    place: WorkerContext
    own: WorkerContext
    files: RunFiles
    shards: ShardedModels
    collectives: WorkerCollectives
    servers: ServerClient | None  # None: the plan has no parameter servers
    tables: EmbeddingTables | None
    models: PreparedModels
    codec_state: CodecState
    resumed: ResumedState
    prepared: PreparedObjects
    saver: CheckpointSaver
    numerical_guard: NumericalGuard
    memory_checkpointer: MemoryCheckpointer
    loop: TrainingLoop
