"""The gradient reducers of one worker: one for each set of models that gradient passes are about.

Under local SGD and gossip, replicas step by themselves; then gradients are reduced inside the replica, and weight
averaging is what goes between replicas. On parameter servers, servers reduce.
"""

from __future__ import annotations

import contextlib
from collections import ChainMap
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from paceline.comm.group import WorkerGroup
from paceline.errors import PlanError
from paceline.plan import AllReduce, Gossip, LocalSGD, ParameterServer, Raw, Sync
from paceline.sync.allreduce.buckets import NamedParameter, SentBytes
from paceline.sync.allreduce.gradient_buckets import CodecMemory
from paceline.sync.allreduce.gradient_reducer import GradientReducer
from paceline.sync.local.weight_averaging import WeightAveraging
from paceline.worker.state.model_context import ModelContext
from paceline.worker.state.model_layout import ModelLayout

if TYPE_CHECKING:
    from paceline.sync.parameter_server.async_updates import AsyncGradients

__all__ = ["GradientReducers"]

AVERAGED = "agreed"  # what codecs remember is filed under it where replicas take steps by themselves


class GradientReducers:
    """Makes the reducers when they are first asked for, and knows what they have sent."""

    def __init__(
        self,
        context: ModelContext,
        layout: ModelLayout,
        *,
        names: Mapping[nn.Module, str],
        parameters: Mapping[nn.Module, Sequence[NamedParameter]],
    ) -> None:
        """`names` and `parameters` are of the models that are prepared so far."""
        self._plan, self._layout, self._names, self._parameters = context.plan, layout, names, parameters
        self._group, self._axes, self._shards = context.group, context.axes, context.shards
        self._servers, self._tables = context.servers, context.tables
        self._generation, self._worker_rank = context.generation, context.worker_rank
        is_local = self._plan.is_local
        self._step_axes = self._axes.by_itself() if is_local else self._axes  # of those that reduce gradients
        self._step_group = self._axes.whole if is_local else self._group
        self._reducers: dict[tuple[int, ...], GradientReducer] = {}  # by the ids of a set of models
        self._titles: dict[tuple[int, ...], str] = {}  # and the names of these
        self._averaging: Sequence[
            WeightAveraging
        ] = ()  # where replicas take steps by themselves, from the first one on
        self._async_gradients: AsyncGradients | None = None
        self._remembered: dict[str, CodecMemory] = {}  # for reducers that are not made yet, by their models' names
        self._wire_before, self._raw_bytes_by_itself = SentBytes(), 0

    # The reducers.

    def sum_over(self, models: Sequence[nn.Module]) -> GradientReducer:
        """The reducer of the gradients of these models together."""
        key = tuple(id(model) for model in models)
        if key not in self._reducers:
            named = [pair for model in models for pair in self._parameters[model]]
            self._reducers[key] = self._on_servers(models, named) or self._made(models, named)
            self._titles[key] = title = "+".join(self._names[model] for model in models)
            if title in self._remembered and not self._plan.is_local:
                self._reducers[key].remember(self._remembered.pop(title))
        return self._reducers[key]

    def _made(self, models: Sequence[nn.Module], named: Sequence[NamedParameter]) -> GradientReducer:
        return GradientReducer(
            named,
            group=self._step_axes.replica_group,
            sync=_gradient_reducer_of(self._plan.sync),
            wire=Raw() if self._plan.is_local else self._plan.wire,
            seed=self._plan.batch.seed,
            all_workers=self._step_group,
            # With stages, `shardings` has the rows of their units.
            shard_group=None if self._axes.link is not None else self._axes.shard_group,
            is_used=self._shards.is_used,
            shardings=self._layout.shardings(models),
            group_for=self._expert_replicas if self._axes.is_expert_parallel_only else None,
        )

    def _on_servers(self, models: Sequence[nn.Module], named: Sequence[NamedParameter]) -> GradientReducer | None:
        """The reducer that sends gradients to parameter servers; None where the plan has none."""
        sync = self._plan.sync
        if self._servers is None or not isinstance(sync, ParameterServer):
            return None
        if self._reducers:  # the servers know parameters by their places in one set of models
            (first,) = self._titles.values()
            raise PlanError(
                f"a stepper over {'+'.join(self._names[model] for model in models)} under {sync!r}, beside one over "
                f"{first}: the servers serve a single set of models. Train all by one stepper, "
                "worker.stepper([a, b], [optim_a, optim_b], forward=...), or use sync=AllReduce()"
            )
        if self._plan.is_asynchronous:
            from paceline.sync.parameter_server.async_updates import AsyncGradients
            from paceline.sync.parameter_server.backup_workers import BackupWorkerGradients

            self._async_gradients = (BackupWorkerGradients if self._plan.has_backup_workers else AsyncGradients)(
                named,
                models=models,
                sync=sync,
                wire=self._plan.wire,
                servers=self._servers,
                worker_rank=self._worker_rank,
                tables=self._tables,
            )
            return self._async_gradients
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

    @property
    def async_gradients(self) -> AsyncGradients:
        """The gradients of a replica that asks for batches. Raises RuntimeError where there is no stepper yet."""
        if self._async_gradients is None:
            raise RuntimeError(
                "a loop over batches under ParameterServer(staleness=...) or (drop=...) began before there was a "
                "stepper: the servers need its model and optimizer. Write step = worker.stepper(model, optim, loss) "
                "before the loop"
            )
        return self._async_gradients

    @contextlib.contextmanager
    def states_here(self) -> Iterator[None]:
        """While it lasts, the state of optimizers that run on servers is in the optimizers here, too."""
        try:
            for gradients in self._reducers.values():
                gradients.fetch_state()
            yield
        finally:
            for gradients in self._reducers.values():
                gradients.drop_state()

    def members_changed(self) -> None:
        """The members are others: forget what was made for the old ones."""
        for gradients in self._reducers.values():
            gradients.members_changed()
        for one in self._averaging:
            one.sums.members_changed()

    # What goes between replicas, and what its codecs remember.

    def sums(self) -> Iterator[tuple[str, GradientReducer]]:
        """All reducers between replicas that were asked for, with the names of their models; the same on all
        workers."""
        for one in self._averaging:
            yield AVERAGED, one.sums
        for key, gradients in self._reducers.items() if not self._plan.is_local else ():
            yield self._titles[key], gradients

    def average_by(
        self,
        make: Callable[[Sequence[NamedParameter], WorkerGroup, WorkerGroup], Sequence[WeightAveraging]],
        trained: Collection[int],
    ) -> Sequence[WeightAveraging]:
        """Have replicas average those parameters whose ids are given by what `make(parameters, group, everybody)`
        returns, in place of what did that before."""
        before, remembered = self._averaging, self._remembered.pop(AVERAGED, None)
        all_named = [pair for parameters in self._parameters.values() for pair in parameters]
        named = list({id(pair[1]): pair for pair in reversed(all_named) if id(pair[1]) in trained}.values())[::-1]
        made = self._averaging = make(named, self._axes.expert_replica_group, self._group)
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

    def averaged(self) -> list[Tensor]:
        """The parameters that are here, and that replicas average which take steps by themselves."""
        names = {name for one in self._averaging for name, _ in one.anchors}
        pairs = (pair for parameters in self._parameters.values() for pair in parameters)
        return [parameter for name, parameter in pairs if name in names and not parameter.is_meta]

    def remember(self, memories: Mapping[str, CodecMemory]) -> None:
        """Have reducers go on with what codecs remembered, by their models' names; where nothing is given, with
        nothing. Reducers that are not made yet will."""
        self._remembered = dict(memories)
        for title, gradients in self.sums():
            gradients.remember(memories.get(title, CodecMemory({}, {})))
            self._remembered.pop(title, None)

    # Which worker has which part of a gradient.

    def replica_of(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Return (index, size): this worker's place among those that reduce the gradient of a parameter."""
        group = self._expert_replicas(parameter) if self._axes.is_expert_parallel_only else None
        group = self._axes.expert_replica_group if self._plan.is_local else group or self._axes.replica_group
        return group.index, group.size

    def _expert_replicas(self, parameter: nn.Parameter) -> WorkerGroup | None:
        return self._step_axes.expert_replica_group if self._layout.is_of_experts(parameter) else None

    def holders(self) -> Callable[[nn.Parameter], Hashable]:
        """Return a function whose value is equal on workers of the replica with the same numbers of a parameter."""
        shardings = self._layout.shardings(list(self._parameters))
        return lambda parameter: tuple(sharding.holders(parameter) for sharding in shardings)

    def has_word(self) -> Callable[[nn.Parameter], bool]:
        """Return a function that says whether this worker keeps the error feedback of a parameter's gradient: of the
        workers of a replica that have parts of one sum, one does."""
        # Where replicas take steps by themselves there are no parts.
        shardings = () if self._plan.is_local else self._layout.shardings(list(self._parameters))
        return lambda parameter: all(one.counts(parameter) for one in shardings if one.adds_up(parameter))

    # What was sent.

    def stepped(self) -> None:
        """This replica has taken a step by itself."""
        self._raw_bytes_by_itself += sum(one.num_raw_bytes for one in self._averaging)

    def num_bytes_sent(self) -> int:
        """The bytes that went to other workers so far."""
        inside = sum(one.bytes.num_sent for one in self._reducers.values()) if self._plan.is_local else 0
        return self.wire_bytes().num_sent + inside + self._shards.traffic.num_bytes_sent + self._axes.num_bytes_sent

    def wire_bytes(self) -> SentBytes:
        """The bytes that went to other replicas so far, and what all gradients would have been, as they are."""
        sent = sum((gradients.bytes for _, gradients in self.sums()), self._wire_before)
        return SentBytes(sent.num_sent, self._raw_bytes_by_itself) if self._plan.is_local else sent

    def wire_seconds(self) -> tuple[float, float]:
        """The seconds that reductions over replicas were waited for so far, and those that codecs have worked."""
        each = [(gradients.waited_in_all_s, gradients.encoding_s) for gradients in self._reducers.values()]
        return sum(waited_s for waited_s, _ in each), sum(encoding_s for _, encoding_s in each)

    def largest_bucket(self) -> list[tuple[int, int]]:
        """The matrices that travel together in the largest bucket; none where nothing travels."""
        each = [gradients.largest_bucket() for gradients in self._reducers.values()]
        return max(each, key=lambda shapes: sum(rows * columns for rows, columns in shapes), default=[])


def _gradient_reducer_of(sync: Sync) -> AllReduce:
    """How gradients are reduced within a step."""
    if isinstance(sync, LocalSGD | Gossip):
        return sync.sums
    return sync if isinstance(sync, AllReduce) else AllReduce()
