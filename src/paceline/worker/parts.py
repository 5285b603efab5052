"""The collaborators of one worker, as `paceline.worker.build` puts them together."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from paceline.plan import Plan
from paceline.worker.data.micro_batch_size import MicroBatchSize
from paceline.worker.health.numerical_guard import NumericalGuard
from paceline.worker.membership.join_run import WorkerContext
from paceline.worker.membership.worker_collectives import WorkerCollectives
from paceline.worker.record.run_files import RunFiles
from paceline.worker.state.checkpoint_saving import CheckpointSaver
from paceline.worker.state.codec_state import CodecState
from paceline.worker.state.memory_checkpointing import MemoryCheckpointer
from paceline.worker.state.prepared_models import PreparedModels
from paceline.worker.state.prepared_objects import PreparedObjects
from paceline.worker.state.resumed_state import ResumedState
from paceline.worker.state.run_state import StateContents
from paceline.worker.step.gradient_pass import StepExecutor
from paceline.worker.step.step_scope import StepScope

if TYPE_CHECKING:
    from paceline.sync.parameter_server.client import ServerClient
    from paceline.sync.parameter_server.embedding_tables import EmbeddingTables

__all__ = ["WorkerParts"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerParts:
    """What a worker is made of, beneath its training loop.

    `place` has the groups of the whole run. `scope.place` is the same place as this worker's steps see it: under
    asynchronous updates a worker takes steps alone, so its groups have size one there.
    """

    rank: int
    plan: Plan
    device: torch.device
    host: str
    timeout_s: float
    place: WorkerContext
    scope: StepScope
    files: RunFiles
    sizes: MicroBatchSize
    executor: StepExecutor
    collectives: WorkerCollectives
    servers: ServerClient | None  # None: the plan has no parameter servers
    tables: EmbeddingTables | None
    models: PreparedModels
    codec_state: CodecState
    contents: StateContents  # the list of what the run's state is
    resumed: ResumedState
    prepared: PreparedObjects
    saver: CheckpointSaver
    numerical_guard: NumericalGuard
    memory_checkpointer: MemoryCheckpointer
