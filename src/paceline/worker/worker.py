"""The worker: what a training function is given, and all it needs.

One object per process. What it is made of has rooms of its own: `TrainingLoop` takes the steps, `CheckpointedObjects`
keeps what was prepared and its checkpoints, `WorkerCollectives` is what workers tell each other, `ElasticState` is the
state that all members have in common. Every public method is called by all workers, in the same order, between steps,
unless it says otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from paceline.comm.group import SingleWorkerGroup
from paceline.comm.memory_checkpoint import SnapshotSlot
from paceline.errors import PlanError
from paceline.events import Evaluated, Note, Warned
from paceline.host_memory import free_bytes
from paceline.parallel.check.model_hints import ModelHints
from paceline.plan import Gossip, LocalSGD, ParameterServer, Plan
from paceline.worker.data.batch_stream import StreamSource
from paceline.worker.data.data_loading import Collate
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.elastic_state import ElasticState
from paceline.worker.health.numerical_guard import NumericalGuard
from paceline.worker.health.replica_comparison import ReplicaComparison
from paceline.worker.loop.communication_rounds import CommunicationRounds, ReplicaVote
from paceline.worker.loop.gossip_rounds import GossipRounds
from paceline.worker.loop.stepper import Stepper, pair_loss
from paceline.worker.loop.streaming_rounds import StreamingRounds
from paceline.worker.loop.training_loop import TrainingLoop
from paceline.worker.membership.join_run import WorkerContext
from paceline.worker.membership.worker_collectives import WorkerCollectives
from paceline.worker.record.run_files import RunFiles
from paceline.worker.state.checkpointing import CheckpointedObjects
from paceline.worker.state.codec_state import CodecState
from paceline.worker.state.embedding_tables import require_row_updates, server_table_names
from paceline.worker.state.memory_checkpointing import MemoryCheckpointer, read_state
from paceline.worker.state.prepared_models import PreparedModels
from paceline.worker.state.state_dict import StateRegistry
from paceline.worker.step.evaluation import Measure, evaluate
from paceline.worker.step.gradient_pass import LossLike, StepExecutor
from paceline.worker.topology.device import peak_memory_bytes
from paceline.worker.topology.parallel_groups import single_worker_replicas

if TYPE_CHECKING:
    from paceline.sync.parameter_server.client import ServerClient
    from paceline.sync.parameter_server.embedding_tables import EmbeddingTables

__all__ = ["Worker"]

T = TypeVar("T")


class Worker:
    """One process of a run, normally with one device."""

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
        self.rank = rank
        self.plan = plan
        self.device = device
        self.host = host
        group, agreement = self._group, self._agreement = place.group, place.agreement
        self._place = place
        self._files, self._timeout_s, self._ring = files, timeout_s, place.ring
        own = place  # as its steps see it
        if plan.is_asynchronous:
            own = dataclasses.replace(
                place, group=SingleWorkerGroup(), axes=single_worker_replicas(SingleWorkerGroup())
            )
        self._own = own
        by_itself, measures_noise = ReplicaVote(agreement), files.measures_noise
        if plan.is_local:
            alone, whole = place.axes.by_itself(), place.axes.whole
            walks = StepExecutor(
                plan, group=whole, agreement=by_itself, device=device, axes=alone, measures_noise=measures_noise
            )
        else:
            walks = StepExecutor(
                plan,
                group=own.group,
                agreement=by_itself if plan.is_asynchronous else agreement,
                device=device,
                axes=own.axes,
                measures_noise=measures_noise,
            )
        self._shards = walks.shards
        self._talk = WorkerCollectives(
            group=group,
            agreement=agreement,
            prelude=place.prelude,
            device=device,
            is_in_step=lambda: walks.under_way,
            is_apart=lambda: self._loop.is_dealing,
            catch_up=lambda: self._loop.catch_up(),
        )
        self._servers = _servers(plan, place, device=device, files=files, host=host, timeout_s=timeout_s)
        self._tables = _tables(self._servers)
        self._models = PreparedModels(
            plan,
            group=own.group,
            axes=own.axes,
            shards=walks.shards,
            ring=place.ring,
            together=agreement.run,
            note=self._say,
            servers=self._servers,
            tables=self._tables,
            generation=lambda: agreement.generation,
            worker_rank=rank,
        )
        streams = isinstance(plan.sync, LocalSGD) and plan.sync.streams
        gossips = isinstance(plan.sync, Gossip)
        rounds = (StreamingRounds if streams else GossipRounds if gossips else CommunicationRounds)(
            plan,
            group=group,
            axes=place.axes,
            agreement=agreement,
            by_itself=by_itself,
            models=self._models,
            weights_changed=walks.shards.close,
        )
        registry = StateRegistry(device)
        self._memories = CodecState(plan.wire, models=self._models, registry=registry, axes=place.axes)
        self._prepared = CheckpointedObjects(
            plan,
            registry,
            group=group,
            agreement=agreement,
            device=device,
            buffers=walks.buffers,
            losses=walks.losses,
            files=files,
            axes=place.axes,
            memories=self._memories,
            store=place.shared,
            timeout_s=timeout_s,
            states_here=self._models.states_here,
        )
        self._numerical_guard = NumericalGuard(
            plan.guard,
            losses=walks.losses,
            registry=registry,
            files=files,
            comparison=ReplicaComparison(
                worker_rank=rank,
                host=host,
                group=own.axes.expert_replica_group,
                together=agreement.run,
                registry=registry,
                files=files,
            ),
            forget=self._memories.drop_error_feedback,
        )
        self._memory_checkpointer = MemoryCheckpointer(
            place.memory_checkpoint if plan.keeps_snapshots else None,
            plan.guard,
            is_split=place.axes.is_split or self._memories.is_kept or plan.is_local,
            group=group,
            together=agreement.run,
            state=lambda: {
                "worker": rank,
                "loop": self._loop.plain(),
                **self._prepared.snapshot(step=self.step, cursors=self._loop.cursors, is_own=True),
            },
            done=self._prepared.release,
            host=host,
            free_bytes=free_bytes,
            emit=files.emit,
            report_snapshot=agreement.kept,
        )
        self._loop = TrainingLoop(
            plan,
            place=own,
            everybody=group,
            walks=walks,
            models=self._models,
            prepared=self._prepared,
            memories=self._memories,
            guarding=self._numerical_guard,
            vaulting=self._memory_checkpointer,
            rounds=rounds,
            files=files,
        )
        place.attach(
            ElasticState(
                place=place,
                loop=self._loop,
                prepared=self._prepared,
                memories=self._memories,
                guarding=self._numerical_guard,
                vaulting=self._memory_checkpointer,
            )
        )
        self._resume(place.begins_with)

    def prepare(
        self,
        thing: T,
        *,
        name: str | None = None,
        sample: Any = None,
        cut: Mapping[str, str] | None = None,
        units: Sequence[str] = (),
        stages: Sequence[str] = (),
        tokenwise: Sequence[str] = (),
        experts: Sequence[str] = (),
    ) -> T:
        """Make a model, optimizer, scheduler or other stateful object part of the run; returns the same object.

        A model is converted, moved and wrapped in place as the plan says, and gets worker 0's weights. Prepare models
        before their optimizers, and optimizers before their schedulers. What has `state_dict` and `load_state_dict`
        goes into checkpoints under `name` (by default "model", "optimizer", "scheduler", "object", then "model_2", ...)
        and comes back from them. ValueError where tensors of two names could not be told apart in a checkpoint: a model
        "gan" beside an optimizer "gan.optim".

        Layouts that cut layers run a model once on a small input. Where it cannot be guessed, `sample` gives it: a
        batch of two as (x,) or {"input_ids": x}. `cut` names the roles of layers, in place of those that are found:
        {"layers.*.attn.q": "column", "layers.*.attn.out": "row"}.

        `units` names the modules that are gathered, recomputed or put on a stage as a whole, in place of the repeated
        blocks that are found: units=["layers.*", "head"].

        Layouts with stages need that input, too, and may be told which modules the stages after the first begin with:
        stages=["layers.4", "layers.8"]; otherwise they are cut to cost about the same. Layouts that share sequences
        (context) may be told which modules treat each token by itself though torch does not show it: routed experts,
        say, tokenwise=["layers.*.moe"]. Layouts that spread experts find those that have `num_experts`, or are lists;
        others are named: experts=["layers.*.moe.experts"].
        """
        if isinstance(thing, nn.Module):
            hints = ModelHints(
                sample=sample,
                cut=cut,
                units=units,
                stages=stages,
                tokenwise=tokenwise,
                experts=experts,
            )
            self._prepare_model(thing, name, hints)
        elif isinstance(thing, Optimizer):
            require_row_updates(thing, self._tables, self._prepared.registry.parameter_names())
            self._prepared.optimizer(thing, name)
            self._loop.follow(thing)
        elif self.plan.is_asynchronous and isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
            raise PlanError(
                f"worker.prepare() got a {type(thing).__name__} under ParameterServer(staleness=...) or (drop=...): "
                "each replica would count only its own batches. Set the rate from worker.step, which counts all: for "
                "group in optim.param_groups: group['lr'] = rate(worker.step), before step(batch); or use "
                "staleness=0 and drop=0."
            )
        elif callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None)):
            self._prepared.other(thing, name)
        else:
            raise TypeError(
                f"worker.prepare() got a {type(thing).__name__}; it takes models, optimizers, schedulers and "
                "whatever has "
                "state_dict() and load_state_dict(). Data goes to worker.batches()"
            )
        return thing

    def stepper(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        loss: Callable[[Any, Any], Any] | None = None,
        *,
        forward: Callable[[Any, Any], Any] | None = None,
        clip_norm: float | None = None,
    ) -> Stepper:
        """Return `step(batch) -> loss`: forward, backward, agree, clip, commit.

        `loss(output, target)` serves (input, target) batches; `forward(model, micro)` serves everything else. Either
        returns the mean over the micro-batch, or (sum, count), for example over tokens. `clip_norm` bounds the global
        norm of the averaged gradient.
        """
        models = [model] if isinstance(model, nn.Module) else list(model)
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        for one in models:
            if one not in self._models:
                raise ValueError(
                    f"worker.stepper() got a {type(one).__name__} that was not prepared: model = worker.prepare(model)"
                )
        for one in optimizers:
            if one not in self._prepared.registry.optimizers.values():
                raise ValueError(
                    f"worker.stepper() got {type(one).__name__} that was not prepared: optim = worker.prepare(optim)"
                )
            if isinstance(one, torch.optim.LBFGS):
                raise ValueError(
                    "LBFGS evaluates the loss many times per step and cannot be used with a stepper; use a "
                    "first-order optimizer"
                )
        if (loss is None) == (forward is None):
            raise ValueError("worker.stepper() needs either loss=fn(output, target) or forward=fn(model, micro)")
        if clip_norm is not None and clip_norm <= 0:
            raise ValueError(f"clip_norm is {clip_norm}; it must be more than 0, or None for no clipping")
        if forward is not None:
            loss_of = _bound(forward, model)
        elif len(models) > 1:
            raise ValueError("a stepper over several models needs forward=fn(models, micro)")
        else:
            loss_of = pair_loss(models[0], cast("Callable[[Any, Any], Any]", loss))
        gradients = self._models.sum_over(models)
        for one in optimizers:
            strangers = sum(not gradients.has(p) for group in one.param_groups for p in group["params"])
            if strangers:
                raise ValueError(
                    f"{type(one).__name__} holds {strangers} parameters that are not of this stepper's models: "
                    "their gradients "
                    "would not be averaged. Give the stepper all models: worker.stepper([a, b], optim, forward=...)"
                )
        return Stepper(
            self._loop,
            device=self.device,
            optimizers=optimizers,
            gradients=gradients,
            loss_of=loss_of,
            clip_norm=clip_norm,
            pipelined=self._models.pipelined(models, loss_of),
        )

    def batches(
        self,
        dataset: Any,
        *,
        epochs: int = 1,
        collate: Collate = default_collate,
        loaders: int = 0,
        prefetch: int = 2,
        name: str | None = None,
    ) -> Iterator[StepBatch]:
        """Yield one item a step: this worker's micro-batches of the global batch, from where the run stands.

        `loaders` processes read ahead, `prefetch` micro-batches each (0: this process reads). `name` tells streams
        apart in checkpoints and the ledger; by default "train", then "train_2", ... Each name has its own order of
        samples, so a loop `for epoch in range(n): for batch in worker.batches(data)` gets another order in each epoch.
        Such a loop cannot be resumed rightly in a later epoch: a stream that was finished gives nothing, but the code
        behind its loop runs again. Use `epochs=n`, and `batch.ends_epoch` for what is done once per epoch.
        """
        if epochs < 1:
            raise ValueError(f"epochs is {epochs}; it must be at least 1")
        if loaders < 0 or prefetch < 1:
            raise ValueError(f"loaders={loaders}, prefetch={prefetch}: loaders must be 0 or more, prefetch 1 or more")
        self._talk.begin_steps(keeps=self._memory_checkpointer.is_on)
        streams = self._loop.streams
        name = name or _unused("train", streams)
        if name in streams:
            raise ValueError(f"a stream named {name!r} exists already; give each call of worker.batches() its own name")
        source = StreamSource(
            dataset=dataset,
            epochs=epochs,
            collate=collate,
            loaders=loaders,
            prefetch=prefetch,
            pin=self.device.type == "cuda",
            name=name,
        )
        return self._loop.open(source, timeout_s=self._timeout_s)

    def backward(self, loss: LossLike) -> None:
        """Add a micro-batch's gradient, in the plain loop; `loss` is the mean over the micro-batch, or (sum, count).

        Gradients are averaged over all workers when the walk over the batch ends: then clip if you like,
        `optim.step()`, `optim.zero_grad()`.
        """
        self._loop.walks.backward(loss)

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Bound the global norm of the averaged gradients, in the plain loop; returns the norm before, 0-d.

        As torch.nn.utils.clip_grad_norm_, for every layout: where layers are cut, a worker's own parts of the gradients
        do not have the model's norm. Call it between the walk over a batch and `optim.step()`.
        """
        if max_norm <= 0:
            raise ValueError(f"clip_gradients({max_norm}): the norm must be more than 0")
        return self._loop.clip(max_norm)

    def evaluate(
        self,
        model: nn.Module,
        dataset: Any,
        measures: Mapping[str, Measure] | Measure,
        *,
        micro: int | None = None,
        collate: Collate = default_collate,
        forward: Callable[[nn.Module, Any], tuple[Any, Any]] | None = None,
    ) -> dict[str, float]:
        """Return exact means over a dataset with len() and [], equal on all workers; nothing is padded or counted
        twice.

        `measures` maps names to fn(output, target), which returns the mean over a micro-batch or (sum, count); one
        function alone is called "loss". `micro` samples are run at once (default: the plan's micro-batch).
        """
        self._talk.require_between_steps("worker.evaluate()")
        self._ring.begin("evaluation", self.step)
        began = time.perf_counter()
        named = measures if isinstance(measures, Mapping) else {"loss": measures}
        who = self._own if self._loop.is_dealing else self._place  # each by itself, on the weights that it has

        def measure() -> dict[str, float]:
            with self._loop.averaged():
                return evaluate(
                    model,
                    dataset,
                    named,
                    micro=micro or self.plan.batch.resolved_micro,
                    group=who.group,
                    device=self.device,
                    precision=self.plan.compute.precision,
                    seeds=(self.plan.batch.seed, 4, self.step),
                    collate=collate,
                    forward=forward,
                    axes=who.axes,
                    shards=self._shards,
                    staged=self._models.staged(model),
                )

        results = measure() if self._loop.is_dealing else self._talk.together(measure)
        took_s = time.perf_counter() - began
        self._files.emit(Evaluated(step=self.step, num_samples=len(dataset), metrics=results, duration_s=took_s))
        return results

    def report(self, **metrics: float | Tensor) -> None:
        """Note values for the console and all other sinks, which average a step's values over the workers that report
        them. Outside of the loop over batches the values are told at once."""
        self._loop.books.report(metrics)

    def save(self) -> None:
        """Save a checkpoint of the state after the last committed step; writing goes on in the background.

        Raises RuntimeError, on the first worker, where that has left a loop over dealt batches before its end.
        """
        self._talk.require_together("worker.save()")
        if self.is_first and self._loop.has_left:  # it writes; that another one has left does not change its state
            self._loop.require_common_step("worker.save()")
        self._loop.save()

    def restore(self, path: str | None = None) -> int:
        """Continue from a checkpoint: `path`, or the newest complete one of the run directory; returns its step (0:
        there is none).

        Objects that are prepared already are filled at once, others when they are prepared. A run directory with
        checkpoints is continued without this call. Files are compared with their checksums first: where
        those of `path` are damaged, all workers raise CheckpointError.
        """
        if self._loop.streams:
            raise RuntimeError("worker.restore() must come before worker.batches()")
        if self._prepared.is_recalled:
            self._say(f"worker.restore() changes nothing: the run goes on from memory, after step {self.step}")
            return self.step
        self._prepared.open(path)
        self._prepared.refill()
        self._loop.begin_at(self._prepared.step)
        self._files.begin(self._prepared.origin())
        if self.step:
            self._files.emit(Note(text=f"restored step {self.step} ({self._prepared.source})"))
        return self.step

    def _resume(self, begins_with: SnapshotSlot | None) -> None:
        if begins_with is not None:
            state = read_state(begins_with)
            self._prepared.recall(state, is_own=state["worker"] == self.rank)
            self._loop.fill(state["loop"])
            self._loop.begin_at(self._prepared.step)
        elif self._files.may_resume:
            self._prepared.open(None)
            self._loop.begin_at(self._prepared.step)
        self._files.begin(None if self._agreement.is_newcomer else self._prepared.origin())
        if self.step and not self._prepared.is_recalled:  # of that the supervisor has told
            self._files.emit(Note(text=f"resumed from step {self.step} ({self._prepared.source})"))

    def __repr__(self) -> str:
        return f"<worker {self.rank} of {self.workers} on {self.device}, step {self.step}>"

    @property
    def step(self) -> int:
        """How many steps are committed, over all attempts."""
        return self._loop.step

    @property
    def is_first(self) -> bool:
        """Whether this is the first worker: worker 0, or, after that was lost, the next one."""
        present = self._agreement.present
        return present[0] == self.rank if present else self._group.index == 0

    @property
    def workers(self) -> int:
        """How many workers take part at present."""
        return len(self._agreement.present) or self._group.size

    @property
    def replica(self) -> int:
        """The number of the replica that this worker belongs to."""
        return self.rank // self.plan.layout.workers_each

    def average(self, value: Tensor | float) -> Tensor:
        """Return the mean of a tensor or number over all workers."""
        return self._talk.average(value)

    def gather(self, value: T) -> list[T]:
        """Return every worker's value, in the order of their ranks, on every worker. Values are pickled."""
        return self._talk.gather(value)

    def broadcast(self, value: T, *, source: int | None = None) -> T:
        """Return the value of the worker whose rank is `source` on every worker; None: of the first one (`is_first`).

        Values are pickled. Raises ValueError, on all workers, where there is no such worker (any more).
        """
        return self._talk.broadcast(value, source=source)

    def wait(self) -> None:
        """Return when all workers have come here."""
        self._talk.wait()

    def end(self) -> None:
        """Close the run's books after the user's function has returned: last checkpoint, events, files."""
        self._ring.begin("ending", self.step)
        self._loop.leave()
        self._shards.close()
        self._loop.end_round()
        self._loop.books.leave()
        self._agreement.rejoin_group()
        if not self._agreement.is_newcomer:  # one that never came to a loop over batches has nothing to end

            def settle() -> None:
                self._group.barrier()  # who is still in a step finds this worker here, and not in another sum
                self._prepared.wait()  # for a save before the one of the end
                # A loop that was stopped has saved, unless who wrote that has been lost since. Any other is saved again
                # where its last step was saved already: code after the loop may have changed the state.
                is_newer = self._prepared.is_recalled or self.step > self._prepared.step
                lacks = is_newer and self._prepared.saved_at != self.step
                if self._loop.streams and self._files.saves_at_end and not self._loop.has_left:
                    gathered = self._memories.gather(keeps=self._prepared.writes)
                    if lacks or not self._loop.is_stopped:
                        self._loop.save(gathered)
                self._prepared.wait(is_end=True)  # who ends last has seen everybody's last words

            self._agreement.run(settle)
        self._prepared.close()
        if self._files.capture is not None:
            self._files.capture.weights(self._prepared.registry.models, self._models.whole)
        self._finish()

    def leave(self) -> None:
        """Close the books of a worker that leaves the run in good order, while it may go on without it."""
        self._loop.books.leave()
        self._prepared.close(is_left=True)
        self._finish()

    def _finish(self) -> None:
        if self._servers is not None:
            self._servers.close(others_stay=self._agreement.is_dismissed)
        held = self._prepared.registry.num_bytes
        self._files.finish(self.step, peak_memory_bytes=peak_memory_bytes(self.device), state_bytes=held)

    def blames_server(self, error: BaseException) -> bool:
        """Whether an error says that a parameter server was lost: then no worker is its cause."""
        return self._servers is not None and self._servers.is_told_lost(error)

    def tell_lost(self, _: object, error: BaseException | None, __: object) -> None:
        """At the end of a run, as `__exit__`: where the error is that a parameter server was lost, ask that all begin
        again, which ends this worker."""
        cause = self._servers.cause_of(error) if self._servers is not None else ""
        if cause:
            self._agreement.unserved(cause)

    def abandon(self) -> None:
        """After an error: forget the step under way, leave the servers, and give a checkpoint under way a moment to be
        committed."""
        self._loop.books.leave()
        if self._servers is not None:
            self._servers.close(at_once=True)  # this process may live on, and they would with it
        self._numerical_guard.abandon()
        self._prepared.abandon()

    def _prepare_model(self, model: nn.Module, name: str | None, hints: ModelHints) -> None:
        self._models.place(model, device=self.device, is_fresh=self._prepared.is_fresh(model, name), hints=hints)
        cuts, homes, tables = (
            self._models.slices(model),
            self._models.homes(model),
            server_table_names(model, self._tables),
        )
        self._models.add(model, self._prepared.model(model, name, cuts=cuts, homes=homes, tables=tables))

    def _say(self, text: str) -> None:
        if self.is_first:
            self._files.emit(Note(text=text))


