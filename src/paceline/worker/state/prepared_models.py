"""The models of one worker as they were when they were prepared, and the sums of their gradients over all workers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import ChainMap
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.flight_recorder import FlightRecorder
from paceline.comm.group import WorkerGroup
from paceline.comm.remote_tensors import is_remote
from paceline.comm.sharded_tensors import TensorSlice, full_tensor, is_sharded
from paceline.errors import PlanError, SyncError
from paceline.parallel.apply import place, send_from_first
from paceline.parallel.check.model_hints import ModelHints
from paceline.parallel.check.model_support import require_fit, require_open
from paceline.parallel.fully_sharded.sharded_model import ShardedModel, ShardedModels
from paceline.parallel.model_units import names_matching
from paceline.parallel.recompute import turn_caches_off
from paceline.parallel.remote_embeddings import use_remote_tables
from paceline.plan import AllReduce, Gossip, LocalSGD, ParameterServer, Plan, Raw, Sync
from paceline.sync.allreduce.buckets import NamedParameter, SentBytes
from paceline.sync.allreduce.codec_memory import CodecMemory
from paceline.sync.allreduce.gradient_reducer import GradientReducer
from paceline.sync.allreduce.gradient_sharding import GradientSharding, TensorParallelGradients
from paceline.sync.local.weight_averaging import WeightAveraging
from paceline.worker.membership.consensus import RunTogether
from paceline.worker.step.model_buffers import persistent_buffers
from paceline.worker.topology.parallel_groups import ParallelGroups, StateOwner
from paceline.worker.topology.recorded_groups import RecordedContextGroup, RecordedExpertGroup, RecordedTensorGroup

if TYPE_CHECKING:
    from paceline.parallel.check.model_check import ModelCheck
    from paceline.parallel.context.plan import ContextPlan
    from paceline.parallel.expert.find_experts import RoutedExperts
    from paceline.parallel.pipeline.find_stages import PipelinePlan
    from paceline.parallel.pipeline.stage_transfer import StageTransport
    from paceline.parallel.tensor.plan import ParameterSplit, TensorPlan
    from paceline.parallel.tensor.split_tensor import TensorGroupOps
    from paceline.sync.parameter_server.async_updates import AsyncGradients
    from paceline.sync.parameter_server.client import ServerClient
    from paceline.sync.parameter_server.embedding_tables import EmbeddingTables
    from paceline.worker.step.pipeline_stages import PipelineModel, PipelinePass

__all__ = ["PreparedModels"]

AGREED = "agreed"  # what codecs remember is filed under it where replicas take steps by themselves


class PreparedModels:
    """Knows which parameters are averaged; one `GradientReducer` for each set of models that a walk is about."""

    def __init__(
        self,
        plan: Plan,
        *,
        group: WorkerGroup,
        axes: ParallelGroups,
        shards: ShardedModels,
        recorder: FlightRecorder,
        together: RunTogether,
        note: Callable[[str], None],
        servers: ServerClient | None = None,
        tables: EmbeddingTables | None = None,
        generation: Callable[[], int] = lambda: 0,
        worker_rank: int = 0,
    ) -> None:
        """`together` does an operation of the whole run; `note` is told how a model is cut, in words. `servers`: where
        the plan has some, and the models' `tables` on them; `generation()` tells that of the members."""
        self._servers, self._generation, self._worker_rank = servers, generation, worker_rank
        self._tables = tables
        self._turns: AsyncGradients | None = None
        self._together = together
        self._plan, self._group, self._axes, self._shards, self._recorder = plan, group, axes, shards, recorder
        self._in_step = axes.by_itself() if plan.is_local else axes  # who sum gradients
        self._all_in_step = axes.whole if plan.is_local else group
        self._agreeing: Sequence[WeightAveraging] = ()  # where replicas take steps by themselves, from the first one on
        self._note = note
        self._cuts: dict[nn.Module, Mapping[str, ParameterSplit]] = {}
        self._expert_cuts: dict[nn.Module, Mapping[str, ParameterSplit]] = {}  # each worker has some experts
        self._cut_names: dict[
            str, tuple[ParameterSplit, RecordedTensorGroup]
        ] = {}  # by full names, with those who have the parts
        self._parts: set[int] = set()  # ids of parameters that are cut
        self._of_experts: set[int] = set()  # and of those that belong to experts
        self._partial: set[int] = set()  # and of whole ones of whose gradients each worker has a part
        self._staged: dict[nn.Module, PipelineModel] = {}
        self._spread: dict[nn.Module, Sequence[RoutedExperts]] = {}
        self._owners: dict[nn.Module, Mapping[str, int]] = {}  # of parameters of experts in lists: who has them
        self._homes: dict[str, StateOwner] = {}  # by full names
        self._parameters: dict[nn.Module, list[NamedParameter]] = {}  # of each model, as they were then
        self._sums: dict[tuple[int, ...], GradientReducer] = {}  # by the models that a walk is about
        self._abouts: dict[tuple[int, ...], str] = {}  # and their names
        self._names: dict[nn.Module, str] = {}
        self._remembered: dict[str, CodecMemory] = {}  # for sums that are not made yet, by their models' names
        self._num_checked: dict[Optimizer, int] = {}  # parameters of each prepared optimizer
        self._wire_before, self._raw_bytes_by_itself = SentBytes(), 0

    def __contains__(self, model: nn.Module) -> bool:
        return model in self._parameters

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def place(self, model: nn.Module, *, device: torch.device, is_fresh: bool, hints: ModelHints) -> None:
        """Convert, move, wrap and split a model as the plan says. `is_fresh`: no checkpoint will fill it.

        Raises PlanError with everything that stands against it, before anything is cut.
        """
        try:
            hints = dataclasses.replace(hints, units=names_matching(model, hints.units))
            require_fit(model, self._plan)
            require_open(model, self._plan)
        except PlanError:
            self._look(model, device=device, hints=hints)  # what stands against its layout is told with it
            raise
        if self._plan.compute.recompute != "none" and turn_caches_off(model):
            self._note(
                f"{type(model).__name__}: config.use_cache is off from now on, since blocks that are recomputed would "
                "fill the cache for generation twice"
            )
        place(
            model,
            self._plan,
            device=device,
            units=hints.units,
            cut=lambda one: self._cut(one, device=device, is_fresh=is_fresh, hints=hints),
            split=lambda one: self._split(one, is_fresh=is_fresh, hints=hints),
        )
        if self._tables is not None:
            use_remote_tables(model, self._tables)

    def add(self, model: nn.Module, name: str) -> None:
        """A model was prepared under this name."""
        self._names[model] = name
        self._parameters[model] = [(f"{name}.{key}", parameter) for key, parameter in model.named_parameters()]
        for cuts, holders in self._holders(model):
            self._cut_names.update((f"{name}.{key}", (cut, holders)) for key, cut in cuts.items())
        self._homes.update((f"{name}.{key}", home) for key, home in self.homes(model).items())

    def whole(self, name: str, tensor: Tensor | None) -> Tensor | None:
        """Return the whole of a parameter, or of its gradient, by its full name; all workers of the replica call it.

        None where nobody has one.
        """
        if tensor is not None and self._tables is not None and is_remote(tensor):
            return self._tables.whole(tensor)
        home, complete = self._homes.get(name), None
        if tensor is not None and (home is None or self._axes.is_at(home)):
            complete = full_tensor(tensor)
            if name in self._cut_names:
                cut, holders = self._cut_names[name]
                complete = cut.gathered(complete, holders)
        if home is None:
            return complete
        return self._axes.parted.broadcast_object(complete, source=self._axes.place_of(home))

    def slices(self, model: nn.Module) -> dict[str, TensorSlice]:
        """What is here of the parameters of a model that are cut, by every name that they have in it."""
        return {
            key: TensorSlice(cut.shape, cut.dim, cut.ranges(holders.index))
            for cuts, holders in self._holders(model)
            for key, cut in cuts.items()
        }

    def _holders(self, model: nn.Module) -> Iterator[tuple[Mapping[str, ParameterSplit], RecordedTensorGroup]]:
        """Parameters of a model that are cut, and those who hold the parts."""
        if self._axes.tensor_parallel_group is not None:
            yield self._cuts.get(model, {}), self._axes.tensor_parallel_group
        if self._axes.expert_parallel_group is not None:
            yield self._expert_cuts.get(model, {}), self._axes.expert_parallel_group

    def homes(self, model: nn.Module) -> Mapping[str, StateOwner]:
        """Who has the word on what of a model's state, where workers have different tensors of it: in stages, or with
        experts that are spread."""
        if self._axes.parted.size == 1:
            return {}
        if model in self._staged:
            stages = self._staged[model].homes()
        else:
            buffers = (name for name, _, _ in persistent_buffers(model))  # also those that are None as yet
            stages = dict.fromkeys([*model.state_dict(), *buffers], 0)
        owners, everybodys = self._owners.get(model, {}), set(self._expert_cuts.get(model, {}))
        if self._axes.shard_group.size > 1:  # the rows of all else are over those who have other experts, too
            named = model.named_parameters(remove_duplicate=False)
            everybodys |= {name for name, one in named if is_sharded(one) and name not in owners}
        cuts = self._cuts.get(model, {})
        return {
            name: StateOwner(
                stage=stage,
                expert=None if name in everybodys else owners.get(name, 0),
                tensor=None if name in cuts else 0,
            )
            for name, stage in stages.items()
        }

    def staged(self, model: nn.Module) -> PipelineModel | None:
        """The stages of a model that are here; None where it is not cut into stages."""
        return self._staged.get(model)

    def pipelined(self, models: Sequence[nn.Module], loss_of: Callable[[Any], Any]) -> PipelinePass | None:
        """How a stepper's micro-batches go through the stages, None without; raises PlanError for several models."""
        if self._axes.link is None:
            return None
        if len(models) > 1:
            raise PlanError(
                f"a stepper over {len(models)} models under Layout(stages={self._plan.layout.stages}): one pipeline is "
                "of one model. Make a stepper for each, or one module of all that are trained together"
            )
        from paceline.worker.step.pipeline_stages import PipelinePass

        return PipelinePass(self._staged[models[0]], loss_of)

    def sum_over(self, models: Sequence[nn.Module]) -> GradientReducer:
        """The sum of the gradients of these models together."""
        key = tuple(id(model) for model in models)
        if key not in self._sums:
            named = [pair for model in models for pair in self._parameters[model]]
            self._sums[key] = self._served(models, named) or GradientReducer(
                named,
                group=self._in_step.replica_group,
                sync=_gradient_reducer_of(self._plan.sync),
                wire=Raw() if self._plan.is_local else self._plan.wire,
                seed=self._plan.batch.seed,
                everybody=self._all_in_step,
                shard_group=None
                if self._axes.link is not None
                else self._axes.shard_group,  # there `_spreads` tells of them
                is_used=self._shards.is_used,
                shardings=self._spreads(models),
                apart=self._twins_of if self._axes.is_expert_parallel_only else None,
            )
            self._abouts[key] = about = "+".join(self._names[model] for model in models)
            if about in self._remembered and not self._plan.is_local:
                self._sums[key].remember(self._remembered.pop(about))
        return self._sums[key]

    @property
    def turns(self) -> AsyncGradients:
        """The gradients of a replica that asks for batches. Raises RuntimeError where there is no stepper yet."""
        if self._turns is None:
            raise RuntimeError(
                "a loop over batches under ParameterServer(staleness=...) or (drop=...) began before there was a "
                "stepper: the servers need its model and optimizer. Write step = worker.stepper(model, optim, loss) "
                "before the loop"
            )
        return self._turns

    def _served(self, models: Sequence[nn.Module], named: Sequence[NamedParameter]) -> GradientReducer | None:
        """The sum of gradients on parameter servers; None where the plan has none."""
        sync = self._plan.sync
        if self._servers is None or not isinstance(sync, ParameterServer):
            return None
        if self._sums:  # the servers know parameters by their places in one set of models
            (first,) = self._abouts.values()
            raise PlanError(
                f"a stepper over {'+'.join(self._names[model] for model in models)} under {sync!r}, beside one over "
                f"{first}: the servers serve a single set of models. Train all by one stepper, "
                "worker.stepper([a, b], [optim_a, optim_b], forward=...), or use sync=AllReduce()"
            )
        if self._plan.is_asynchronous:
            from paceline.sync.parameter_server.async_updates import AsyncGradients
            from paceline.sync.parameter_server.backup_workers import BackupWorkerGradients

            self._turns = (BackupWorkerGradients if self._plan.has_backup_workers else AsyncGradients)(
                named,
                models=models,
                sync=sync,
                wire=self._plan.wire,
                servers=self._servers,
                worker_rank=self._worker_rank,
                tables=self._tables,
            )
            return self._turns
        from paceline.sync.parameter_server.sync_updates import SyncServerGradients

        return SyncServerGradients(
            named,
            group=self._group,
            sync=sync,
            wire=self._plan.wire,
            servers=self._servers,
            generation=self._generation,
            tables=self._tables,
        )

    @contextlib.contextmanager
    def states_here(self) -> Iterator[None]:
        """While it lasts, the state of optimizers that run on servers is in the optimizers here, too."""
        try:
            for gradients in self._sums.values():
                gradients.fetch_state()
            yield
        finally:
            for gradients in self._sums.values():
                gradients.drop_state()

    def sums(self) -> Iterator[tuple[str, GradientReducer]]:
        """All sums between replicas that were asked for, with the names of the models that they are about; the same on
        all workers."""
        for one in self._agreeing:
            yield AGREED, one.sums
        for key, gradients in self._sums.items() if not self._plan.is_local else ():
            yield self._abouts[key], gradients

    def agree_by(
        self,
        make: Callable[[Sequence[NamedParameter], WorkerGroup, WorkerGroup], Sequence[WeightAveraging]],
        trained: Collection[int],
    ) -> Sequence[WeightAveraging]:
        """Have replicas agree on those parameters whose ids are given by what `make(parameters, group, everybody)`
        returns, in place of what did that before."""
        before, remembered = self._agreeing, self._remembered.pop(AGREED, None)
        all_named = [pair for parameters in self._parameters.values() for pair in parameters]
        named = list({id(pair[1]): pair for pair in reversed(all_named) if id(pair[1]) in trained}.values())[::-1]
        made = self._agreeing = make(named, self._axes.expert_replica_group, self._group)
        for one in before:
            self._wire_before += one.sums.bytes
        if before:
            known = [one.sums.memory().copied() for one in before]
            remembered = CodecMemory(
                ChainMap(*(dict(m.own) for m in known)), ChainMap(*(dict(m.common) for m in known))
            )
        if remembered is not None:
            for one in made:
                one.sums.remember(remembered)
        return made

    def remember(self, memories: Mapping[str, CodecMemory]) -> None:
        """Have the sums go on with what codecs remembered, by the models' names; where nothing is given, with nothing.

        Sums that are not made yet will.
        """
        self._remembered = dict(memories)
        for about, gradients in self.sums():
            gradients.remember(memories.get(about, CodecMemory({}, {})))
            self._remembered.pop(about, None)

    def replica_of(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Return (index, size): this worker's place among those who sum the gradient of a parameter."""
        group = (self._twins_of(parameter) if self._axes.is_expert_parallel_only else None) or self._axes.replica_group
        group = self._axes.expert_replica_group if self._plan.is_local else group
        return group.index, group.size

    def holders(self) -> Callable[[nn.Parameter], Hashable]:
        """Return what tells who of the replica have the same numbers of a parameter, along each axis."""
        spreads = self._spreads(list(self._parameters))
        return lambda parameter: tuple(spread.holders(parameter) for spread in spreads)

    def has_word(self) -> Callable[[nn.Parameter], bool]:
        """Return what tells whether this worker has the word on what is still to be sent of a parameter's gradient: of
        those in the replica who have parts of one sum, one has."""
        spreads = () if self._plan.is_local else self._spreads(list(self._parameters))  # otherwise there are no parts
        return lambda parameter: all(one.counts(parameter) for one in spreads if one.adds_up(parameter))

    def check(self, optimizer: Optimizer) -> None:
        """Refuse parameters that nobody averages: those of models, or of parts of them, that were not there at
        `prepare(model)`. Raises ValueError."""
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if self._num_checked.get(optimizer) == len(held):
            return
        known = {id(parameter) for parameters in self._parameters.values() for _, parameter in parameters}
        strangers = sum(id(parameter) not in known for parameter in held)
        if strangers:
            raise ValueError(
                f"{type(optimizer).__name__} holds {strangers} parameters that were in no model when it was "
                "prepared: they would not be averaged. Replace or add layers before worker.prepare(model), then make "
                "the optimizer"
            )
        self._num_checked[optimizer] = len(held)

    def members_changed(self) -> None:
        """The members are others: forget what was made for the old ones."""
        for gradients in self._sums.values():
            gradients.members_changed()
        for one in self._agreeing:
            one.sums.members_changed()

    def agreed_on(self) -> list[Tensor]:
        """The parameters that are here, and that replicas agree on which take steps by themselves."""
        names = {name for one in self._agreeing for name, _ in one.anchors}
        pairs = (pair for parameters in self._parameters.values() for pair in parameters)
        return [parameter for name, parameter in pairs if name in names and not parameter.is_meta]

    def stepped(self) -> None:
        """This replica has taken a step by itself."""
        self._raw_bytes_by_itself += sum(one.num_raw_bytes for one in self._agreeing)

    def num_bytes_sent(self) -> int:
        """What went to other workers so far."""
        inside = sum(one.bytes.num_sent for one in self._sums.values()) if self._plan.is_local else 0
        return self.wire_bytes().num_sent + inside + self._shards.traffic.num_bytes_sent + self._axes.num_bytes_sent

    def wire_bytes(self) -> SentBytes:
        """What went to other replicas so far, and what that would have been if all gradients had, as they are."""
        sent = sum((gradients.bytes for _, gradients in self.sums()), self._wire_before)
        return SentBytes(sent.num_sent, self._raw_bytes_by_itself) if self._plan.is_local else sent

    def wire_seconds(self) -> tuple[float, float]:
        """How long sums over replicas were waited for so far, and how long codecs have worked."""
        each = [(gradients.waited_in_all_s, gradients.encoding_s) for gradients in self._sums.values()]
        return sum(waited_s for waited_s, _ in each), sum(encoding_s for _, encoding_s in each)

    def largest_bucket(self) -> list[tuple[int, int]]:
        """The matrices that travel together in the largest bucket; none where nothing travels."""
        each = [gradients.largest_bucket() for gradients in self._sums.values()]
        return max(each, key=lambda shapes: sum(rows * columns for rows, columns in shapes), default=[])

    def _cut(self, model: nn.Module, *, device: torch.device, is_fresh: bool, hints: ModelHints) -> None:
        """Cut a whole model into stages, and its layers, over the workers of this replica, as the layout says.

        All is found out on the whole model; what is not of this worker's stages goes last.
        """
        axes = self._axes
        if not axes.is_split:
            return
        if self._is_cut:  # what is found may depend on it; what no checkpoint holds (other buffers) in any case
            self._make_equal([*(model.parameters() if is_fresh else ()), *model.buffers()])
        found = self._look(model, device=device, hints=hints)
        before, team = {id(parameter) for parameter in model.parameters()}, None
        if found.tensor is not None and axes.tensor_parallel_group is not None:
            team = self._cut_layers(model, found.tensor, axes.tensor_parallel_group)
        if found.experts is not None and axes.expert_parallel_group is not None:
            self._spread_experts(model, found.experts, axes.expert_parallel_group)
        if (
            found.context is not None and axes.context_parallel_group is not None
        ):  # around experts, which get plain tokens
            self._share_sequences(model, found.context, axes.context_parallel_group, tensor_parallel_group=team)
        if found.stages is not None and axes.link is not None:
            self._keep_stages(model, found.stages, axes.link, device=device)
        gone = before - {id(parameter) for parameter in model.parameters()}
        for known in (self._parts, self._partial, self._of_experts):
            known.difference_update(gone)  # another parameter may get the number

    @property
    def _is_cut(self) -> bool:
        """Whether models are changed before their rows are split."""
        return self._axes.link is not None or bool(self._axes.users)

    def _look(self, model: nn.Module, *, device: torch.device, hints: ModelHints) -> ModelCheck:
        """Look at a whole model; raises PlanError with everything that stands against the layout.

        How sequences are shared the first worker finds out, for all: it takes some copies of the model in double
        precision.
        """
        from paceline.parallel.check.model_check import check_model

        context_parallel_group, preparation_group = self._axes.context_parallel_group, self._axes.preparation_group
        found = check_model(
            model,
            self._plan,
            device=device,
            hints=hints,
            finds_context=preparation_group.index == 0,
        )
        error = found.error()
        if context_parallel_group is not None:
            error, context = preparation_group.broadcast_object((error, found.context))
            found = dataclasses.replace(found, context=context)
        if error is not None:
            raise error
        return found

    def _cut_layers(
        self, model: nn.Module, plan: TensorPlan, tensor_parallel_group: RecordedTensorGroup
    ) -> TensorGroupOps:
        """Cut the layers of a whole model over the workers of the tensor axis, and return them as layers know them."""
        from paceline.parallel.tensor.apply import apply_plan

        first = self._axes.preparation_group.broadcast_object(plan.layers)
        if first != plan.layers:
            raise SyncError(
                "the first worker cuts other layers of the model than this worker, so they do not have the same model, "
                "or the same version of torch: make it equal on all workers before worker.prepare(model)"
            )
        cut = apply_plan(model, plan, tensor_parallel_group)
        self._cuts[model] = cut.parameters
        names = dict(model.named_parameters(remove_duplicate=False))
        self._parts.update(id(names[name]) for name in cut.parameters)
        self._partial.update(map(id, cut.summed))
        self._note(plan.headline)
        return cut.ops

    def _make_equal(self, tensors: Sequence[Tensor]) -> None:
        """Give all workers of the run the first one's; a newcomer is sent all that counts later."""
        self._together(lambda: send_from_first(tensors, self._group))

    def _share_sequences(
        self,
        model: nn.Module,
        plan: ContextPlan,
        context_parallel_group: RecordedContextGroup,
        *,
        tensor_parallel_group: TensorGroupOps | None,
    ) -> None:
        """Have a model work on this worker's part of each sequence."""
        from paceline.parallel.context.apply import apply_plan

        apply_plan(model, plan, context_parallel_group, tensor_parallel_group=tensor_parallel_group)
        self._note(str(plan).partition("\n")[0])

    def _spread_experts(
        self, model: nn.Module, found: Sequence[RoutedExperts], expert_parallel_group: RecordedExpertGroup
    ) -> None:
        """Keep this worker's experts of a whole model."""
        from paceline.parallel.expert.apply import distribute_experts

        spread = distribute_experts(model, found, expert_parallel_group)
        self._expert_cuts[model], self._owners[model] = spread.splits, spread.owners
        self._spread[model] = found
        self._of_experts.update(id(p) for name, p in model.named_parameters() if spread.is_of_experts(name))
        self._note(spread.headline)

    def _twins_of(self, parameter: nn.Parameter) -> WorkerGroup | None:
        return self._in_step.expert_replica_group if id(parameter) in self._of_experts else None

    def _keep_stages(
        self, model: nn.Module, found: PipelinePlan, link: StageTransport, *, device: torch.device
    ) -> None:
        """Keep this worker's stages of a model."""
        from paceline.worker.step.pipeline_stages import PipelineModel

        if self._axes.preparation_group.broadcast_object(found.partition) != found.partition:
            raise SyncError(
                "the first worker cuts the model into other stages than this worker, so they do not have the same "
                "model, or the same version of torch: make it equal on all workers before worker.prepare(model)"
            )
        self._staged[model] = staged = PipelineModel(
            model,
            units=found.units,
            partition=found.partition,
            layout=self._plan.layout,
            group=self._axes.stages,
            link=link,
            device=device,
            precision=self._plan.compute.precision,
            note=self._note,
            still=self._still,
            shards=self._shards,
        )
        self._note(staged.headline)

    @contextlib.contextmanager
    def _still(self) -> Iterator[None]:
        """While it lasts, forwards move nothing between workers."""
        with contextlib.ExitStack() as stack:
            for one in (*self._axes.users, self._shards):
                stack.enter_context(one.still())
            yield

    def _spreads(self, models: Sequence[nn.Module]) -> list[GradientSharding]:
        """How the gradients of these models are spread over workers of the replica, axis by axis."""
        found: list[GradientSharding] = []
        if self._axes.link is not None and self._axes.shard_group.size > 1:
            # The rows of a stage's units; what is between units is whole, and has a part of its gradient everywhere.
            found.append(
                TensorParallelGradients(
                    group=self._axes.shard_group, has_part=is_sharded, is_partial=lambda p: not is_sharded(p)
                )
            )
        elif any(model in self._spread for model in models) and self._axes.shard_group.size == 1:
            is_summed = (
                not self._axes.is_expert_parallel_only
            )  # otherwise all but experts are summed over everybody at once
            found.append(
                TensorParallelGradients(
                    group=self._axes.experts,
                    has_part=lambda parameter: id(parameter) in self._of_experts,
                    is_partial=lambda parameter: is_summed and id(parameter) not in self._of_experts,
                )
            )
        if self._axes.context.size > 1 and not self._axes.spans_context:
            found.append(
                TensorParallelGradients(group=self._axes.context, has_part=lambda _: False, is_partial=lambda _: True)
            )
        if any(model in self._cuts for model in models):
            found.append(
                TensorParallelGradients(
                    group=self._axes.tensor,
                    has_part=lambda parameter: id(parameter) in self._parts,
                    is_partial=lambda parameter: id(parameter) in self._partial,
                )
            )
        if any(model in self._staged for model in models):
            from paceline.worker.step.pipeline_stages import TiedStageGradients

            found.append(TiedStageGradients([self._staged[model] for model in models if model in self._staged]))
        return found

    def _split(self, model: nn.Module, *, is_fresh: bool, hints: ModelHints) -> None:
        """Split the rows of a model's state over the workers of this replica, as the layout says."""
        axes = self._axes
        if axes.rows is None:
            return
        if is_fresh and not self._is_cut:  # otherwise it was done before
            self._make_equal([*model.parameters(), *model.buffers()])
        before = dict(model.named_parameters(remove_duplicate=False))
        self._shards.add(
            ShardedModel(
                model,
                rows=axes.rows,
                experts=self._experts_here(model),
                expert_rows=axes.expert_rows,
                units=hints.units,
                apart=self._staged[model].own_units() if model in self._staged else None,
                is_late=self._plan.layout.schedule == "zero-bubble",
                zero=self._plan.layout.zero,
                precision=self._plan.compute.precision,
                on_host=self._plan.compute.offload == "all",
                recorder=self._recorder,
                traffic=self._shards.traffic,
            )
        )
        # They are others now. None of them is partial any more: what a forward sees is a third one, gathered, and to
        # tensor parallel layers that is like any whole tensor, whose gradient they sum themselves.
        after = model.named_parameters(remove_duplicate=False)
        changed = [(id(before[name]), id(parameter)) for name, parameter in after]
        for known in (self._parts, self._of_experts):
            now = {new for old, new in changed if old in known}
            known.difference_update(old for old, _ in changed)
            known.update(now)
        self._partial.difference_update(old for old, new in changed if old != new)  # another one may get the number

    def _experts_here(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """The modules of experts of which this worker has some, with their names."""
        found = [(one.name, one.module) for one in self._spread.get(model, ())]
        return [pair for pair in found if any(not parameter.is_meta for parameter in pair[1].parameters())]


def _gradient_reducer_of(sync: Sync) -> AllReduce:
    """How gradients are summed within a step."""
    if isinstance(sync, LocalSGD | Gossip):
        return sync.sums
    return sync if isinstance(sync, AllReduce) else AllReduce()
