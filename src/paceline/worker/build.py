"""Builds a worker: makes its collaborators in their order, and connects them.

The plan decides which of several implementations a collaborator has: how replicas agree between steps, whether there
are parameter servers. Nothing is sent here except what resuming a run needs.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from paceline.errors import PlanError
from paceline.events import Note, Warned
from paceline.host_memory import free_bytes
from paceline.plan import ParameterServer, Plan
from paceline.worker.data.micro_batch_size import MicroBatchSize
from paceline.worker.elastic_state import ElasticState
from paceline.worker.health.numerical_guard import NumericalGuard
from paceline.worker.health.replica_comparison import ReplicaComparison
from paceline.worker.health.weight_digest import WeightDigester
from paceline.worker.lifecycle import WorkerLifecycle
from paceline.worker.loop.step_mode_for import step_mode_for
from paceline.worker.loop.training_loop import TrainingLoop
from paceline.worker.membership.join_run import WorkerContext
from paceline.worker.membership.worker_collectives import WorkerCollectives
from paceline.worker.parts import WorkerParts
from paceline.worker.record.run_files import RunFiles
from paceline.worker.state.checkpoint_saving import CheckpointSaver
from paceline.worker.state.codec_state import CodecState
from paceline.worker.state.frozen_weights import FrozenWeights
from paceline.worker.state.memory_checkpointing import MemoryCheckpointer
from paceline.worker.state.model_context import ModelContext
from paceline.worker.state.owner_splits import OwnerSplits
from paceline.worker.state.prepared_models import PreparedModels
from paceline.worker.state.prepared_objects import PreparedObjects
from paceline.worker.state.resumed_state import ResumedState
from paceline.worker.state.rounded_states import RoundedStates
from paceline.worker.state.run_state import Carrier, RunState, StateContents, describe_run
from paceline.worker.state.state_registry import StateRegistry
from paceline.worker.step.gradient_pass import StepExecutor
from paceline.worker.worker import Worker

if TYPE_CHECKING:
    from paceline.sync.parameter_server.client import ServerClient
    from paceline.sync.parameter_server.embedding_tables import EmbeddingTables

__all__ = ["build_worker", "server_client"]


def build_worker(
    *,
    rank: int,
    plan: Plan,
    place: WorkerContext,
    device: torch.device,
    files: RunFiles,
    host: str,
    timeout_s: float,
) -> tuple[Worker, WorkerLifecycle]:
    """Make the worker of this process, and what ends it; resumes the run where there is something to resume from."""
    builder = _Builder(rank=rank, plan=plan, place=place, device=device, files=files, host=host, timeout_s=timeout_s)
    parts = builder.build()
    loop = builder.connect(parts)
    lifecycle = WorkerLifecycle(parts, loop)
    lifecycle.resume(place.begins_with)
    return Worker(parts, loop), lifecycle


class _Builder:
    """Makes the parts of one worker, and then its loop. Some parts call the loop, but only in steps."""

    def __init__(
        self,
        *,
        rank: int,
        plan: Plan,
        place: WorkerContext,
        device: torch.device,
        files: RunFiles,
        host: str,
        timeout_s: float,
    ) -> None:
        self._rank, self._plan, self._place, self._device = rank, plan, place, device
        self._files, self._host, self._timeout_s = files, host, timeout_s
        self._mode = step_mode_for(plan)
        self._scope = self._mode.scope(plan, place)
        self._own = self._scope.place
        self._sizes = MicroBatchSize(plan.batch, start=files.assignment.micro)
        self._loop: TrainingLoop  # set by `connect`

    def build(self) -> WorkerParts:
        """Make all parts in the order in which they need each other."""
        place, executor = self._place, self._executor()
        servers = server_client(
            self._plan,
            place,
            device=self._device,
            files=self._files,
            host=self._host,
            timeout_s=self._timeout_s,
        )
        tables = _tables(servers)
        models = self._models(executor, servers, tables)
        executor.hooks.gather = models.gathered
        executor.writes.digests = executor.state.digests = WeightDigester().digests
        registry = StateRegistry(self._device)
        executor.agreement.optimizers = registry.optimizers
        codec_state = CodecState(self._plan.wire, models=models, registry=registry, axes=place.axes)
        contents = StateContents(registry, codec_state, FrozenWeights(registry, place.axes))
        resumed = self._resumed(contents)
        saver = self._saver(contents, resumed, models)
        prepared = PreparedObjects(
            self._plan,
            registry,
            resumed=resumed,
            buffers=executor.buffers,
            emit=self._files.emit,
            splits=OwnerSplits(self._plan, registry, models, self._own.axes, executor.shards.traffic),
            rounded=RoundedStates(self._plan, registry),
        )
        return WorkerParts(
            rank=self._rank,
            plan=self._plan,
            device=self._device,
            host=self._host,
            timeout_s=self._timeout_s,
            place=place,
            scope=self._scope,
            files=self._files,
            sizes=self._sizes,
            executor=executor,
            collectives=self._collectives(executor),
            servers=servers,
            tables=tables,
            models=models,
            codec_state=codec_state,
            contents=contents,
            resumed=resumed,
            prepared=prepared,
            saver=saver,
            numerical_guard=self._numerical_guard(contents),
            memory_checkpointer=self._memory_checkpointer(contents, saver),
        )

    def connect(self, parts: WorkerParts) -> TrainingLoop:
        """Make the loop over these parts. List what the run's state is, and have the other workers reach it."""
        self._loop = TrainingLoop(parts, self._mode)
        describe_run(
            parts.contents,
            losses=parts.executor.losses,
            loss_scale=parts.executor.loss_scale if parts.executor.loss_scale.is_used else None,
            rounded=parts.prepared.rounded if parts.prepared.rounded.is_used else None,
            streams=self._loop.between.positions,
            sizes=parts.sizes,
            attempt=self._files.attempt,
            loop=self._loop,
            guard=parts.numerical_guard,
            memory_checkpointer=parts.memory_checkpointer,
        )
        self._place.attach(ElasticState(parts, self._loop))
        return self._loop

    def _executor(self) -> StepExecutor:
        scope, group, layout = self._scope, self._place.group, self._plan.layout
        executor = StepExecutor(
            self._plan,
            group=scope.group,
            consensus=scope.vote,
            device=self._device,
            axes=scope.axes,
            measures_noise=self._files.measures_noise,
            num_shares=lambda: group.size // layout.tensor,
            sizes=self._sizes,
        )
        if self._files.capture is not None or self._files.module_capture is not None:
            executor.shortage.halves = False  # numbers are compared with those of a run that has not
        return executor

    def _collectives(self, executor: StepExecutor) -> WorkerCollectives:
        return WorkerCollectives(
            group=self._place.group,
            consensus=self._place.consensus,
            setup_replay=self._place.setup_replay,
            device=self._device,
            is_in_step=lambda: executor.under_way,
            is_apart=lambda: self._loop.mode.is_apart,
            catch_up=lambda: self._loop.mode.catch_up(),
        )

    def _models(
        self, executor: StepExecutor, servers: ServerClient | None, tables: EmbeddingTables | None
    ) -> PreparedModels:
        consensus = self._place.consensus
        context = ModelContext(
            plan=self._plan,
            group=self._own.group,
            axes=self._own.axes,
            shards=executor.shards,
            recorder=self._place.recorder,
            together=consensus.run,
            note=self._note,
            servers=servers,
            tables=tables,
            generation=lambda: consensus.generation,
            worker_rank=self._rank,
        )
        return PreparedModels(context)

    def _resumed(self, contents: StateContents) -> ResumedState:
        return ResumedState(
            contents,
            plan=self._plan,
            group=self._place.group,
            consensus=self._place.consensus,
            axes=self._place.axes,
            files=self._files,
            timeout_s=self._timeout_s,
        )

    def _saver(self, contents: StateContents, resumed: ResumedState, models: PreparedModels) -> CheckpointSaver:
        return CheckpointSaver(
            self._plan,
            contents,
            resumed=resumed,
            group=self._place.group,
            axes=self._place.axes,
            files=self._files,
            store=self._place.shared,
            timeout_s=self._timeout_s,
            states_here=models.reducers.states_here,
        )

    def _numerical_guard(self, contents: StateContents) -> NumericalGuard:
        comparison = ReplicaComparison(
            worker_rank=self._rank,
            host=self._host,
            group=self._own.axes.expert_replica_group,
            together=self._place.consensus.run,
            registry=contents.registry,
            files=self._files,
        )
        return NumericalGuard(self._plan.guard, contents=contents, files=self._files, comparison=comparison)

    def _memory_checkpointer(self, contents: StateContents, saver: CheckpointSaver) -> MemoryCheckpointer:
        place, plan = self._place, self._plan

        def state() -> dict[str, Any]:
            return RunState.capture(contents, Carrier.MEMORY, step=self._loop.step, worker=self._rank).to_dict()

        return MemoryCheckpointer(
            place.memory_checkpoint if plan.keeps_snapshots else None,
            plan.guard,
            is_split=place.axes.is_split or contents.codecs.is_kept or plan.is_local,
            group=place.group,
            together=place.consensus.run,
            state=state,
            done=saver.release,
            host=self._host,
            free_bytes=free_bytes,
            emit=self._files.emit,
            report_snapshot=place.consensus.kept,
        )

    def _note(self, text: str) -> None:
        """Emit a note once: on the first worker."""
        if self._place.is_first(self._rank):
            self._files.emit(Note(text=text))