def _servers(
    plan: Plan, place: WorkerContext, *, device: torch.device, files: RunFiles, host: str, timeout_s: float
) -> ServerClient | None:
    """The parameter servers, where the plan has some; none is started yet."""
    if not isinstance(plan.sync, ParameterServer):
        return None
    if device.type != "cpu":
        raise PlanError(
            f"ParameterServer(...) is built for the CPU so far, not for {device.type}. Use sync=AllReduce(), or "
            "device='cpu'."
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
        check=place.agreement.check,
        say=lambda text: files.emit(Warned(text=text)),
        holds_back=plan.sync.staleness != 0 or plan.sync.drop > 0,
        ring=place.ring,
    )
    if plan.sync.mirrored or (plan.is_asynchronous and plan.layout.is_elastic):
        servers.silence_s = files.silence_s
    return servers


def _tables(servers: ServerClient | None) -> EmbeddingTables | None:
    """The tables that servers will have by rows, where there are servers; none is known yet."""
    if servers is None:
        return None
    from paceline.sync.parameter_server.embedding_tables import EmbeddingTables

    return EmbeddingTables(servers)


def _bound(forward: Callable[[Any, Any], Any], model: Any) -> Callable[[Any], Any]:
    return lambda micro: forward(model, micro)


def _unused(name: str, taken: Mapping[str, Any]) -> str:
    number = 1
    while (candidate := name if number == 1 else f"{name}_{number}") in taken:
        number += 1
    return candidate
