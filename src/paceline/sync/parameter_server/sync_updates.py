"""Synchronous parameter servers, the workers' side: gradients are pushed while backward runs, weights come back.

In a gradient pass this is a `GradientReducer` whose sums stay on the servers. Each bucket holds parameters of one
server, and is pushed to it as soon as it is full. The step metadata is summed among the workers. So the step remains a
transaction: until the workers' vote the servers have only gradients, which they drop when a newer generation comes.
After the vote each worker asks the servers to step; the first request counts, and each worker gets the weights.

Norms are exact: the servers report the squares of theirs before any of them steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.codec.cast import HALF
from paceline.comm.group import SingleWorkerGroup, WorkerGroup
from paceline.plan import AllReduce, Cast, ParameterServer, Wire
from paceline.schedule.parameter_placement import placed_on
from paceline.sync.allreduce.buckets import LocalBucket, NamedParameter
from paceline.sync.allreduce.gradient_norm import require_real
from paceline.sync.allreduce.gradient_reducer import GradientReducer
from paceline.sync.parameter_server.client import ServerClient, starting_turn
from paceline.sync.parameter_server.embedding_tables import EmbeddingTables, RowsBucket
from paceline.sync.parameter_server.served_parameters import (
    ParameterGroups,
    ServerParameters,
    check_parameter_groups,
    options_of,
    parameter_groups_of,
)

__all__ = ["ServerBucket", "SyncServerGradients", "wire_dtype_of"]


class SyncServerGradients(GradientReducer):
    """The gradients of a step's only gradient pass; call `serve` with their optimizers before the first pass."""

    def __init__(
        self,
        parameters: Iterable[NamedParameter],
        *,
        group: WorkerGroup,
        sync: ParameterServer,
        wire: Wire,
        servers: ServerClient,
        generation: Callable[[], int],
        tables: EmbeddingTables | None = None,
    ) -> None:
        super().__init__(parameters, group=group, sync=AllReduce(bucket_bytes=sync.bucket_bytes), wire=wire)
        self._tables = tables or EmbeddingTables(servers)
        self._by_rows = self._tables.settle(self._all)
        whole = {name: parameter for place, (name, parameter) in enumerate(self._all) if place not in self._by_rows}
        on = placed_on({name: one.numel() * one.element_size() for name, one in whole.items()}, servers=sync.servers)
        self._servers, self._generation = servers, generation
        self._wire_dtype = wire_dtype_of(wire)
        self._server_groups = [
            SingleWorkerGroup() for _ in range(sync.servers)
        ]  # one for each server: buckets are made for each apart
        self._rows_group = SingleWorkerGroup()
        self._is_served = False  # the servers have what was here
        self._place_of = {id(parameter): place for place, (_, parameter) in enumerate(self._all)}
        self._server_of = {id(parameter): on[name] for name, parameter in whole.items()}
        self._optimizers: tuple[Optimizer, ...] = ()
        self._registered_groups: ParameterGroups = ()
        self._key: tuple[int, int, int] = (0, 0, 0)
        self._factor, self._norm = 1.0, 0.0
        self._max_value: float | None = None  # by which the servers clip

    def serve(self, optimizers: Sequence[Optimizer]) -> None:
        """Run these optimizers on the servers. Raises ValueError if others already run there."""
        if self._optimizers and self._optimizers != tuple(optimizers):
            raise ValueError("under ParameterServer one stepper trains a model: give it all optimizers at once")
        self._optimizers = tuple(optimizers)

    def begin(self, gradient_pass: int, *, step: int = 0, measures: bool = False) -> None:
        super().begin(gradient_pass, step=step, measures=measures)
        self._key = (self._generation(), step, gradient_pass)
        if not self._is_served:
            self._servers.meet(self._served_part, index=starting_turn(self._all_workers), size=self._all_workers.size)
            self._registered_groups = parameter_groups_of(self._optimizers)
            for optimizer in self._optimizers:
                optimizer.state.clear()  # the servers have it now
            self._tables.leave()
            self._is_served = True
        self._servers.begin(self._key, index=self._all_workers.index, size=self._all_workers.size)
        self._tables.begin()

    def land(self, *, scale: float) -> None:
        """Learn the norm of the sums, which stay on the servers; local gradients are removed."""
        super().land(scale=scale)
        began = time.perf_counter()
        places = self._used_places()
        about = {"op": "sum", "walk": self._key, "tables": self._used_tables(), "replicas": self._all_workers.size}
        answers = self._servers.ask([{**about, "places": some} for some in places])
        self._factor, self._max_value = scale, None
        self._norm = abs(scale) * math.sqrt(math.fsum(answer.header["squared"] for answer in answers))
        self.measured_square = self._norm**2 if self._measures else None
        for parameter in self.parameters:
            parameter.grad = None
        self.sent_beside(self._tables.end())
        self.waited_s += time.perf_counter() - began

    def norm(self, dtype: torch.dtype | None = None) -> Tensor:
        return torch.tensor(self._norm, dtype=dtype or torch.float64).to(dtype or self._kind())

    @property
    def known_norm(self) -> float | None:
        return self._norm

    def is_finite(self) -> bool:
        return math.isfinite(self._norm)

    def clip(self, max_norm: float, norm: Tensor) -> None:
        self._factor *= min(1.0, max_norm / (float(norm) + 1e-6))

    def clip_values(self, max_value: float) -> None:
        require_real(zip(self.names, self.parameters, strict=True))
        self._max_value = max_value

    def broken(self) -> tuple[tuple[str, ...] | None, str | None]:
        return None if self._finite_check is None else self._finite_check.broken(), None

    @torch.no_grad()
    def apply(self, optimizers: Sequence[Optimizer]) -> None:
        """Make the servers step, and take over the weights.

        All workers have voted for the step, so it is taken even if a worker is lost meanwhile: the servers need no
        other worker for it.
        """
        check_parameter_groups(optimizers, self._registered_groups)
        options = [options_of(optimizer) for optimizer in optimizers]
        places = self._used_places()
        tables = self._used_tables()
        about = {"op": "step", "walk": self._key, "factor": self._factor, "options": options, "tables": tables}
        if self._max_value is not None:
            about["max_value"] = self._max_value
        began = time.perf_counter()
        answers = self._servers.ask([{**about, "places": some} for some in places], checks=False)
        for some, answer in zip(places, answers, strict=True):
            self._servers.take(some, answer.tensors, [parameter for _, parameter in self._all])
        self.waited_s += time.perf_counter() - began
        for optimizer in optimizers:
            optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]  # schedulers look for what torch sets and does not declare

    def fetch_state(self) -> None:
        """Fetch the state of the servers' optimizers into the optimizers here, for a checkpoint."""
        if self._is_served:
            by_rows = self._servers.fetch_state(self._optimizers, [parameter for _, parameter in self._all])
            self._tables.fetch(self._optimizers, by_rows)

    def drop_state(self) -> None:
        """Drop what `fetch_state` fetched."""
        if self._is_served:
            self._servers.drop_state(self._optimizers)
            self._tables.leave()

    def _used_places(self) -> list[list[int]]:
        """Return, for each server, the parameters that any worker used in the last gradient pass."""
        places: list[list[int]] = [[] for _ in range(self._servers.count)]
        for place, is_used in self._used.items():
            if is_used and place not in self._by_rows:
                places[self._server_of[id(self._all[place][1])]].append(place)
        return places

    def _used_tables(self) -> list[int]:
        return [place for place, is_used in self._used.items() if is_used and place in self._by_rows]

    def _served_part(self, server: int) -> ServerParameters:
        """Return what a server holds; called in its own process."""
        parts = {place: p for place, (_, p) in enumerate(self._all) if self._server_of.get(id(p)) == server}
        here = {**parts, **self._by_rows}
        others = [p for place, (_, p) in enumerate(self._all) if place not in here]
        return ServerParameters(here, self._optimizers, elsewhere=others, rows=self._tables.rows_of(server))

    def _kind(self) -> torch.dtype:
        return self.parameters[0].dtype.to_real() if self.parameters else torch.float32

    def _group_of(self, parameter: Parameter) -> WorkerGroup:
        if parameter in self._tables:
            return self._rows_group
        return self._server_groups[self._server_of[id(parameter)]]

    def _is_measured(self, parameter: Parameter) -> bool:
        return True

    def _staying(self, run: Sequence[NamedParameter], group: WorkerGroup) -> LocalBucket:
        if group is self._rows_group:
            header = {"replica": self._all_workers.index}
            return RowsBucket(
                run, tables=self._tables, about=lambda: {**header, "walk": self._key}, wire_dtype=self._wire_dtype
            )
        number = next(number for number, home in enumerate(self._server_groups) if home is group)
        places = [self._place_of[id(parameter)] for _, parameter in run]

        def push(flat: Tensor) -> Callable[[], None]:
            header = {"op": "push", "walk": self._key, "replica": self._all_workers.index, "places": places}
            return self._servers.push(number, header, flat)

        return ServerBucket(run, push=push, wire_dtype=self._wire_dtype)