def server_client(
    plan: Plan, place: WorkerContext, *, device: torch.device, files: RunFiles, host: str, timeout_s: float
) -> ServerClient | None:
    """The parameter servers, where the plan has some; none is started yet."""
    if not isinstance(plan.sync, ParameterServer):
        return None
    if device.type != "cpu":
        raise PlanError(
            f"ParameterServer(...) is built for the CPU so far, not for {device.type}. Use "
            "sync=AllReduce(), or device='cpu'."
        )
    from paceline.sync.parameter_server.client import ServerClient
    from paceline.sync.parameter_server.mirrored_client import MirroredServerClient

    make = functools.partial(MirroredServerClient, tell=files.emit) if plan.sync.mirrored else ServerClient
    servers = make(
        plan.sync.servers,
        store=place.shared,
        attempt=files.attempt,
        address=place.address,
        host=host,
        timeout_s=timeout_s,
        check=place.consensus.check,
        say=lambda text: files.emit(Warned(text=text)),
        holds_back=plan.sync.staleness != 0 or plan.sync.drop > 0,
        recorder=place.recorder,
    )
    if plan.sync.mirrored or (plan.is_asynchronous and plan.layout.is_elastic):
        servers.silence_s = files.silence_s
    return servers


def _tables(servers: ServerClient | None) -> EmbeddingTables | None:
    """The embedding tables that servers will hold by rows, where there are servers; none is known yet."""
    if servers is None:
        return None
    from paceline.sync.parameter_server.embedding_tables import EmbeddingTables

    return EmbeddingTables(servers)
