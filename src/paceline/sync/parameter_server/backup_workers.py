"""Parameter servers with backup workers, the workers' side: a step does not wait for its slowest replicas.

A replica asks the first server for a share of the current batch, pulls the weights if it does not have them, and pushes
its gradients while backward runs. When all servers have them, it reports its arrival, and waits for the end of the
step. The replica whose share is the last that is needed (the closer) learns which shares count. It makes the servers
add them up, checks and clips, and makes them step. All others get the result, late replicas when they arrive.

The weights of a step are the same on all replicas: if a step was taken while a replica pulled its weights, its share is
late anyway, and it asks for another one.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from paceline.comm.group import SingleWorkerGroup, WorkerGroup
from paceline.plan import ParameterServer, Wire
from paceline.schedule.backup_workers import BackupShare
from paceline.schedule.staleness_clock import AsyncStream, Pause, Save, StreamEnd
from paceline.sync.allreduce.buckets import LocalBucket, NamedParameter, SentBytes
from paceline.sync.allreduce.gradient_norm import require_real
from paceline.sync.parameter_server.async_updates import AsyncGradients, PendingCommit
from paceline.sync.parameter_server.backup_server import BackupWorkersServer
from paceline.sync.parameter_server.client import ServerClient
from paceline.sync.parameter_server.embedding_tables import EmbeddingTables, RowsBucket
from paceline.sync.parameter_server.served_parameters import check_parameter_groups, options_of
from paceline.sync.parameter_server.server import ServerFactory
from paceline.sync.parameter_server.sync_updates import ServerBucket

__all__ = ["BackupWorkerGradients"]

SUMMED = slice(4, 8)  # numbers of a gradient pass that are summed over replicas: losses and weights, each in halves


class BackupWorkerGradients(AsyncGradients):
    """One replica's share of a step's gradients."""

    carries_buffers = True

    def __init__(
        self,
        parameters: Iterable[NamedParameter],
        *,
        models: Sequence[Module],
        sync: ParameterServer,
        wire: Wire,
        servers: ServerClient,
        worker_rank: int,
        tables: EmbeddingTables | None = None,
    ) -> None:
        super().__init__(
            parameters, models=models, sync=sync, wire=wire, servers=servers, worker_rank=worker_rank, tables=tables
        )
        self._drop = sync.drop
        # One group for each server, so that each server gets buckets of its own.
        self._server_groups = [SingleWorkerGroup() for _ in range(sync.servers)]
        self._rows_group = SingleWorkerGroup()
        self._place_of = {id(parameter): place for place, (_, parameter) in enumerate(self._all)}
        self._version = -1  # of the weights that are here
        self._share = BackupShare(0, 0, 0)
        self._key: Sequence[int] = ()  # the servers' key of the step
        self._closes = False  # this replica has to end the step
        self._ended: Mapping[str, Any] = {}  # the result of the step, or the chosen shares
        self._factor, self._norm = 1.0, 0.0
        self._max_value: float | None = None  # by which the servers clip
        self._verdict: Mapping[str, Any] | None = None

    def next(
        self, stream: AsyncStream, *, wants_pause: Callable[[], bool], is_called: Callable[[], bool] = lambda: False
    ) -> BackupShare | Save | Pause | StreamEnd | None:
        """Wait for the next task, and pull the weights for it.

        `wants_pause()`: whether all workers should pause; polled until there is an answer.
        """
        while True:
            told = self._ask_for_more(stream, wants_pause=wants_pause, is_called=is_called)
            if told is None:
                return None
            version = int(told["version"])
            if version == self._version:
                self.buffers.begin()
            elif self._pull() != {version}:  # the step is over: its share is late
                self._version = -1
                continue
            self._version = version
            # They are reported again if this worker asks again before it has recorded them.
            unrecorded = told["passed_over"]
            self.pending_commits += [PendingCommit(stream.stream, number, is_skipped=True) for number in unrecorded]
            number = int(told["number"])
            match told["turn"]:
                case "share":
                    self._key, self._share = told["walk"], BackupShare(number, int(told["index"]), int(told["count"]))
                    return self._share
                case "save":
                    return Save(number)
                case "pause":
                    return Pause(number)
                case _:
                    return StreamEnd(bool(told["has_left"]))

    def begin(self, gradient_pass: int, *, step: int = 0, measures: bool = False) -> None:
        if gradient_pass:
            raise RuntimeError(
                "step(batch) was called twice for one batch: under ParameterServer(drop=...) a replica's share of a "
                "step is over when it has arrived. Call it once for each batch, or use drop=0"
            )
        self._cold.clear()  # which parameters others use is known too late to send cold buckets
        self._ended, self._verdict, self.chosen, self.is_late = {}, None, None, False
        super().begin(gradient_pass, step=step)

    def collect(self) -> list[float]:
        """Wait until it is known which shares of the step count; return their sums."""
        numbers = super().collect()
        began, about = time.perf_counter(), self._about()
        others = [self._servers.caller(number) for number in range(1, self._servers.count)]
        for caller, call in [(one, one.begin({"op": "synced", **about})) for one in others]:
            caller.answer(call)
        changed = {number: buffer.clone() for number, buffer in self.buffers.changed().items()}
        arrival = {
            "op": "arrive",
            "number": self._share.number,
            "samples": self.num_samples,
            "numbers": numbers[SUMMED],
            "used": [place for place, is_used in self._used.items() if is_used],
            **self.buffers.about(changed),
        }
        self._ended = self._ask_first(arrival, [*changed.values()]).header
        self.buffers.require_one_rule(self._ended)
        self._closes = self._ended["closes"]
        self.chosen = tuple(self._ended["shares"])
        self.is_late = self._share.index not in self.chosen
        used = set(self._ended["used"])
        self._used = {place: place in used for place in self._trained_places}
        numbers[SUMMED] = self._ended["numbers"] or [0.0] * 4
        self.waited_s += time.perf_counter() - began
        return numbers

    def land(self, *, scale: float) -> None:
        """Learn the norm of the sums, which stay on the servers."""
        began = time.perf_counter()
        self._factor, self._max_value = scale, None
        if self._closes:
            ask = {"op": "add", "walk": self._key, "shares": self.chosen, "tables": self._used_tables()}
            answers = self._servers.ask([{**ask, "places": some} for some in self._used_places()])
            self._norm = abs(scale) * math.sqrt(math.fsum(answer.header["squared"] for answer in answers))
        else:
            self._norm = float(self._ended["norm"])
        for parameter in self.parameters:
            parameter.grad = None
        self.sent_beside(self._tables.end())
        self.waited_s += time.perf_counter() - began
        self.waited_in_all_s += self.waited_s

    def norm(self, dtype: torch.dtype | None = None) -> Tensor:
        return torch.tensor(self._norm, dtype=dtype or torch.float64)

    @property
    def known_norm(self) -> float | None:
        return self._norm

    def is_finite(self) -> bool:
        return math.isfinite(self._norm)

    def broken(self) -> tuple[tuple[str, ...] | None, str | None]:
        return None if self._finite_check is None else self._finite_check.broken(), None

    def agree_on(self, verdict: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """The closer's verdict counts."""
        if not self._closes:
            return self._ended["verdict"]
        self._verdict = verdict
        return verdict

    def clip(self, max_norm: float, norm: Tensor) -> None:
        self._factor *= min(1.0, max_norm / (float(norm) + 1e-6))

    def clip_values(self, max_value: float) -> None:
        require_real(zip(self.names, self.parameters, strict=True))
        self._max_value = max_value

    def apply(self, optimizers: Sequence[Optimizer]) -> None:
        """Make the servers step if this replica is the closer. All replicas get the weights with their next share."""
        check_parameter_groups(optimizers, self._registered_groups)
        if not self._closes:
            return
        began = time.perf_counter()
        options = [options_of(optimizer) for optimizer in optimizers]
        apply: dict[str, Any] = {
            "op": "apply",
            "walk": self._key,
            "factor": self._factor,
            "norm": self._norm,
            "options": options,
        }
        apply["tables"] = self._used_tables()
        if self._max_value is not None:
            apply["max_value"] = self._max_value
        self._servers.ask([{**apply, "places": some} for some in self._used_places()])
        self._settle(is_taken=True)
        self.waited_s += time.perf_counter() - began

    def drop(self) -> None:
        """Remove all gradients; if this replica is the closer, the step has no update."""
        super().drop()
        if self._closes:
            self._settle(is_taken=False)

    @property
    def bytes(self) -> SentBytes:
        return sum((bucket.bytes for bucket in self._buckets), self._bytes_before)

    def _settle(self, *, is_taken: bool) -> None:
        """Report the end of the step to all replicas that took part."""
        told = {"op": "settle", "taken": is_taken, "norm": self._norm, "verdict": self._verdict}
        self._servers.caller(0).send({**told, **self._about()})
        self._closes = False

    def _used_places(self) -> list[list[int]]:
        """Return, for each server, the parameters for which any chosen share has a gradient."""
        return [[place for place in some if self._used[place]] for some in self._places()]

    def _register(self) -> None:
        """Do nothing: with backup workers, the set of workers is fixed."""

    def _used_tables(self) -> list[int]:
        return [place for place in self._by_rows if self._used.get(place)]

    def _make_server(self) -> ServerFactory:
        return functools.partial(BackupWorkersServer, drop=self._drop, buffers=self.buffers.here)

    def _group_of(self, parameter: Parameter) -> WorkerGroup:
        server = self._server_of[self._place_of[id(parameter)]]
        return self._rows_group if server is None else self._server_groups[server]

    def _staying(self, run: Sequence[NamedParameter], group: WorkerGroup) -> LocalBucket:
        if group is self._rows_group:
            return RowsBucket(
                run,
                tables=self._tables,
                about=lambda: {"walk": self._key, "replica": self._share.index},
                wire_dtype=self._wire_dtype,
            )
        number = next(number for number, home in enumerate(self._server_groups) if home is group)
        places = [self._place_of[id(parameter)] for _, parameter in run]

        def push(flat: Tensor) -> Callable[[], None]:
            header = {"op": "push", "walk": self._key, "replica": self._share.index, "places": places}
            return self._servers.push(number, header, flat)

        return ServerBucket(run, push=push, wire_dtype=self._wire_dtype)