class ServerBucket(LocalBucket):
    """Parameters of one server, whose gradients are pushed together."""

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        *,
        push: Callable[[Tensor], Callable[[], None]],
        wire_dtype: torch.dtype | None,
    ) -> None:
        """`push(flat)` sends, and returns a function that waits until `flat` may be overwritten."""
        super().__init__(parameters)
        sizes = [parameter.numel() for parameter in self.parameters]
        kind = self.parameters[0].dtype
        self._flat = torch.zeros(sum(sizes), dtype=wire_dtype if wire_dtype and not kind.is_complex else kind)
        self._views = [v.view(p.shape) for v, p in zip(self._flat.split(sizes), self.parameters, strict=True)]
        self._push, self._num_raw_bytes = push, sum(sizes) * kind.itemsize
        self._wait_sent: Callable[[], None] | None = None  # until it returns, the buffer is being read

    def depart(self, metadata: Sequence[float] = (), *, seed: int = 0) -> None:
        if self._wait_sent is not None:
            self._wait_sent()
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.is_sparse:
                view.zero_().add_(parameter.grad)
            else:
                view.copy_(parameter.grad)
        self._wait_sent = self._push(self._flat)
        self.bytes.num_sent += self._flat.nbytes
        self.bytes.num_raw += self._num_raw_bytes

    def scale(self, factor: float) -> None:
        """Do nothing: the servers get the factor with the step."""


def wire_dtype_of(wire: Wire) -> torch.dtype | None:
    """Return the type to which gradients are rounded for sending; None: they are sent as they are."""
    return HALF[wire.dtype] if isinstance(wire, Cast) else None
